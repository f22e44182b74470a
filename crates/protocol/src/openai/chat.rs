//! A request of `/v1/chat/completions`.

use branchline_core::{Error, Result};

use crate::fields::Fields;
use crate::logprobs::{LogprobRequest, MAX_TOP};
use crate::openai::completion::best_of;
use crate::openai::{ChatTemplateInput, StreamOptions, Tools, read_template_input};
use crate::prompt::{Routing, request_id};
use crate::refused::unimplemented;
use crate::{Dialect, Fit, Limits, Sampling};

/// A validated chat request.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// What to render.
    pub input: ChatTemplateInput,
    /// What may be called.
    pub tools: Tools,
    /// Tell reasoning apart from the answer.
    pub separate_reasoning: bool,
    /// How to sample.
    pub sampling: Sampling,
    /// Which logprobs to return; none for no `logprobs` in the answer.
    pub logprobs: Option<LogprobRequest>,
    /// How to deliver.
    pub delivery: StreamOptions,
    /// Where to run.
    pub routing: Routing,
    /// The client's own id.
    pub rid: Option<String>,
}

impl ChatRequest {
    /// How a chat is fitted into the context.
    pub const FIT: Fit<'static> = Fit { prompt: "messages", limit: "max_completion_tokens", default: None };

    /// Reads and checks a request.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unimplemented`, naming the field.
    pub fn read(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        let tools = Tools::read(fields)?;
        let mut sampling = Sampling::read(fields, Dialect::OpenAi, limits)?;
        best_of(fields, sampling.sequences())?;
        if fields.bool("echo")?.unwrap_or(false) {
            return Err(unimplemented("echo", "a chat's prompt is not repeated; leave it out"));
        }
        sampling.constrain(tools.constraint()?)?;
        Ok(Self {
            input: read_template_input(fields, &tools)?,
            tools,
            separate_reasoning: fields.bool("separate_reasoning")?.unwrap_or(true),
            sampling,
            logprobs: logprobs(fields)?,
            delivery: StreamOptions::read(fields)?,
            routing: Routing::read(fields)?,
            rid: fields.get("rid").map(|value| request_id(value, "rid")).transpose()?,
        })
    }
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<LogprobRequest>> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.unsigned("top_logprobs", 0..=MAX_TOP)?;
    if let (Some(1..), false) = (top, wanted) {
        return Err(Error::invalid(
            "top_logprobs",
            "`top_logprobs` is given without `logprobs`; set `logprobs` to true or leave it out",
        ));
    }
    Ok(wanted.then(|| LogprobRequest { output: true, top: top.unwrap_or(0), ..LogprobRequest::default() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const LIMITS: Limits = Limits { vocab_size: 100, context_length: 50, pool_tokens: 50 };

    fn read(mut value: Value) -> Result<ChatRequest> {
        value["messages"] = json!([{"role": "user", "content": "x"}]);
        ChatRequest::read(&Fields::of(&value, "").unwrap(), LIMITS)
    }

    #[test]
    fn a_bare_chat_sets_nothing() {
        let request = read(json!({})).unwrap();
        assert_eq!(request.sampling, Sampling::default());
        assert_eq!(request.logprobs, None);
        assert!(!request.delivery.stream);
    }

    #[test]
    fn top_logprobs_need_logprobs() {
        let request = read(json!({"logprobs": true, "top_logprobs": 3})).unwrap();
        assert_eq!(request.logprobs.unwrap().top, 3);
        for bad in [
            json!({"top_logprobs": 3}),
            json!({"logprobs": true, "top_logprobs": 129}),
            json!({"logprobs": 1}),
        ] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }

    #[test]
    fn unknown_and_harmless_fields_are_passed_over() {
        let value = json!({"user": "u", "metadata": {}, "store": true, "service_tier": "auto", "x_new": 1});
        assert!(read(value).is_ok());
    }

    #[test]
    fn options_of_completions_and_of_other_servers_are_refused_unless_they_ask_for_nothing() {
        for (name, bad, good) in [
            ("echo", json!(true), json!(false)),
            ("best_of", json!(3), json!(1)),
            ("allowed_token_ids", json!([1, 2]), json!(null)),
            ("num_beams", json!(4), json!(1)),
            ("length_penalty", json!(0.5), json!(1.0)),
            ("return_token_ids", json!(true), json!(false)),
        ] {
            assert_eq!(read(json!({name: bad})).unwrap_err().field.as_deref(), Some(name));
            assert!(read(json!({name: good})).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_forced_call_and_a_format_exclude_each_other() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let forced = read(json!({"tools": tools, "tool_choice": "required"})).unwrap();
        assert_eq!(forced.sampling.constraint.unwrap().field, "tool_choice");
        let both =
            json!({"tools": tools, "tool_choice": "required", "response_format": {"type": "json_object"}});
        assert_eq!(read(both).unwrap_err().field.as_deref(), Some("tool_choice"));
    }

    #[test]
    fn fields_of_later_work_are_refused_by_name() {
        for (name, value) in [("lora_path", json!("x")), ("resume", json!({"a": 1})), ("lease", json!("l"))] {
            let error = read(json!({name: value})).expect_err(name);
            assert_eq!(error.field.as_deref(), Some(name));
        }
    }
}
