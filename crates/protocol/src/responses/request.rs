//! A request of `/v1/responses`. The conversation before it is the caller's to put in front.

use branchline_core::{Error, Result};
use serde_json::{Map, Value, json};

use crate::constraint::{Constraint, response_format};
use crate::fields::{Fields, wrong};
use crate::openai::{ChatRequest, ChatTemplateInput, StreamOptions, Tools, template_kwargs};
use crate::prompt::{Routing, request_id};
use crate::refused::unimplemented;
use crate::{Dialect, Fit, Limits, Sampling};

/// A validated request.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponsesRequest {
    /// What is run; its messages are those of `input` only.
    pub chat: ChatRequest,
    /// The input as items, each with an id to come.
    pub items: Vec<Value>,
    /// System text of this turn alone.
    pub instructions: Option<String>,
    /// The response that this one goes on from.
    pub previous: Option<String>,
    /// Keep it.
    pub store: bool,
    /// Answer at once and run on.
    pub background: bool,
    /// What the answer repeats of the request.
    pub echo: Map<String, Value>,
}

/// Fields that would change the answer and are not served.
const UNSERVED: [&str; 4] = ["conversation", "prompt", "max_tool_calls", "context_management"];

impl ResponsesRequest {
    /// How a prompt is fitted into the context.
    pub const FIT: Fit<'static> = Fit { prompt: "input", limit: "max_output_tokens", default: None };

    /// Reads and checks a request.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unimplemented`, naming the field.
    pub fn read(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        for name in UNSERVED {
            if fields.get(name).is_some() {
                return Err(unimplemented(name, "leave it out"));
            }
        }
        let items = items(fields)?;
        let stream = fields.bool("stream")?.unwrap_or(false);
        let background = fields.bool("background")?.unwrap_or(false);
        let store = fields.bool("store")?.unwrap_or(true);
        check_modes(fields, stream, background, store)?;
        let tools = Tools::read_flat(fields)?;
        let mut kwargs = template_kwargs(fields)?;
        if let Some(reasoning) = fields.object("reasoning")?
            && let Some(effort) = reasoning.string("effort")?
        {
            kwargs.entry("reasoning_effort").or_insert(effort.into());
            kwargs.entry("enable_thinking").or_insert((!matches!(effort, "none" | "minimal")).into());
        }
        let messages: Vec<Value> = items.iter().filter_map(message_of).collect();
        let chat = ChatRequest {
            input: ChatTemplateInput {
                messages: Value::Array(messages),
                tools: tools.for_template(),
                add_generation_prompt: true,
                continue_final_message: false,
                kwargs,
            },
            sampling: sampling(fields, &tools, limits)?,
            tools,
            separate_reasoning: true,
            logprobs: None,
            delivery: StreamOptions { stream, ..StreamOptions::default() },
            routing: Routing::read(fields)?,
            rid: fields.get("rid").map(|value| request_id(value, "rid")).transpose()?,
        };
        Ok(Self {
            chat,
            items,
            instructions: fields.string("instructions")?.map(str::to_owned),
            previous: fields.string("previous_response_id")?.map(str::to_owned),
            store,
            background,
            echo: echo(fields),
        })
    }
}

fn check_modes(fields: &Fields<'_>, stream: bool, background: bool, store: bool) -> Result<()> {
    if background && stream {
        return Err(unimplemented("background", "a background response is not streamed; set one of the two"));
    }
    if background && !store {
        let message = "`background` needs `store`, or nobody could ask for the answer; leave `store` out";
        return Err(Error::invalid("background", message));
    }
    if fields.string("truncation")?.is_some_and(|mode| mode != "disabled") {
        return Err(unimplemented("truncation", "only \"disabled\" is served; leave it out"));
    }
    if fields.unsigned("top_logprobs", 0..=20)?.is_some_and(|count| count > 0) {
        return Err(unimplemented("top_logprobs", "use /v1/chat/completions for logprobs"));
    }
    Ok(())
}

