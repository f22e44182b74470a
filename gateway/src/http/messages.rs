//! `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's API. Its errors get their shape at the gate.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::anthropic::{MessagesRequest, error_body};
use branchline_protocol::openai::{FinishReason, Matched};
use futures_util::StreamExt as _;
use http::{Request, StatusCode};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::answer::json as reply;
use super::gather::Gathered;
use super::intake::{Head, Intake, answer};
use super::speech::{Manner, Said, Speaker};
use super::stream::{Family, Out, respond};
use super::turn::{self, Turn};
use crate::app::App;
use crate::dispatch::{Batch, End, Item};

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v1/messages", post(handle)).route("/v1/messages/count_tokens", post(count))
}

async fn handle(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve).await
}

async fn count(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve_count).await
}

async fn serve_count(intake: Intake) -> Result<Response> {
    let MessagesRequest { chat } = MessagesRequest::read_any(&intake.fields(), intake.limits())?;
    let mut manner = Manner::of(&intake.app, &intake.model, &chat);
    let tokens = turn::tokens(&intake, &chat, &mut manner, MessagesRequest::FIT.prompt).await?;
    Ok(reply(StatusCode::OK, &json!({"input_tokens": tokens.len()})))
}

async fn serve(intake: Intake) -> Result<Response> {
    let MessagesRequest { chat } = MessagesRequest::read(&intake.fields(), intake.limits())?;
    let stream = chat.delivery.stream;
    let Turn { head, jobs, speakers, gathered } =
        turn::begin(&intake, chat, MessagesRequest::FIT, "msg_").await?;
    let mut message = Message { head, speakers, gathered, open: None, blocks: 0, begun: false };
    if stream {
        return respond(&intake.app, jobs, message).await;
    }
    let mut batch = Batch::new(jobs);
    let mut content = Vec::new();
    while let Some(item) = batch.next().await {
        let mut item = item?;
        let said = message.speakers[item.sequence].read(&mut item.piece)?;
        said.into_iter().for_each(|one| put(&mut content, one));
        message.gathered.count(&item);
    }
    whole(message.end())?;
    let content: Vec<Block> = content.into_iter().map(Block::of).collect();
    Ok(reply(StatusCode::OK, &message.describe(content, true)))
}

/// Adds news to the blocks of a whole answer.
fn put(content: &mut Vec<Value>, said: Said) {
    let (kind, key, text) = match said {
        Said::Text(text) => ("text", "text", text),
        Said::Reasoning(text) => ("thinking", "thinking", text),
        Said::Arguments { json, .. } => ("tool_use", "input", json),
        Said::Call { id, name, .. } => return content.push(call_block(&id, &name)),
    };
    if content.last().is_none_or(|last| last["type"] != kind) {
        content.push(empty_block(kind));
    }
    match content.last_mut().map(|last| &mut last[key]) {
        Some(Value::String(so_far)) => so_far.push_str(&text),
        Some(empty) => *empty = text.into(),
        None => {}
    }
}

/// A block of a whole answer.
#[derive(Serialize)]
#[serde(untagged)]
enum Block {
    Said(Value),
    Call(CallBlock),
}

/// A call, its input as an object in the model's own spelling: no number changes on the way.
#[derive(Serialize)]
struct CallBlock {
    #[serde(rename = "type")]
    kind: &'static str,
    id: Value,
    name: Value,
    input: Box<RawValue>,
}

impl Block {
    fn of(mut block: Value) -> Self {
        if block["type"] != "tool_use" {
            return Self::Said(block);
        }
        let text = block["input"].as_str().unwrap_or("{}").to_owned();
        match RawValue::from_string(text) {
            Ok(input) => Self::Call(CallBlock {
                kind: "tool_use",
                id: block["id"].take(),
                name: block["name"].take(),
                input,
            }),
            Err(_) => {
                block["input"] = json!({});
                Self::Said(block)
            }
        }
    }
}

