//! What a response says so far: its items, and the events that tell of each step in their order.

use branchline_core::{Error, Result};
use branchline_protocol::openai::{FinishReason, Usage};
use serde_json::{Map, Value, json};

use super::super::intake::Head;
use super::super::speech::Said;
use crate::dispatch::End;

/// Where events go: their name and body.
pub(super) type Emit<'a> = dyn FnMut(&'static str, Value) -> Result<()> + 'a;

/// Where a response stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    InProgress,
    Completed,
    /// The limit or the context's end.
    Incomplete,
    Cancelled,
    Failed,
}

impl Status {
    pub(super) fn of(end: Option<&End>) -> Self {
        match end.map(|end| end.reason) {
            Some(FinishReason::Length) => Self::Incomplete,
            Some(FinishReason::Abort) | None => Self::Failed,
            Some(FinishReason::Stop | FinishReason::ToolCalls) => Self::Completed,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Message,
    Reasoning,
    Call,
}

/// The item that is being said.
struct Open {
    kind: Kind,
    item: Value,
    text: String,
}

/// A response's output.
pub(super) struct Output {
    id: String,
    created: u64,
    model: String,
    echo: Map<String, Value>,
    done: Vec<Value>,
    open: Option<Open>,
    sequence: u64,
}

impl Output {
    pub(super) fn new(head: &Head, echo: Map<String, Value>) -> Self {
        Self {
            id: head.id.clone(),
            created: head.created,
            model: head.model.clone(),
            echo,
            done: Vec::new(),
            open: None,
            sequence: 0,
        }
    }

    /// An event's body, with its number.
    pub(super) fn event(&mut self, kind: &str, more: Value) -> Value {
        let mut event = json!({"type": kind, "sequence_number": self.sequence});
        self.sequence += 1;
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        event
    }

    fn emit(&mut self, emit: &mut Emit<'_>, kind: &'static str, more: Value) -> Result<()> {
        let event = self.event(kind, more);
        emit(kind, event)
    }

    /// Takes news of the sequence.
    pub(super) fn say(&mut self, said: Said, emit: &mut Emit<'_>) -> Result<()> {
        let (kind, text) = match said {
            Said::Text(text) => (Kind::Message, text),
            Said::Reasoning(text) => (Kind::Reasoning, text),
            Said::Arguments { json, .. } => (Kind::Call, json),
            Said::Call { id, name, .. } => {
                let item = json!({"id": fresh("fc_"), "type": "function_call", "status": "in_progress",
                    "call_id": id, "name": name, "arguments": ""});
                return self.begin(Kind::Call, item, emit);
            }
        };
        if self.open.as_ref().is_none_or(|open| open.kind != kind) {
            let item = match kind {
                Kind::Reasoning => json!({"id": fresh("rs_"), "type": "reasoning", "status": "in_progress",
                    "summary": [], "content": []}),
                Kind::Message | Kind::Call => json!({"id": fresh("msg_"), "type": "message",
                    "status": "in_progress", "role": "assistant", "content": []}),
            };
            self.begin(kind, item, emit)?;
        }
        let mut more = self.place();
        let name = match kind {
            Kind::Message => {
                more["logprobs"] = json!([]);
                "response.output_text.delta"
            }
            Kind::Reasoning => "response.reasoning_text.delta",
            Kind::Call => "response.function_call_arguments.delta",
        };
        more["delta"] = text.as_str().into();
        if let Some(open) = &mut self.open {
            open.text.push_str(&text);
        }
        self.emit(emit, name, more)
    }

    /// Where the open item is.
    fn place(&self) -> Value {
        let Some(open) = &self.open else { return json!({}) };
        let mut place = json!({"item_id": open.item["id"], "output_index": self.done.len()});
        if open.kind != Kind::Call {
            place["content_index"] = 0.into();
        }
        place
    }

    fn begin(&mut self, kind: Kind, item: Value, emit: &mut Emit<'_>) -> Result<()> {
        self.end_item("completed", emit)?;
        let index = self.done.len();
        self.emit(emit, "response.output_item.added", json!({"output_index": index, "item": item}))?;
        self.open = Some(Open { kind, item, text: String::new() });
        if kind == Kind::Call {
            return Ok(());
        }
        let mut more = self.place();
        more["part"] = part(kind, "");
        self.emit(emit, "response.content_part.added", more)
    }

    fn end_item(&mut self, status: &str, emit: &mut Emit<'_>) -> Result<()> {
        let place = self.place();
        let Some(Open { kind, mut item, text }) = self.open.take() else { return Ok(()) };
        let with = |key: &str, value: Value| {
            let mut more = place.clone();
            more[key] = value;
            more
        };
        match kind {
            Kind::Call => {
                let mut more = with("arguments", text.as_str().into());
                more["name"] = item["name"].clone();
                self.emit(emit, "response.function_call_arguments.done", more)?;
                item["arguments"] = text.into();
            }
            Kind::Message | Kind::Reasoning => {
                let mut more = with("text", text.as_str().into());
                let name = match kind {
                    Kind::Message => {
                        more["logprobs"] = json!([]);
                        "response.output_text.done"
                    }
                    Kind::Reasoning | Kind::Call => "response.reasoning_text.done",
                };
                self.emit(emit, name, more)?;
                let part = part(kind, &text);
                self.emit(emit, "response.content_part.done", with("part", part.clone()))?;
                item["content"] = json!([part]);
            }
        }
        item["status"] = status.into();
        let index = self.done.len();
        self.emit(emit, "response.output_item.done", json!({"output_index": index, "item": item}))?;
        self.done.push(item);
        Ok(())
    }

    /// Ends the last item. An answer of nothing is an empty message.
    pub(super) fn close(&mut self, status: Status, emit: &mut Emit<'_>) -> Result<()> {
        if self.open.is_none() && self.done.is_empty() && status == Status::Completed {
            self.say(Said::Text(String::new()), emit)?;
        }
        self.end_item(if status == Status::Completed { "completed" } else { "incomplete" }, emit)
    }

    /// The response object; with its tokens once it has ended, and how many of them are reasoning.
    pub(super) fn describe(&self, status: Status, usage: Option<(&Usage, u64)>) -> Value {
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status.word(),
            "error": null,
            "incomplete_details": null,
            "model": self.model,
            "output": self.done,
            "usage": null,
        });
        if status == Status::Incomplete {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        if let Some((usage, reasoning)) = usage {
            response["usage"] = json!({
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": usage.total_tokens,
            });
        }
        if let Some(map) = response.as_object_mut() {
            map.extend(self.echo.clone());
        }
        response
    }

    /// The response object of a failure.
    pub(super) fn failure(&self, error: &Error) -> Value {
        let mut response = self.describe(Status::Failed, None);
        response["error"] = json!({"code": "server_error", "message": error.message});
        response
    }
}

fn part(kind: Kind, text: &str) -> Value {
    match kind {
        Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
        Kind::Message | Kind::Call => {
            json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
        }
    }
}

fn fresh(prefix: &str) -> String {
    format!("{prefix}{}", uuid::Uuid::new_v4().simple())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output() -> Output {
        let head = Head { id: "resp_1".into(), created: 1, model: "m".into(), fingerprint: String::new() };
        Output::new(&head, Map::new())
    }

    #[test]
    fn every_item_is_begun_told_and_ended_in_order() {
        let (mut output, mut names, mut numbers) = (output(), Vec::new(), Vec::new());
        let mut emit = |name: &'static str, event: Value| {
            names.push(name);
            numbers.push(event["sequence_number"].as_u64().unwrap());
            Ok(())
        };
        for said in [
            Said::Reasoning("why".into()),
            Said::Text("a".into()),
            Said::Call { index: 0, id: "call_1".into(), name: "f".into() },
            Said::Arguments { index: 0, json: "{}".into() },
            Said::Call { index: 1, id: "call_2".into(), name: "g".into() },
        ] {
            output.say(said, &mut emit).unwrap();
        }
        output.close(Status::Completed, &mut emit).unwrap();
        let short: Vec<_> = names.iter().map(|name| name.trim_start_matches("response.")).collect();
        assert_eq!(
            short,
            [
                "output_item.added",
                "content_part.added",
                "reasoning_text.delta",
                "reasoning_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.done",
                "output_item.done",
            ]
        );
        assert_eq!(numbers, (0..short.len() as u64).collect::<Vec<_>>());
        let whole = output.describe(Status::Completed, None);
        let kinds: Vec<_> =
            whole["output"].as_array().unwrap().iter().map(|item| item["type"].clone()).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    }

    #[test]
    fn an_answer_of_nothing_is_an_empty_message() {
        let mut output = output();
        output.close(Status::Completed, &mut |_, _| Ok(())).unwrap();
        assert_eq!(output.describe(Status::Completed, None)["output"][0]["content"][0]["text"], "");
    }

    #[test]
    fn a_cut_answer_says_why() {
        let whole = output().describe(Status::Incomplete, Some((&Usage::new(3, 2, 1), 1)));
        assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
        assert_eq!(whole["usage"]["input_tokens_details"]["cached_tokens"], 1);
        assert_eq!(whole["usage"]["output_tokens_details"]["reasoning_tokens"], 1);
    }
}
