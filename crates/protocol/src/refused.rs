//! Fields that are known and not implemented: refused by name, never ignored.
//!
//! One table for all families. A value that asks for nothing (null, false, `"text"`, an empty object) passes.

use branchline_core::{Error, ErrorCode, Result};
use serde_json::Value;

use crate::Dialect;
use crate::fields::Fields;

/// Names refused at the top level of a request and inside `sampling_params`.
const NAMES: &[&str] = &[
    "allowed_token_ids",
    "audio",
    "bad_words",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "chat_template",
    "custom_logit_processor",
    "custom_params",
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
    "return_token_ids",
    "return_tokens_as_token_ids",
    "session_id",
    "session_params",
    "stop_regex",
    "truncate_prompt_tokens",
    "use_beam_search",
    "video_data",
    "web_search_options",
];

/// Options of other servers' samplers, with the value that changes nothing.
const NEUTRAL: &[(&str, f64)] = &[
    ("dry_multiplier", 0.0),
    ("dynatemp_range", 0.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("length_penalty", 1.0),
    ("mirostat", 0.0),
    ("mirostat_mode", 0.0),
    ("num_beams", 1.0),
    ("smoothing_factor", 0.0),
    ("tfs", 1.0),
    ("tfs_z", 1.0),
    ("top_a", 0.0),
    ("typical_p", 1.0),
    ("xtc_probability", 0.0),
];

/// Fields of another family that would be lost here, and what to send instead.
const FOREIGN_TO_OPENAI: &[(&str, &str)] = &[
    ("input_ids", "send it to /generate, or as `prompt` to /v1/completions"),
    ("max_new_tokens", "send `max_tokens`"),
    ("min_new_tokens", "send `min_tokens`"),
    ("sampling_params", "send its options at the top level"),
    ("sampling_seed", "send `seed`"),
];

/// All that `/generate` knows inside `sampling_params`, besides what is refused by name.
const NATIVE: &[&str] = &[
    "choice",
    "ebnf",
    "enforcement",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "include_stop_str_in_output",
    "json_schema",
    "logit_bias",
    "max_new_tokens",
    "min_new_tokens",
    "min_p",
    "n",
    "no_stop_trim",
    "presence_penalty",
    "regex",
    "repetition_penalty",
    "require_reasoning",
    "return_grammar_info",
    "response_format",
    "sampling_seed",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "stream_interval",
    "structural_tag",
    "structured_outputs",
    "temperature",
    "thinking_budget",
    "top_k",
    "top_p",
];

/// Refuses what belongs to another family: nothing that a client asks for is dropped in silence.
pub(crate) fn foreign(fields: &Fields<'_>, dialect: Dialect) -> Result<()> {
    match dialect {
        Dialect::OpenAi => {
            for (name, remedy) in FOREIGN_TO_OPENAI {
                if fields.get(name).is_some() {
                    let path = fields.path(name);
                    let text = format!("`{path}` is not a field of this endpoint: {remedy}");
                    return Err(Error::invalid(path, text));
                }
            }
            Ok(())
        }
        Dialect::Native => match fields.names().find(|name| fields.get(name).is_some() && !is_native(name)) {
            None => Ok(()),
            Some(name) => {
                let path = fields.path(name);
                let remedy = match name {
                    "max_tokens" | "max_completion_tokens" => "send `max_new_tokens`",
                    "min_tokens" => "send `min_new_tokens`",
                    _ => "check its spelling, or leave it out",
                };
                let text = format!("`{path}` is not a sampling option: {remedy}");
                Err(Error::invalid(path, text))
            }
        },
    }
}

fn is_native(name: &str) -> bool {
    NATIVE.contains(&name) || NAMES.contains(&name) || NEUTRAL.iter().any(|(known, _)| *known == name)
}

/// Refuses every field of the table that asks for something.
pub(crate) fn check(fields: &Fields<'_>) -> Result<()> {
    check_but(fields, &[])
}

/// As [`check`], for a family that implements some of them.
pub(crate) fn check_but(fields: &Fields<'_>, known: &[&str]) -> Result<()> {
    for name in NAMES.iter().filter(|name| !known.contains(name)) {
        if fields.get(name).is_some_and(asks) {
            return Err(unimplemented(&fields.path(name), "leave it out"));
        }
    }
    for (name, neutral) in NEUTRAL {
        if fields.get(name).is_some_and(|value| value.as_f64() != Some(*neutral)) {
            return Err(unimplemented(&fields.path(name), &format!("leave it out or send {neutral}")));
        }
    }
    if let Some(kinds) = fields.array("modalities")?
        && kinds.iter().any(|kind| kind.as_str() != Some("text"))
    {
        return Err(unimplemented(&fields.path("modalities"), "only [\"text\"] is served"));
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
    fn other_servers_samplers_are_refused_unless_they_change_nothing() {
        for (name, neutral) in NEUTRAL {
            assert!(check(&Fields::of(&json!({*name: neutral}), "").unwrap()).is_ok(), "{name}");
            let value = json!({*name: neutral + 0.5});
            let error = check(&Fields::of(&value, "").unwrap()).expect_err(name);
            assert_eq!((error.code, error.field.as_deref()), (ErrorCode::Unimplemented, Some(*name)));
        }
        assert!(check(&Fields::of(&json!({"modalities": ["text"]}), "").unwrap()).is_ok());
        let error = check(&Fields::of(&json!({"modalities": ["text", "audio"]}), "").unwrap()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("modalities"));
    }

    #[test]
    fn fields_of_another_family_are_named_with_what_to_send() {
        let read = |value: serde_json::Value, dialect| foreign(&Fields::of(&value, "").unwrap(), dialect);
        for (name, remedy) in FOREIGN_TO_OPENAI {
            let error = read(json!({*name: 1}), Dialect::OpenAi).expect_err(name);
            assert_eq!(error.field.as_deref(), Some(*name));
            assert!(error.message.contains(remedy), "{}", error.message);
            assert!(read(json!({*name: null}), Dialect::OpenAi).is_ok());
        }
        let error = read(json!({"max_tokens": 3}), Dialect::Native).unwrap_err();
        assert_eq!(error.message, "`max_tokens` is not a sampling option: send `max_new_tokens`");
        for unknown in ["foo", "temprature", "min_tokens"] {
            let error = read(json!({unknown: 3}), Dialect::Native).expect_err(unknown);
            assert_eq!((error.code, error.field.as_deref()), (ErrorCode::InvalidArgument, Some(unknown)));
        }
        for name in NATIVE.iter().chain(NAMES) {
            assert!(read(json!({*name: 1}), Dialect::Native).is_ok(), "{name}");
        }
    }

    #[test]
    fn values_that_ask_for_nothing_pass() {
        let value =
            json!({"lora_path": null, "return_hidden_states": false, "session_params": {}, "bad_words": []});
        assert!(check(&Fields::of(&value, "").unwrap()).is_ok());
    }
}
