//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use branchline_core::Result;
use branchline_protocol::Prompt;
use branchline_protocol::openai::{
    ChatAnswer, ChatChoice, ChatChunk, ChatDelta, ChatLogprobs, ChatMessage, ChatRequest, ChunkChoice,
    FinishReason, StreamOptions,
};
use http::{Request, StatusCode};

use super::answer::json;
use super::gather::{Gathered, Sequence, gather};
use super::intake::{Head, Taken, settle, take};
use super::spell::Spell;
use super::stream::{Family, Out, respond};
use crate::app::App;
use crate::dispatch::{self, Item};

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v1/chat/completions", post(handle))
}

async fn handle(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    let outcome = serve(&app, request).await;
    settle(outcome)
}

async fn serve(app: &Arc<App>, request: Request<Body>) -> Result<Response> {
    let intake = match take(app, request).await? {
        Taken::Engine(intake) => intake,
        Taken::Answered(response) => return Ok(response),
    };
    let limits = intake.limits();
    let ChatRequest { input, mut sampling, logprobs, delivery, routing, rid } =
        ChatRequest::read(&intake.fields(), limits)?;
    let live = intake.register(rid, "chatcmpl-")?;
    let text = dispatch::render(&app.offload, &intake.model, input, intake.bytes).await?;
    // The template has put the special tokens in its text.
    let tokens = dispatch::encode(&app.offload, &intake.model, Prompt::Text(text), false, "messages").await?;
    sampling.fit(tokens.len(), limits, ChatRequest::FIT)?;
    let head = intake.head(live.id());
    let spell = logprobs.is_some().then(|| Spell(Arc::clone(intake.model.tokenizer.vocabulary())));
    let jobs = vec![intake.start(live, tokens, (sampling, logprobs), routing)?];
    if delivery.stream {
        let gathered = Gathered::new(&jobs);
        let greeted = vec![false; gathered.sequences.len()];
        return respond(app, jobs, Chat { head, spell, delivery, gathered, greeted }).await;
    }
    let gathered = gather(jobs).await?;
    let answer = ChatAnswer {
        id: &head.id,
        object: "chat.completion",
        created: head.created,
        model: &head.model,
        system_fingerprint: &head.fingerprint,
        usage: gathered.usage(),
        lease: gathered.lease(),
        choices: (0u32..)
            .zip(gathered.sequences)
            .map(|(index, one)| choice(index, one, spell.as_ref()))
            .collect(),
    };
    Ok(json(StatusCode::OK, &answer))
}

fn choice(index: u32, sequence: Sequence, spell: Option<&Spell>) -> ChatChoice {
    let (finish_reason, matched_stop) =
        sequence.end.map_or((FinishReason::Abort, None), |end| (end.reason, end.matched));
    ChatChoice {
        index,
        message: ChatMessage { role: "assistant", content: sequence.text, refusal: None },
        logprobs: spell.map(|spell| ChatLogprobs::new(&sequence.logprobs, spell)),
        finish_reason,
        matched_stop,
    }
}

/// A chat as events: role, text as it comes, finish reason, then usage if asked for.
struct Chat {
    head: Head,
    spell: Option<Spell>,
    delivery: StreamOptions,
    gathered: Gathered,
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
    ChunkChoice { index, delta, logprobs: None, finish_reason: None, matched_stop: None }
}

impl Family for Chat {
    fn piece(&mut self, item: Item, out: &mut Out) -> Result<()> {
        self.gathered.count(&item);
        let index = item.sequence as u32;
        if !std::mem::replace(&mut self.greeted[item.sequence], true) {
            let role = ChatDelta { role: Some("assistant"), content: Some(String::new()) };
            self.chunk(&[delta(index, role)], false, out)?;
        }
        let piece = item.piece;
        if !piece.text.is_empty() || !piece.logprobs.is_empty() {
            let text = ChatDelta { role: None, content: Some(piece.text) };
            let logprobs = self.spell.as_ref().map(|spell| ChatLogprobs::new(&piece.logprobs, spell));
            self.chunk(&[ChunkChoice { logprobs, ..delta(index, text) }], false, out)?;
        }
        if let Some(end) = piece.end {
            let last = ChunkChoice {
                finish_reason: Some(end.reason),
                matched_stop: end.matched,
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
