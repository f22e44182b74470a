//! What logprobs are asked for, and one position of an answer. The forms of the families are in their modules.

use crate::Limits;
use branchline_core::{Error, Result};

/// Alternatives a position may list.
pub const MAX_TOP: u32 = 128;

/// Which logprobs a request wants.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogprobRequest {
    /// Of each generated token.
    pub output: bool,
    /// Likeliest alternatives a position.
    pub top: u32,
    /// First prompt position; none for no prompt logprobs.
    pub input_start: Option<u32>,
    /// Ids whose logprob is wanted at each position.
    pub token_ids: Vec<u32>,
}

/// The logprobs of one position.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Position {
    /// The token there.
    pub id: u32,
    /// Its logprob; none at the first prompt position.
    pub logprob: Option<f32>,
    /// Likeliest alternatives, in falling order.
    pub top: Vec<(u32, f32)>,
    /// The ids asked for, in the order asked.
    pub chosen: Vec<(u32, f32)>,
}

/// Spells token ids; implemented over a vocabulary.
pub trait Spelling {
    /// The token's text; bytes that are no UTF-8 become U+FFFD.
    fn text(&self, id: u32) -> String;
    /// The token's bytes.
    fn bytes(&self, id: u32) -> Vec<u8>;
    /// Whether the answer's text has the token; special ones may be left out of it.
    fn shows(&self, _id: u32) -> bool {
        true
    }
}

/// Refuses a start of prompt logprobs past the prompt's end.
///
/// # Errors
/// `InvalidArgument` naming both numbers.
pub(crate) fn check_start(start: u32, prompt_tokens: usize, field: &str) -> Result<()> {
    if (start as usize) < prompt_tokens {
        return Ok(());
    }
    Err(Error::invalid(
        field,
        format!(
            "`{field}` is {start} and the prompt has {prompt_tokens} tokens; use a position below that, or -1"
        ),
    ))
}

impl LogprobRequest {
    /// Checks what depends on the tokenised prompt.
    ///
    /// # Errors
    /// `InvalidArgument` if the start lies past the prompt.
    pub fn fit(&self, prompt_tokens: usize, field: &str) -> Result<()> {
        self.input_start.map_or(Ok(()), |start| check_start(start, prompt_tokens, field))
    }

    /// `top` cut to the vocabulary.
    pub fn top_within(&self, limits: Limits) -> u32 {
        self.top.min(limits.vocab_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_past_the_prompt_is_refused_with_both_numbers() {
        let request = LogprobRequest { input_start: Some(8), ..LogprobRequest::default() };
        assert!(request.fit(9, "logprob_start_len").is_ok());
        let message = request.fit(8, "logprob_start_len").unwrap_err().message;
        assert!(message.contains("is 8") && message.contains("8 tokens"), "{message}");
    }
}
