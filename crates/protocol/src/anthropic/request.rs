//! A request of `/v1/messages` or `/v1/messages/count_tokens`.

use branchline_core::{Error, Result};
use serde_json::{Map, Value, json};

use crate::constraint::{Constraint, response_format};
use crate::fields::{Fields, wrong};
use crate::openai::{ChatRequest, ChatTemplateInput, StreamOptions, Tools, template_kwargs};
use crate::prompt::{Routing, request_id};
use crate::refused::unimplemented;
use crate::{Dialect, Fit, Limits, Sampling};

/// A validated request, in the chat form.
#[derive(Debug, Clone, PartialEq)]
pub struct MessagesRequest {
    /// What is run.
    pub chat: ChatRequest,
}

impl MessagesRequest {
    /// How a prompt is fitted into the context.
    pub const FIT: Fit<'static> = Fit { prompt: "messages", limit: "max_tokens", default: None };

    /// Reads a request that is to be answered.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unimplemented`, naming the field.
    pub fn read(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        if fields.get("max_tokens").is_none() {
            return Err(Error::invalid(
                "max_tokens",
                "`max_tokens` is missing; say how many tokens may be generated",
            ));
        }
        Self::read_any(fields, limits)
    }

    /// Reads a request whose tokens are to be counted: `max_tokens` may be absent.
    ///
    /// # Errors
    /// As [`MessagesRequest::read`].
    pub fn read_any(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        let tools = Tools::read_anthropic(fields)?;
        let mut sampling = Sampling::read(fields, Dialect::OpenAi, limits)?;
        if sampling.sequences() > 1 {
            return Err(unimplemented("n", "this API has one answer a request; leave it out"));
        }
        sampling.stop = stops(fields)?;
        sampling.constrain(output_format(fields)?)?;
        sampling.constrain(tools.constraint()?)?;
        let (messages, continues) = messages(fields)?;
        let thinking = thinking(fields)?;
        let mut kwargs = template_kwargs(fields)?;
        if let Some((enabled, budget)) = thinking {
            kwargs.entry("enable_thinking").or_insert(enabled.into());
            sampling.terms.allowance = budget;
        }
        Ok(Self {
            chat: ChatRequest {
                input: ChatTemplateInput {
                    messages: Value::Array(messages),
                    tools: tools.for_template(),
                    add_generation_prompt: !continues,
                    continue_final_message: continues,
                    kwargs,
                },
                tools,
                separate_reasoning: true,
                sampling,
                logprobs: None,
                delivery: StreamOptions {
                    stream: fields.bool("stream")?.unwrap_or(false),
                    ..StreamOptions::default()
                },
                routing: Routing::read(fields)?,
                rid: fields.get("rid").map(|value| request_id(value, "rid")).transpose()?,
            },
        })
    }
}

/// `output_config.format`, or `output_format`, its name before.
fn output_format(fields: &Fields<'_>) -> Result<Option<Constraint>> {
    let config = fields.object("output_config")?;
    let named = match &config {
        Some(config) => config.object("format")?.map(|format| (format, config.path("format"))),
        None => None,
    };
    let older = fields.object("output_format")?.map(|format| (format, fields.path("output_format")));
    let Some((format, field)) = named.or(older) else { return Ok(None) };
    Ok(response_format(&format)?.map(|form| Constraint { form, field }))
}

/// Whether the model is to think, and the most tokens of it.
fn thinking(fields: &Fields<'_>) -> Result<Option<(bool, Option<u32>)>> {
    let Some(thinking) = fields.object("thinking")? else { return Ok(None) };
    match thinking.string("type")? {
        Some("enabled" | "adaptive") => Ok(Some((true, thinking.unsigned("budget_tokens", 1..=u32::MAX)?))),
        Some("disabled") => Ok(Some((false, None))),
        other => {
            let shown = other.map_or(Value::Null, Value::from);
            Err(wrong(&thinking.path("type"), "\"enabled\" or \"disabled\"", &shown))
        }
    }
}

