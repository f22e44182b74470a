//! `/v1/tokenize` and `/v1/detokenize`.

use branchline_core::{Error, Result};
use serde::Serialize;

use crate::fields::{Fields, as_tokens};
use crate::openai::{ChatTemplateInput, Tools, read_template_input};

/// What to tokenise.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenizeInput {
    /// Plain text.
    Text(String),
    /// Messages, rendered by the model's template first.
    Chat(ChatTemplateInput),
}

/// A request of `/v1/tokenize`.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizeRequest {
    /// Text or messages.
    pub input: TokenizeInput,
    /// Add the tokens that the tokenizer puts around a plain prompt; absent for what a completion would do.
    pub add_special_tokens: Option<bool>,
}

impl TokenizeRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field; also if both or neither of `prompt` and `messages` are given.
    pub fn read(fields: &Fields<'_>) -> Result<Self> {
        let input = match (fields.string("prompt")?, fields.get("messages")) {
            (Some(_), Some(_)) => {
                return Err(Error::invalid(
                    "prompt",
                    "`prompt` and `messages` are both given; send one of them",
                ));
            }
            (None, None) => {
                return Err(Error::invalid("prompt", "`prompt` is missing; send it or `messages`"));
            }
            (Some(text), None) => TokenizeInput::Text(text.to_owned()),
            (None, Some(_)) => TokenizeInput::Chat(read_template_input(fields, &Tools::read(fields)?)?),
        };
        Ok(Self { input, add_special_tokens: fields.bool("add_special_tokens")? })
    }
}

/// The answer of `/v1/tokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenizeResponse {
    /// The ids.
    pub tokens: Vec<u32>,
    /// How many.
    pub count: usize,
    /// Characters of the text that was tokenised.
    pub char_count: usize,
    /// The model's context length.
    pub max_model_len: u32,
}

/// A request of `/v1/detokenize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The ids.
    pub tokens: Vec<u32>,
    /// Leave special tokens out; absent for no.
    pub skip_special_tokens: bool,
}

impl DetokenizeRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field for a wrong type or an id outside the vocabulary.
    pub fn read(fields: &Fields<'_>, vocab_size: u32) -> Result<Self> {
        let items = fields
            .array("tokens")?
            .ok_or_else(|| Error::invalid("tokens", "`tokens` is missing; send an array of token ids"))?;
        Ok(Self {
            tokens: as_tokens(items, "tokens", vocab_size)?,
            skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(false),
        })
    }
}

/// The answer of `/v1/detokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DetokenizeResponse {
    /// The text; bytes that are no UTF-8 become U+FFFD.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn exactly_one_of_prompt_and_messages_is_taken() {
        let read = |value: serde_json::Value| TokenizeRequest::read(&Fields::of(&value, "").unwrap());
        assert!(read(json!({"prompt": ""})).is_ok());
        assert!(read(json!({"messages": [{"role": "user", "content": "Hi"}]})).is_ok());
        assert!(read(json!({})).is_err());
        assert!(read(json!({"prompt": "a", "messages": []})).is_err());
    }

    #[test]
    fn detokenize_checks_its_ids() {
        let read = |value: serde_json::Value| DetokenizeRequest::read(&Fields::of(&value, "").unwrap(), 10);
        assert_eq!(read(json!({"tokens": [1, 9]})).unwrap().tokens, [1, 9]);
        assert_eq!(read(json!({"tokens": [10]})).unwrap_err().field.as_deref(), Some("tokens[0]"));
        assert!(read(json!({})).is_err());
    }
}