fn empty_block(kind: &str) -> Value {
    match kind {
        "thinking" => json!({"type": "thinking", "thinking": "", "signature": ""}),
        _ => json!({"type": "text", "text": "", "citations": null}),
    }
}

fn call_block(id: &str, name: &str) -> Value {
    json!({"type": "tool_use", "id": id.replacen("call_", "toolu_", 1), "name": name, "input": {}})
}

/// Refuses an answer that was aborted: none of Anthropic's reasons says so.
fn whole(end: Option<&End>) -> Result<()> {
    match end {
        Some(end) if end.reason == FinishReason::Abort => {
            let why = if end.message.is_empty() { "on request" } else { &end.message };
            Err(Error::new(
                ErrorCode::Cancelled,
                format!("the answer was aborted: {why}; send the request again"),
            ))
        }
        _ => Ok(()),
    }
}

/// Why it ended, in Anthropic's words, and the stop that was found.
fn stop(end: Option<&End>) -> (Value, Value) {
    let Some(end) = end else { return (Value::Null, Value::Null) };
    match (end.reason, &end.matched) {
        (FinishReason::Stop, Some(Matched::Text(text))) => ("stop_sequence".into(), text.as_str().into()),
        (FinishReason::Length, _) => ("max_tokens".into(), Value::Null),
        (FinishReason::ToolCalls, _) => ("tool_use".into(), Value::Null),
        (FinishReason::Stop | FinishReason::Abort, _) => ("end_turn".into(), Value::Null),
    }
}

/// The message object.
#[derive(Serialize)]
struct Described<'a, C> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: C,
    stop_reason: Value,
    stop_sequence: Value,
    usage: Value,
}

/// A message, whole or as events.
struct Message {
    head: Head,
    speakers: Vec<Speaker>,
    gathered: Gathered,
    /// What the open block is: text, thinking or tool_use.
    open: Option<&'static str>,
    /// Blocks that have begun.
    blocks: u32,
    begun: bool,
}

impl Message {
    fn end(&self) -> Option<&End> {
        self.gathered.sequences.first().and_then(|sequence| sequence.end.as_ref())
    }

    /// Prompt tokens found in the cache are counted apart from the others.
    fn usage(&self) -> Value {
        let usage = self.gathered.usage();
        let cached = usage.prompt_tokens_details.cached_tokens;
        json!({
            "input_tokens": usage.prompt_tokens.saturating_sub(cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion_tokens,
        })
    }

    fn describe<C: Serialize>(&self, content: C, ended: bool) -> Described<'_, C> {
        let (stop_reason, stop_sequence) = stop(self.end().filter(|_| ended));
        Described {
            id: &self.head.id,
            kind: "message",
            role: "assistant",
            model: &self.head.model,
            content,
            stop_reason,
            stop_sequence,
            usage: self.usage(),
        }
    }

    fn begin(&mut self, kind: &'static str, block: Value, out: &mut Out) -> Result<()> {
        self.close(out)?;
        self.open = Some(kind);
        let index = self.blocks;
        self.blocks += 1;
        let event = json!({"type": "content_block_start", "index": index, "content_block": block});
        out.named("content_block_start", &event)
    }

    fn close(&mut self, out: &mut Out) -> Result<()> {
        match self.open.take() {
            None => Ok(()),
            Some(_) => {
                let event = json!({"type": "content_block_stop", "index": self.blocks.saturating_sub(1)});
                out.named("content_block_stop", &event)
            }
        }
    }

    fn say(&mut self, said: Said, out: &mut Out) -> Result<()> {
        let (kind, delta) = match said {
            Said::Text(text) => ("text", json!({"type": "text_delta", "text": text})),
            Said::Reasoning(text) => ("thinking", json!({"type": "thinking_delta", "thinking": text})),
            Said::Arguments { json, .. } => {
                ("tool_use", json!({"type": "input_json_delta", "partial_json": json}))
            }
            Said::Call { id, name, .. } => return self.begin("tool_use", call_block(&id, &name), out),
        };
        if self.open != Some(kind) {
            self.begin(kind, empty_block(kind), out)?;
        }
        let index = self.blocks.saturating_sub(1);
        out.named(
            "content_block_delta",
            &json!({"type": "content_block_delta", "index": index, "delta": delta}),
        )
    }

