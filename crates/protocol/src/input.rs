//! One prompt in any of the forms that the families have: for paths that belong to none.

use branchline_core::{Error, Result};
use serde_json::Value;

use crate::fields::{Fields, wrong};
use crate::openai::{ChatTemplateInput, Tools, read_template_input};
use crate::prompt::{Prompt, text_prompt, token_prompt};
use crate::{Limits, refused};

/// One prompt.
#[derive(Debug, Clone, PartialEq)]
pub enum PromptInput {
    /// Text or ids.
    Prompt(Prompt),
    /// A chat, to be rendered by the model's template.
    Messages(Box<ChatTemplateInput>),
}

/// The fields that can hold a prompt.
const NAMES: [&str; 4] = ["prompt", "text", "input_ids", "messages"];

impl PromptInput {
    /// Reads the one of `prompt`, `text`, `input_ids` and `messages` that is given.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field, also for none and for two; `Unimplemented` for known fields not served.
    pub fn read(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        refused::check(fields)?;
        let given: Vec<&str> = NAMES.into_iter().filter(|name| fields.get(name).is_some()).collect();
        let [name] = given[..] else {
            let message = match given.first() {
                None => format!("`prompt` is missing; send one of {}", NAMES.join(", ")),
                Some(_) => format!("`{}` are all given; send one of them", given.join("`, `")),
            };
            return Err(Error::invalid(fields.path(given.first().unwrap_or(&"prompt")), message));
        };
        let path = fields.path(name);
        match (name, fields.get(name)) {
            ("messages", _) => {
                Ok(Self::Messages(Box::new(read_template_input(fields, &Tools::read(fields)?)?)))
            }
            ("prompt" | "text", Some(Value::String(text))) => Ok(Self::Prompt(text_prompt(text, &path)?)),
            ("prompt" | "input_ids", Some(Value::Array(ids))) => {
                Ok(Self::Prompt(token_prompt(ids, &path, limits)?))
            }
            ("text", Some(other)) => Err(wrong(&path, "a string", other)),
            ("prompt", Some(other)) => Err(wrong(&path, "a string or an array of token ids", other)),
            (_, other) => Err(wrong(&path, "an array of token ids", other.unwrap_or(&Value::Null))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<PromptInput> {
        let limits = Limits { vocab_size: 100, context_length: 10, pool_tokens: 10 };
        PromptInput::read(&Fields::of(&value, "").unwrap(), limits)
    }

    #[test]
    fn each_form_is_read() {
        let ids = PromptInput::Prompt(Prompt::Tokens(vec![1, 2]));
        let text = PromptInput::Prompt(Prompt::Text("a".into()));
        assert_eq!(read(json!({"prompt": "a"})).unwrap(), text);
        assert_eq!(read(json!({"text": "a"})).unwrap(), text);
        assert_eq!(read(json!({"prompt": [1, 2]})).unwrap(), ids);
        assert_eq!(read(json!({"input_ids": [1, 2]})).unwrap(), ids);
        let chat = read(json!({"messages": [{"role": "user", "content": "x"}]})).unwrap();
        assert!(matches!(chat, PromptInput::Messages(_)));
    }

    #[test]
    fn none_two_and_wrong_ones_are_refused_with_their_place() {
        for (value, field) in [
            (json!({}), "prompt"),
            (json!({"prompt": "a", "messages": []}), "prompt"),
            (json!({"text": "a", "input_ids": [1]}), "text"),
            (json!({"prompt": 7}), "prompt"),
            (json!({"prompt": ["a"]}), "prompt[0]"),
            (json!({"prompt": ""}), "prompt"),
            (json!({"input_ids": []}), "input_ids"),
            (json!({"input_ids": "a"}), "input_ids"),
            (json!({"input_ids": [100]}), "input_ids[0]"),
            (json!({"text": [1]}), "text"),
            (json!({"messages": "a"}), "messages"),
        ] {
            let error = read(value.clone()).expect_err(&value.to_string());
            assert_eq!(error.field.as_deref(), Some(field), "{value}");
        }
    }
}
