//! A request of `/v1/completions`.

use branchline_core::{Error, Result};

use crate::fields::{Fields, wrong};
use crate::logprobs::{LogprobRequest, MAX_TOP};
use crate::openai::StreamOptions;
use crate::prompt::{Prompt, Routing, check_sequences, prompts, request_id};
use crate::refused::unimplemented;
use crate::{Dialect, Fit, Limits, Sampling};

/// A validated completion request.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// The prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// How to sample each.
    pub sampling: Sampling,
    /// Put the prompt in front of the text.
    pub echo: bool,
    /// Which logprobs to return; none for `logprobs: null` in the answer.
    pub logprobs: Option<LogprobRequest>,
    /// How to deliver.
    pub delivery: StreamOptions,
    /// Where to run.
    pub routing: Routing,
    /// The client's own id.
    pub rid: Option<String>,
}

impl CompletionRequest {
    /// How a prompt is fitted into the context: this endpoint's limit is 16 tokens unless the client says more.
    pub const FIT: Fit<'static> = Fit { prompt: "prompt", limit: "max_tokens", default: Some(16) };

    /// Reads and checks a request.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unimplemented`, naming the field.
    pub fn read(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        let value = fields
            .get("prompt")
            .ok_or_else(|| Error::invalid("prompt", "`prompt` is missing; send a string or token ids"))?;
        let echo = fields.bool("echo")?.unwrap_or(false);
        let sampling = Sampling::read(fields, Dialect::OpenAi, limits)?;
        best_of(fields, sampling.sequences())?;
        if fields.string("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
            return Err(unimplemented("suffix", "leave it out"));
        }
        let prompts = prompts(value, "prompt", limits)?;
        check_sequences("n", prompts.iter().map(|_| sampling.sequences()))?;
        Ok(Self {
            prompts,
            sampling,
            echo,
            logprobs: logprobs(fields, echo)?,
            delivery: StreamOptions::read(fields)?,
            routing: Routing::read(fields)?,
            rid: fields.get("rid").map(|value| request_id(value, "rid")).transpose()?,
        })
    }
}

/// Ranking more candidates than are returned is not served; asking for as many as are returned changes nothing.
pub(super) fn best_of(fields: &Fields<'_>, n: u32) -> Result<()> {
    match fields.unsigned("best_of", 1..=u32::MAX)? {
        Some(best) if best != 1 && best != n => {
            Err(unimplemented("best_of", &format!("{best} differs from `n`, which is {n}; leave it out")))
        }
        _ => Ok(()),
    }
}

/// 0 is a request: the chosen token's logprob without alternatives.
fn logprobs(fields: &Fields<'_>, echo: bool) -> Result<Option<LogprobRequest>> {
    if let Some(value @ serde_json::Value::Bool(_)) = fields.get("logprobs") {
        return Err(wrong(
            "logprobs",
            &format!("an integer from 0 to {MAX_TOP} (the number of alternatives)"),
            value,
        ));
    }
    let top = fields.unsigned("logprobs", 0..=MAX_TOP)?;
    Ok(top.map(|top| LogprobRequest {
        output: true,
        top,
        input_start: echo.then_some(0),
        ..LogprobRequest::default()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const LIMITS: Limits = Limits { vocab_size: 100, context_length: 50, pool_tokens: 50 };

    fn read(value: Value) -> Result<CompletionRequest> {
        CompletionRequest::read(&Fields::of(&value, "").unwrap(), LIMITS)
    }

    #[test]
    fn logprobs_zero_is_a_request() {
        assert_eq!(read(json!({"prompt": "Hi", "logprobs": 0})).unwrap().logprobs.map(|l| l.top), Some(0));
        assert_eq!(read(json!({"prompt": "Hi"})).unwrap().logprobs, None);
        assert!(read(json!({"prompt": "Hi", "logprobs": true})).is_err());
    }

    #[test]
    fn echo_with_logprobs_asks_for_the_prompt_too() {
        let request = read(json!({"prompt": "Hi", "echo": true, "max_tokens": 0, "logprobs": 1})).unwrap();
        assert_eq!(request.logprobs.unwrap().input_start, Some(0));
        assert_eq!(request.sampling.max_tokens, Some(0));
    }

    #[test]
    fn prompts_times_n_are_bounded_together() {
        let ask = |prompts: usize| read(json!({"prompt": vec!["x"; prompts], "n": 128}));
        assert_eq!(ask(8).unwrap().prompts.len(), 8);
        let error = ask(9).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("n"));
        assert!(error.message.contains("1152") && error.message.contains("1024"), "{}", error.message);
    }

    #[test]
    fn best_of_and_suffix_are_refused_unless_they_ask_for_nothing() {
        for good in [json!({"best_of": 1}), json!({"best_of": 3, "n": 3}), json!({"suffix": ""})] {
            let mut value = good.clone();
            value["prompt"] = json!("x");
            assert!(read(value).is_ok(), "{good}");
        }
        for (bad, field) in [(json!({"best_of": 3}), "best_of"), (json!({"suffix": "end"}), "suffix")] {
            let mut value = bad;
            value["prompt"] = json!("x");
            assert_eq!(read(value).unwrap_err().field.as_deref(), Some(field));
        }
    }

    #[test]
    fn a_missing_prompt_is_refused() {
        assert_eq!(read(json!({})).unwrap_err().field.as_deref(), Some("prompt"));
    }
}