    fn start(&mut self, out: &mut Out) -> Result<()> {
        if std::mem::replace(&mut self.begun, true) {
            return Ok(());
        }
        let message = self.describe([(); 0], false);
        out.named("message_start", &json!({"type": "message_start", "message": message}))
    }
}

impl Family for Message {
    fn piece(&mut self, mut item: Item, out: &mut Out) -> Result<()> {
        let said = self.speakers[item.sequence].read(&mut item.piece)?;
        self.gathered.count(&item);
        self.start(out)?;
        said.into_iter().try_for_each(|one| self.say(one, out))
    }

    fn finish(&mut self, out: &mut Out) -> Result<()> {
        self.start(out)?;
        self.close(out)?;
        whole(self.end())?;
        let (reason, sequence) = stop(self.end());
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        out.named("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": self.usage()}))?;
        out.named("message_stop", &json!({"type": "message_stop"}))
    }

    fn fail(&mut self, error: &Error, out: &mut Out) {
        // Strings always serialise.
        let _ = out.named("error", &error_body(error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_anthropics_names() {
        let end = |reason, matched| End {
            reason,
            matched,
            completion_tokens: 1,
            retractions: 0,
            continuations: 0,
            grammar: None,
            timings: None,
            message: String::new(),
        };
        for (reason, matched, wanted) in [
            (FinishReason::Stop, None, ("end_turn", None)),
            (FinishReason::Stop, Some(Matched::Token(2)), ("end_turn", None)),
            (FinishReason::Stop, Some(Matched::Text("END".into())), ("stop_sequence", Some("END"))),
            (FinishReason::Length, None, ("max_tokens", None)),
            (FinishReason::ToolCalls, None, ("tool_use", None)),
        ] {
            let (word, sequence) = stop(Some(&end(reason, matched)));
            assert_eq!((word, sequence), (wanted.0.into(), wanted.1.map_or(Value::Null, Value::from)));
        }
    }

    #[test]
    fn news_becomes_blocks_and_a_calls_input_an_object() {
        let mut content = Vec::new();
        for said in [
            Said::Reasoning("why".into()),
            Said::Text("a".into()),
            Said::Text("b".into()),
            Said::Call { index: 0, id: "call_1".into(), name: "f".into() },
            Said::Arguments { index: 0, json: "{\"x\"".into() },
            Said::Arguments { index: 0, json: ": 1}".into() },
        ] {
            put(&mut content, said);
        }
        let text = serde_json::to_string(&content.into_iter().map(Block::of).collect::<Vec<_>>()).unwrap();
        let content: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(content[0]["thinking"], "why");
        assert_eq!(content[1]["text"], "ab");
        assert_eq!((&content[2]["id"], &content[2]["input"]["x"]), (&json!("toolu_1"), &json!(1)));
    }

    #[test]
    fn a_calls_input_keeps_the_models_own_spelling() {
        let input = r#"{"a":12345678901234567890123,"c":1e2, "d": 0.10}"#;
        let block = |text: &str| {
            let mut content = Vec::new();
            put(&mut content, Said::Call { index: 0, id: "call_1".into(), name: "f".into() });
            put(&mut content, Said::Arguments { index: 0, json: text.into() });
            serde_json::to_string(&content.into_iter().map(Block::of).collect::<Vec<_>>()).unwrap()
        };
        let told =
            |input: &str| format!(r#"[{{"type":"tool_use","id":"toolu_1","name":"f","input":{input}}}]"#);
        assert_eq!(block(input), told(input));
        assert_eq!(block("{\"cut\": "), told("{}"));
    }
}
