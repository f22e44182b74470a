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
    "function_call",
    "functions",
    "grammar",
    "guided_decoding_backend",
    "audio_data",
    "image_data",
    "input_embeds",
    "kv_transfer_params",
    "logits_processors",
    "lora",
    "lora_path",
    "lora_request",
    "adapter",
    "prediction",
    "prompt_logprobs",
    "resume",
    "return_hidden_states",
    "session_id",
    "session_params",
    "stop_regex",
    "truncate_prompt_tokens",
    "use_beam_search",
    "video_data",
    "web_search_options",
];

/// Refuses every field of the table that asks for something.
pub(crate) fn check(fields: &Fields<'_>) -> Result<()> {
    for name in NAMES {
        if fields.get(name).is_some_and(asks) {
            return Err(unimplemented(&fields.path(name), "leave it out"));
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
        let value =
            json!({"lora_path": null, "return_hidden_states": false, "session_params": {}, "bad_words": []});
        assert!(check(&Fields::of(&value, "").unwrap()).is_ok());
    }
}