fn sampling(fields: &Fields<'_>, tools: &Tools, limits: Limits) -> Result<Sampling> {
    let mut sampling = Sampling::read(fields, Dialect::OpenAi, limits)?;
    if sampling.sequences() > 1 {
        return Err(unimplemented("n", "this API has one answer a request; leave it out"));
    }
    if let Some(most) = fields.unsigned("max_output_tokens", 1..=u32::MAX)? {
        sampling.max_tokens = Some(most);
    }
    if let Some(text) = fields.object("text")?
        && let Some(format) = text.object("format")?
        && let Some(form) = response_format(&format)?
    {
        sampling.constrain(Some(Constraint { form, field: "text.format".to_owned() }))?;
    }
    sampling.constrain(tools.constraint()?)?;
    Ok(sampling)
}

/// What an answer repeats, with the defaults of what was not sent.
fn echo(fields: &Fields<'_>) -> Map<String, Value> {
    let defaults = [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("parallel_tool_calls", true.into()),
        ("previous_response_id", Value::Null),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("store", true.into()),
        ("background", false.into()),
        ("temperature", 1.0.into()),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", "auto".into()),
        ("tools", json!([])),
        ("top_p", 1.0.into()),
        ("truncation", "disabled".into()),
        ("user", Value::Null),
    ];
    let one =
        |(name, default): (&str, Value)| (name.to_owned(), fields.get(name).cloned().unwrap_or(default));
    defaults.into_iter().map(one).collect()
}

fn items(fields: &Fields<'_>) -> Result<Vec<Value>> {
    match fields.get("input") {
        None => Err(Error::invalid("input", "`input` is missing; send a string or an array of items")),
        Some(Value::String(text)) if text.is_empty() => {
            Err(Error::invalid("input", "`input` is empty; send at least one character"))
        }
        Some(Value::String(text)) => {
            let content = json!([{"type": "input_text", "text": text}]);
            Ok(vec![json!({"type": "message", "role": "user", "content": content})])
        }
        Some(Value::Array(items)) if items.is_empty() => {
            Err(Error::invalid("input", "`input` is empty; send at least one item"))
        }
        Some(Value::Array(items)) => {
            items.iter().enumerate().map(|(at, item)| normalise(item, &format!("input[{at}]"))).collect()
        }
        Some(other) => Err(wrong("input", "a string or an array of items", other)),
    }
}

/// Checks one input item and gives it its full form.
///
/// # Errors
/// `InvalidArgument` or `Unimplemented`, naming the path.
pub fn normalise(item: &Value, path: &str) -> Result<Value> {
    let fields = Fields::of(item, path)?;
    match fields.string("type")?.unwrap_or("message") {
        "message" => {
            let role = match fields.string("role")? {
                Some(role @ ("user" | "assistant" | "system" | "developer")) => role,
                other => {
                    let shown = other.map_or(Value::Null, Value::from);
                    return Err(wrong(
                        &fields.path("role"),
                        "\"user\", \"assistant\", \"system\" or \"developer\"",
                        &shown,
                    ));
                }
            };
            let content = fields.get("content").unwrap_or(&Value::Null);
            let text = crate::openai::text(content, &fields.path("content"))?;
            let kind = if role == "assistant" { "output_text" } else { "input_text" };
            let mut part = json!({"type": kind, "text": text});
            if role == "assistant" {
                part["annotations"] = json!([]);
            }
            Ok(json!({"type": "message", "role": role, "status": "completed", "content": [part]}))
        }
        "function_call" => {
            let (id, name) = (fields.required("call_id")?, fields.required("name")?);
            let arguments = fields.required("arguments")?;
            Ok(
                json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments, "status": "completed"}),
            )
        }
        "function_call_output" => {
            let id = fields.required("call_id")?;
            let output =
                crate::openai::text(fields.get("output").unwrap_or(&Value::Null), &fields.path("output"))?;
            Ok(json!({"type": "function_call_output", "call_id": id, "output": output}))
        }
        "reasoning" => {
            let mut item = item.clone();
            item["type"] = "reasoning".into();
            Ok(item)
        }
        other => Err(unimplemented(
            &fields.path("type"),
            &format!("{other:?} items are not served; send messages, function calls and their outputs"),
        )),
    }
}