/// The chat API's own reading, under this API's name.
fn stops(fields: &Fields<'_>) -> Result<Vec<String>> {
    let Some(items) = fields.array("stop_sequences")? else { return Ok(Vec::new()) };
    let mut map = Map::new();
    map.insert("stop".to_owned(), Value::Array(items.to_vec()));
    let limits = Limits { vocab_size: 1, context_length: 1, pool_tokens: 1 };
    let renamed = |text: String| text.replace("stop", "stop_sequences");
    Sampling::read(&Fields::new(&map, ""), Dialect::OpenAi, limits).map(|sampling| sampling.stop).map_err(
        |error| {
            let field = error.field.clone().map(renamed).unwrap_or_default();
            Error::invalid(field.as_str(), error.message.replacen("`stop", "`stop_sequences", 1))
        },
    )
}

/// Chat messages, and whether the last one is to be continued: it is the assistant's own.
fn messages(fields: &Fields<'_>) -> Result<(Vec<Value>, bool)> {
    let items = fields
        .array("messages")?
        .ok_or_else(|| Error::invalid("messages", "`messages` is missing; send an array of messages"))?;
    if items.is_empty() {
        return Err(Error::invalid("messages", "`messages` is empty; send at least one message"));
    }
    let mut out = Vec::with_capacity(items.len() + 1);
    if let Some(system) = fields.get("system") {
        let text = crate::openai::text(system, &fields.path("system"))?;
        if !text.is_empty() {
            out.push(json!({"role": "system", "content": text}));
        }
    }
    for (position, item) in items.iter().enumerate() {
        message(item, &format!("messages[{position}]"), &mut out)?;
    }
    let last = out.last();
    let continues = last.is_some_and(|last| last["role"] == "assistant" && last.get("tool_calls").is_none());
    Ok((out, continues))
}

