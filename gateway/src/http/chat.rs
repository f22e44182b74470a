//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use branchline_core::Result;
use branchline_protocol::openai::{
    CalledFunction, ChatAnswer, ChatChoice, ChatChunk, ChatDelta, ChatLogprobs, ChatMessage, ChatRequest,
    ChunkChoice, FinishReason, StreamOptions, ToolCall,
};
use futures_util::StreamExt as _;
use http::{Request, StatusCode};

use super::answer::json;
use super::gather::{Gathered, Sequence};
use super::intake::{Head, Intake, answer};
use super::speech::{Said, Speaker};
use super::spell::Spell;
use super::stream::{Family, Out, respond};
use super::turn::{self, Turn};
use crate::app::App;
use crate::dispatch::{Batch, Item};

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v1/chat/completions", post(handle))
}

async fn handle(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve).await
}

async fn serve(intake: Intake) -> Result<Response> {
    let request = ChatRequest::read(&intake.fields(), intake.limits())?;
    let (delivery, wanted) = (request.delivery, request.logprobs.is_some());
    let Turn { head, jobs, speakers, gathered } =
        turn::begin(&intake, request, ChatRequest::FIT, "chatcmpl-").await?;
    let spell = wanted.then(|| Spell(Arc::clone(intake.model.tokenizer.vocabulary())));
    if delivery.stream {
        let greeted = vec![false; speakers.len()];
        return respond(&intake.app, jobs, Chat { head, spell, delivery, gathered, speakers, greeted }).await;
    }
    whole(head, spell, Batch::new(jobs), speakers, gathered).await
}

/// Runs a turn to its end.
async fn whole(
    head: Head,
    spell: Option<Spell>,
    mut batch: Batch,
    mut speakers: Vec<Speaker>,
    mut gathered: Gathered,
) -> Result<Response> {
    let mut messages: Vec<Message> = speakers.iter().map(|_| Message::default()).collect();
    while let Some(item) = batch.next().await {
        let mut item = item?;
        let said = speakers[item.sequence].read(&mut item.piece)?;
        messages[item.sequence].add(said);
        gathered.add(item);
    }
    let (usage, lease) = (gathered.usage(), gathered.lease());
    let choices = (0u32..)
        .zip(gathered.sequences.into_iter().zip(messages))
        .map(|(index, (sequence, message))| choice(index, sequence, message, spell.as_ref()))
        .collect();
    let answer = ChatAnswer {
        id: &head.id,
        object: "chat.completion",
        created: head.created,
        model: &head.model,
        system_fingerprint: &head.fingerprint,
        usage,
        lease,
        choices,
    };
    Ok(json(StatusCode::OK, &answer))
}

/// What a sequence has said so far.
#[derive(Default)]
struct Message {
    text: String,
    reasoning: Option<String>,
    calls: Vec<ToolCall>,
}

impl Message {
    fn add(&mut self, said: Vec<Said>) {
        for one in said {
            match one {
                Said::Text(text) => self.text.push_str(&text),
                Said::Reasoning(text) => self.reasoning.get_or_insert_default().push_str(&text),
                Said::Call { id, name, .. } => {
                    let function = CalledFunction { name: Some(name), arguments: String::new() };
                    self.calls.push(ToolCall { index: None, id: Some(id), kind: Some("function"), function });
                }
                Said::Arguments { json, .. } => {
                    if let Some(call) = self.calls.last_mut() {
                        call.function.arguments.push_str(&json);
                    }
                }
            }
        }
    }
}

fn choice(index: u32, sequence: Sequence, message: Message, spell: Option<&Spell>) -> ChatChoice {
    let (finish_reason, matched_stop, grammar_info) =
        sequence.end.map_or((FinishReason::Abort, None, None), |end| (end.reason, end.matched, end.grammar));
    let content = (!message.text.is_empty() || message.calls.is_empty()).then_some(message.text);
    ChatChoice {
        index,
        message: ChatMessage {
            role: "assistant",
            content,
            refusal: None,
            reasoning_content: message.reasoning,
            tool_calls: message.calls,
        },
        logprobs: spell.map(|spell| ChatLogprobs::new(&sequence.logprobs, spell)),
        finish_reason,
        matched_stop,
        grammar_info,
    }
}

/// A chat as events: role, text as it comes, finish reason, then usage if asked for.
struct Chat {
    head: Head,
    spell: Option<Spell>,
    delivery: StreamOptions,
    gathered: Gathered,
    speakers: Vec<Speaker>,
    /// Which sequences have had their role chunk.
    greeted: Vec<bool>,
}

impl Chat {
    fn chunk(&mut self, choices: &[ChunkChoice], with_usage: bool, out: &mut Out) -> Result<()> {
        out.json(&ChatChunk {
            id: &self.head.id,
            object: "chat.completion.chunk",
            created: self.head.created,
            model: &self.head.model,
            system_fingerprint: &self.head.fingerprint,
            choices,
            usage: (with_usage || self.delivery.continuous_usage).then(|| self.gathered.usage()),
            lease: self.gathered.lease_news(),
        })
    }
}

fn delta(index: u32, delta: ChatDelta) -> ChunkChoice {
    ChunkChoice { index, delta, logprobs: None, finish_reason: None, matched_stop: None, grammar_info: None }
}

fn news(said: Said) -> ChatDelta {
    let call = |call| ChatDelta { tool_calls: vec![call], ..ChatDelta::default() };
    match said {
        Said::Text(text) => ChatDelta { content: Some(text), ..ChatDelta::default() },
        Said::Reasoning(text) => ChatDelta { reasoning_content: Some(text), ..ChatDelta::default() },
        Said::Call { index, id, name } => {
            let function = CalledFunction { name: Some(name), arguments: String::new() };
            call(ToolCall { index: Some(index), id: Some(id), kind: Some("function"), function })
        }
        Said::Arguments { index, json } => {
            let function = CalledFunction { name: None, arguments: json };
            call(ToolCall { index: Some(index), function, ..ToolCall::default() })
        }
    }
}

impl Family for Chat {
    fn piece(&mut self, mut item: Item, out: &mut Out) -> Result<()> {
        let said = self.speakers[item.sequence].read(&mut item.piece)?;
        self.gathered.count(&item);
        let index = item.sequence as u32;
        if !std::mem::replace(&mut self.greeted[item.sequence], true) {
            let role =
                ChatDelta { role: Some("assistant"), content: Some(String::new()), ..ChatDelta::default() };
            self.chunk(&[delta(index, role)], false, out)?;
        }
        let piece = item.piece;
        let mut logprobs = match &self.spell {
            Some(spell) if !piece.logprobs.is_empty() => Some(ChatLogprobs::new(&piece.logprobs, spell)),
            _ => None,
        };
        if said.is_empty() && logprobs.is_some() {
            // Tokens whose text is held back still have their logprobs.
            let text = ChatDelta { content: Some(String::new()), ..ChatDelta::default() };
            self.chunk(&[ChunkChoice { logprobs: logprobs.take(), ..delta(index, text) }], false, out)?;
        }
        for one in said {
            let choice = ChunkChoice { logprobs: logprobs.take(), ..delta(index, news(one)) };
            self.chunk(&[choice], false, out)?;
        }
        if let Some(end) = piece.end {
            let last = ChunkChoice {
                finish_reason: Some(end.reason),
                matched_stop: end.matched,
                grammar_info: end.grammar,
                ..delta(index, ChatDelta::default())
            };
            self.chunk(&[last], false, out)?;
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut Out) -> Result<()> {
        if self.delivery.include_usage {
            self.chunk(&[], true, out)?;
        }
        out.done();
        Ok(())
    }
}