/// The chat message of an item; none for reasoning, which models don't want repeated.
pub fn message_of(item: &Value) -> Option<Value> {
    match item["type"].as_str()? {
        "message" => {
            let role = match item["role"].as_str()? {
                "developer" => "system",
                role => role,
            };
            let parts = item["content"].as_array()?;
            let text: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            Some(json!({"role": role, "content": text.join("\n")}))
        }
        "function_call" => {
            let text = item["arguments"].as_str().unwrap_or("{}");
            let arguments = serde_json::from_str::<Value>(text).unwrap_or_else(|_| text.into());
            let function = json!({"name": item["name"], "arguments": arguments});
            let call = json!({"id": item["call_id"], "type": "function", "function": function});
            Some(json!({"role": "assistant", "content": "", "tool_calls": [call]}))
        }
        "function_call_output" => {
            Some(json!({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { vocab_size: 100, context_length: 50, pool_tokens: 50 };

    fn read(value: Value) -> Result<ResponsesRequest> {
        ResponsesRequest::read(&Fields::of(&value, "").unwrap(), LIMITS)
    }

    #[test]
    fn a_string_is_one_message_and_defaults_are_repeated() {
        let request = read(json!({"input": "Hi", "max_output_tokens": 7})).unwrap();
        assert_eq!(request.chat.input.messages, json!([{"role": "user", "content": "Hi"}]));
        assert_eq!(request.chat.sampling.max_tokens, Some(7));
        assert!(request.store && !request.background);
        assert_eq!(request.echo["tool_choice"], "auto");
        assert_eq!(request.echo["max_output_tokens"], 7);
        assert_eq!(request.chat.rid, None);
        assert_eq!(read(json!({"input": "Hi", "rid": "job-1"})).unwrap().chat.rid.as_deref(), Some("job-1"));
    }

    #[test]
    fn items_become_chat_messages() {
        let request = read(json!({"input": [
            {"role": "developer", "content": "S"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"x\": 1}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
        ]}))
        .unwrap();
        assert_eq!(
            request.chat.input.messages,
            json!([
                {"role": "system", "content": "S"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ])
        );
        assert_eq!(request.items.len(), 5);
    }

    #[test]
    fn a_format_is_a_constraint_of_its_own_name() {
        let format = json!({"type": "json_schema", "name": "x", "schema": {"type": "object"}});
        let request = read(json!({"input": "x", "text": {"format": format}})).unwrap();
        assert_eq!(request.chat.sampling.constraint.unwrap().field, "text.format");
    }

    #[test]
    fn bad_requests_are_refused_by_their_path() {
        for (value, field) in [
            (json!({}), "input"),
            (json!({"input": ""}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": 3}), "input"),
            (json!({"input": [{"role": "tool", "content": "x"}]}), "input[0].role"),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
                "input[0].content[0].type",
            ),
            (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
            (json!({"input": [{"type": "function_call", "name": "f"}]}), "input[0].call_id"),
            (json!({"input": "x", "background": true, "stream": true}), "background"),
            (json!({"input": "x", "background": true, "store": false}), "background"),
            (json!({"input": "x", "truncation": "auto"}), "truncation"),
            (json!({"input": "x", "rid": ""}), "rid"),
            (json!({"input": "x", "top_logprobs": 2}), "top_logprobs"),
            (json!({"input": "x", "conversation": "c"}), "conversation"),
            (json!({"input": "x", "max_output_tokens": 0}), "max_output_tokens"),
            (json!({"input": "x", "text": {"format": {"type": "xml"}}}), "text.format"),
        ] {
            assert_eq!(read(value.clone()).unwrap_err().field.as_deref(), Some(field), "{value}");
        }
    }
}