fn message(item: &Value, path: &str, out: &mut Vec<Value>) -> Result<()> {
    let fields = Fields::of(item, path)?;
    let role = match fields.string("role")? {
        Some(role @ ("user" | "assistant" | "system")) => role,
        other => {
            let shown = other.map_or(Value::Null, Value::from);
            return Err(wrong(&fields.path("role"), "\"user\" or \"assistant\"", &shown));
        }
    };
    let path = fields.path("content");
    let blocks = match fields.get("content") {
        Some(Value::String(text)) => {
            out.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Some(Value::Array(blocks)) => blocks,
        Some(other) => return Err(wrong(&path, "a string or an array of blocks", other)),
        None => {
            return Err(Error::invalid(
                path.as_str(),
                format!("`{path}` is missing; send a string or blocks"),
            ));
        }
    };
    let mut said = Said::default();
    for (position, block) in blocks.iter().enumerate() {
        said.block(block, &format!("{path}[{position}]"), role, out)?;
    }
    said.into_message(role, out);
    Ok(())
}

/// What the blocks of one message say.
#[derive(Default)]
struct Said {
    texts: Vec<String>,
    reasoning: Vec<String>,
    calls: Vec<Value>,
    /// A tool's result was among them.
    results: bool,
}

impl Said {
    fn block(&mut self, block: &Value, path: &str, role: &str, out: &mut Vec<Value>) -> Result<()> {
        let block = Fields::of(block, path)?;
        let kind = block.string("type")?.unwrap_or_default();
        match (kind, role) {
            ("text", _) => self.texts.push(block.required("text")?.to_owned()),
            ("thinking", "assistant") => self.reasoning.push(block.required("thinking")?.to_owned()),
            ("redacted_thinking", "assistant") => {}
            ("tool_use", "assistant") => {
                let input = block.map("input")?.cloned().unwrap_or_default();
                let function = json!({"name": block.required("name")?, "arguments": input});
                self.calls
                    .push(json!({"id": block.required("id")?, "type": "function", "function": function}));
            }
            ("tool_result", "user") => {
                let id = block.required("tool_use_id")?;
                let text = match block.get("content") {
                    None => String::new(),
                    Some(content) => crate::openai::text(content, &block.path("content"))?,
                };
                self.results = true;
                out.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
            }
            ("", _) => {
                let path = block.path("type");
                return Err(Error::invalid(path.as_str(), format!("`{path}` is missing; send \"text\"")));
            }
            (other, role) => {
                let remedy = format!("{other:?} blocks of the {role} are not served; send text or tools");
                return Err(unimplemented(&block.path("type"), &remedy));
            }
        }
        Ok(())
    }

    fn into_message(self, role: &str, out: &mut Vec<Value>) {
        if self.texts.is_empty() && self.calls.is_empty() && (self.results || self.reasoning.is_empty()) {
            if !self.results {
                out.push(json!({"role": role, "content": ""}));
            }
            return;
        }
        let mut message = json!({"role": role, "content": self.texts.join("\n")});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.join("\n").into();
        }
        if !self.calls.is_empty() {
            message["tool_calls"] = self.calls.into();
        }
        out.push(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { vocab_size: 100, context_length: 50, pool_tokens: 50 };

    fn read(mut value: Value) -> Result<ChatRequest> {
        if value.get("messages").is_none() {
            value["messages"] = json!([{"role": "user", "content": "x"}]);
        }
        if value.get("max_tokens").is_none() {
            value["max_tokens"] = 5.into();
        }
        MessagesRequest::read(&Fields::of(&value, "").unwrap(), LIMITS).map(|request| request.chat)
    }

    #[test]
    fn a_format_of_the_output_is_a_constraint_under_either_name() {
        let format = json!({"type": "json_schema", "schema": {"type": "object"}});
        for (body, field) in [
            (json!({"output_config": {"format": format}}), "output_config.format"),
            (json!({"output_format": format}), "output_format"),
        ] {
            assert_eq!(read(body).unwrap().sampling.constraint.expect(field).field, field);
        }
        assert_eq!(read(json!({"output_config": {"effort": "low"}})).unwrap().sampling.constraint, None);
        let error = read(json!({"output_config": {"format": {"type": "xml"}}})).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("output_config.format"));
    }

    #[test]
    fn blocks_become_chat_messages() {
        let chat = read(json!({"system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}], "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "u1", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u1", "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "go on"}]},
        ]}))
        .unwrap();
        assert_eq!(
            chat.input.messages,
            json!([
                {"role": "system", "content": "S"},
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "c", "reasoning_content": "t",
                    "tool_calls": [{"id": "u1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
                {"role": "tool", "tool_call_id": "u1", "content": "r"},
                {"role": "user", "content": "go on"},
            ])
        );
        assert!(chat.input.add_generation_prompt && !chat.input.continue_final_message);
    }

    #[test]
    fn a_last_message_of_the_assistant_is_continued() {
        let chat = read(
            json!({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure"}]}),
        );
        assert!(chat.unwrap().input.continue_final_message);
    }

    #[test]
    fn options_have_their_own_names() {
        let chat =
            read(json!({"stop_sequences": ["END"], "thinking": {"type": "enabled", "budget_tokens": 9}}))
                .unwrap();
        assert_eq!(chat.sampling.stop, ["END"]);
        assert_eq!(chat.input.kwargs["enable_thinking"], true);
        assert_eq!((chat.sampling.terms.budget, chat.sampling.terms.allowance), (None, Some(9)));
        assert_eq!((chat.sampling.max_tokens, chat.rid), (Some(5), None));
        assert_eq!(read(json!({"rid": "job-1"})).unwrap().rid.as_deref(), Some("job-1"));
    }

    #[test]
    fn bad_requests_are_refused_by_their_path() {
        for (value, field) in [
            (json!({"stop_sequences": [""]}), "stop_sequences[0]"),
            (json!({"stop_sequences": "x"}), "stop_sequences"),
            (json!({"n": 2}), "n"),
            (json!({"rid": 7}), "rid"),
            (json!({"thinking": {"type": "on"}}), "thinking.type"),
            (json!({"thinking": {"type": "enabled", "budget_tokens": 0}}), "thinking.budget_tokens"),
            (json!({"thinking": {"type": "enabled", "budget_tokens": "9"}}), "thinking.budget_tokens"),
            (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
                "messages[0].content[0].type",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
                "messages[0].content[0].text",
            ),
            (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
            (json!({"messages": []}), "messages"),
            (json!({"tools": [{"name": "f", "type": "bash_20250124"}]}), "tools[0].type"),
        ] {
            assert_eq!(read(value.clone()).unwrap_err().field.as_deref(), Some(field), "{value}");
        }
        let bare = json!({"messages": [{"role": "user", "content": "x"}]});
        let fields = Fields::of(&bare, "").unwrap();
        assert_eq!(MessagesRequest::read(&fields, LIMITS).unwrap_err().field.as_deref(), Some("max_tokens"));
        assert!(MessagesRequest::read_any(&fields, LIMITS).is_ok());
    }
}
