//! Fields that are known and not implemented: refused by name, never ignored.
//!
//! One table for all families. A value that asks for nothing (null, false, `"text"`, an empty object) passes.

use branchline_core::{Error, ErrorCode, Result};
use serde_json::Value;

use crate::fields::Fields;

/// Names refused at the top level of a request and inside `sampling_params`.
const NAMES: &[&str] = &[
    "audio",
    "bad_words",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "chat_template",
    "custom_logit_processor",
    "documents",
    "draft",
    "ebnf",
    "function_call",
    "functions",
    "grammar",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "audio_data",
    "image_data",
    "input_embeds",
    "json_schema",
    "kv_transfer_params",
    "logits_processors",
    "lora",
    "lora_path",
    "lora_request",
    "adapter",
    "prediction",
    "prompt_logprobs",
    "regex",
    "resume",
    "return_hidden_states",
    "session_id",
    "session_params",
    "stop_regex",
    "structural_tag",
    "structured_outputs",
    "truncate_prompt_tokens",
    "use_beam_search",
    "video_data",
    "web_search_options",
];

/// Refuses every field of the table that asks for something, and a `response_format` other than text.
pub(crate) fn check(fields: &Fields<'_>) -> Result<()> {
    for name in NAMES {
        if fields.get(name).is_some_and(asks) {
            return Err(unimplemented(&fields.path(name), "leave it out"));
        }
    }
    if let Some(format) = fields.object("response_format")? {
        match format.string("type")? {
            Some("text") => {}
            None if fields.map("response_format")?.is_none_or(serde_json::Map::is_empty) => {}
            None => {
                let message = "`response_format` has no `type`; leave it out or send {\"type\": \"text\"}";
                return Err(Error::invalid(fields.path("response_format"), message));
            }
            Some(other) => {
                return Err(unimplemented(
                    &fields.path("response_format"),
                    &format!("{other:?} was asked for; leave it out or use \"text\""),
                ));
            }
        }
    }
    Ok(())
}

/// A refusal of a known field.
pub(crate) fn unimplemented(path: &str, remedy: &str) -> Error {
    Error::new(ErrorCode::Unimplemented, format!("`{path}` is not implemented: {remedy}")).with_field(path)
}

fn asks(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_name_of_the_table_is_refused_with_its_own_name() {
        for name in NAMES {
            let value = json!({*name: "x"});
            let error = check(&Fields::of(&value, "").unwrap()).expect_err(name);
            assert_eq!(error.code, ErrorCode::Unimplemented);
            assert_eq!(error.field.as_deref(), Some(*name));
            assert!(error.message.contains(name));
        }
    }

    #[test]
    fn values_that_ask_for_nothing_pass() {
        let value = json!({"regex": null, "return_hidden_states": false, "structured_outputs": {},
            "bad_words": [], "response_format": {"type": "text"}});
        assert!(check(&Fields::of(&value, "").unwrap()).is_ok());
    }

    #[test]
    fn a_response_format_without_a_type_is_refused_unless_it_is_empty() {
        for format in [json!({"a": 1}), json!({"type": null})] {
            let value = json!({"response_format": format});
            let error = check(&Fields::of(&value, "").unwrap()).expect_err("no type");
            assert_eq!(error.code, ErrorCode::InvalidArgument);
            assert_eq!(error.field.as_deref(), Some("response_format"));
        }
        assert!(check(&Fields::of(&json!({"response_format": {}}), "").unwrap()).is_ok());
    }

    #[test]
    fn a_json_response_format_is_refused_by_name() {
        let value = json!({"response_format": {"type": "json_schema", "json_schema": {}}});
        let error = check(&Fields::of(&value, "").unwrap()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("response_format"));
        assert!(error.message.contains("json_schema"));
    }
}
