//! `stream` and `stream_options`.

use branchline_core::{Error, Result};

use crate::fields::Fields;

/// How an answer is delivered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// As events.
    pub stream: bool,
    /// One last chunk with usage and no choices.
    pub include_usage: bool,
    /// Usage so far in every chunk.
    pub continuous_usage: bool,
}

impl StreamOptions {
    /// Reads the fields.
    ///
    /// # Errors
    /// `InvalidArgument` for wrong types, or options without a stream.
    pub fn read(fields: &Fields<'_>) -> Result<Self> {
        let stream = fields.bool("stream")?.unwrap_or(false);
        let Some(options) = fields.object("stream_options")? else {
            return Ok(Self { stream, ..Self::default() });
        };
        if !stream {
            return Err(Error::invalid(
                "stream_options",
                "`stream_options` is given without `stream`; set `stream` to true or leave it out",
            ));
        }
        Ok(Self {
            stream,
            include_usage: options.bool("include_usage")?.unwrap_or(false),
            continuous_usage: options.bool("continuous_usage_stats")?.unwrap_or(false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn usage_is_opt_in_and_needs_a_stream() {
        let read = |value: serde_json::Value| StreamOptions::read(&Fields::of(&value, "").unwrap());
        assert!(!read(json!({"stream": true})).unwrap().include_usage);
        assert!(
            !read(json!({"stream": true, "stream_options": {"include_usage": false}})).unwrap().include_usage
        );
        assert!(
            read(json!({"stream": true, "stream_options": {"include_usage": true}})).unwrap().include_usage
        );
        assert_eq!(
            read(json!({"stream_options": {"include_usage": true}})).unwrap_err().field.as_deref(),
            Some("stream_options")
        );
    }
}
