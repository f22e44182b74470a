//! `POST /v1/completions`.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use branchline_core::Result;
use branchline_protocol::openai::{
    ChatChunk, CompletionAnswer, CompletionChoice, CompletionLogprobs, CompletionRequest, FinishReason,
    Offsets, StreamOptions,
};
use branchline_protocol::{Position, Prompt};
use http::{Request, StatusCode};

use super::answer::json;
use super::gather::{Gathered, gather};
use super::intake::{Head, Intake, answer};
use super::spell::{Spell, WithoutSpecial};
use super::stream::{Family, Out, respond};
use crate::app::App;
use crate::dispatch::{self, Item, Model, Running};

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v1/completions", post(handle))
}

async fn handle(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve).await
}

async fn serve(intake: Intake) -> Result<Response> {
    let request = CompletionRequest::read(&intake.fields(), intake.limits())?;
    let delivery = request.delivery;
    let (jobs, mut voice) = prepare(&intake, request).await?;
    if delivery.stream {
        voice.gathered = Gathered::new(&jobs);
        voice.sent = (0..voice.gathered.sequences.len()).map(|_| Sent::default()).collect();
        return respond(&intake.app, jobs, voice).await;
    }
    let gathered = gather(jobs).await?;
    let usage = gathered.usage();
    let lease = gathered.lease();
    let choices = voice.choices(gathered);
    let whole = CompletionAnswer {
        id: &voice.head.id,
        object: "text_completion",
        created: voice.head.created,
        model: &voice.head.model,
        system_fingerprint: &voice.head.fingerprint,
        choices,
        usage,
        lease,
    };
    Ok(json(StatusCode::OK, &whole))
}

/// Tokenises every prompt before the first is started, so that a bad one costs no work.
async fn prepare(intake: &Intake, request: CompletionRequest) -> Result<(Vec<Running>, Completion)> {
    let CompletionRequest { prompts, sampling, echo, logprobs, delivery, routing, rid } = request;
    let (app, model, limits) = (&intake.app, &intake.model, intake.limits());
    let lead = intake.register(rid, "cmpl-")?;
    let head = intake.head(lead.id());
    let mut guards = Vec::with_capacity(prompts.len());
    for position in 1..prompts.len() {
        guards.push(intake.register(Some(format!("{}-{position}", head.id)), "")?);
    }
    guards.insert(0, lead);
    let mut ready = Vec::with_capacity(prompts.len());
    let mut echoes = Vec::new();
    let listed = prompts.len() > 1;
    for (position, prompt) in prompts.into_iter().enumerate() {
        let field = if listed { format!("prompt[{position}]") } else { "prompt".to_owned() };
        if echo {
            echoes.push(match &prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Tokens(tokens) => decode(app, model, tokens.clone()).await?,
            });
        }
        let tokens = dispatch::encode(&app.offload, model, prompt, model.add_special_tokens, &field).await?;
        let mut own = sampling.clone();
        own.terms.check(own.constraint.is_some())?;
        own.fit(tokens.len(), limits, CompletionRequest::FIT.of(&field))?;
        ready.push((tokens, own));
    }
    let top = logprobs.as_ref().map(|logprobs| logprobs.top);
    let skip_special = sampling.skip_special_tokens.unwrap_or(true);
    let spell = logprobs.is_some().then(|| Spell(Arc::clone(model.tokenizer.vocabulary())));
    let mut jobs = Vec::with_capacity(ready.len());
    for (live, (tokens, own)) in guards.into_iter().zip(ready) {
        jobs.push(intake.start(live, tokens, (own, logprobs.clone()), routing.clone()).await?);
    }
    let voice = Completion {
        head,
        spell,
        top: top.unwrap_or(0),
        skip_special,
        echoes,
        delivery,
        gathered: Gathered::default(),
        sent: Vec::new(),
    };
    Ok((jobs, voice))
}

/// The text of a prompt's ids.
async fn decode(app: &App, model: &Arc<Model>, tokens: Vec<u32>) -> Result<String> {
    let (bytes, model) = (tokens.len() * size_of::<u32>(), Arc::clone(model));
    app.offload.run(bytes, move || Ok(model.tokenizer.decode(&tokens, false))).await
}

/// What of a sequence has gone out.
#[derive(Default)]
struct Sent {
    /// The echoed prompt.
    echo: bool,
    /// Prompt positions.
    input: usize,
    /// Where tokens are in its text.
    offsets: Offsets,
}

/// A completion, whole or as events.
struct Completion {
    head: Head,
    spell: Option<Spell>,
    top: u32,
    /// Whether generated text leaves special tokens out.
    skip_special: bool,
    /// Texts of the prompts, if they are echoed.
    echoes: Vec<String>,
    delivery: StreamOptions,
    gathered: Gathered,
    sent: Vec<Sent>,
}

impl Completion {
    fn logprobs(&self, positions: [&[Position]; 2], offsets: &mut Offsets) -> Option<CompletionLogprobs> {
        let spell = self.spell.as_ref()?;
        let mut form = CompletionLogprobs::new(positions[0], self.top, offsets, spell);
        form.append(if self.skip_special {
            CompletionLogprobs::new(positions[1], self.top, offsets, &WithoutSpecial(spell))
        } else {
            CompletionLogprobs::new(positions[1], self.top, offsets, spell)
        });
        Some(form)
    }

    fn choices(&self, gathered: Gathered) -> Vec<CompletionChoice> {
        let Gathered { prompts, sequences, .. } = gathered;
        (0u32..)
            .zip(sequences)
            .map(|(index, sequence)| {
                let logprobs = self
                    .logprobs([&prompts[sequence.job].input, &sequence.logprobs], &mut Offsets::default());
                let (reason, matched_stop, grammar_info) = sequence
                    .end
                    .map_or((FinishReason::Abort, None, None), |end| (end.reason, end.matched, end.grammar));
                let mut text = self.echoes.get(sequence.job).cloned().unwrap_or_default();
                text.push_str(&sequence.text);
                CompletionChoice {
                    index,
                    text,
                    logprobs,
                    finish_reason: Some(reason),
                    matched_stop,
                    grammar_info,
                }
            })
            .collect()
    }

    fn chunk(&mut self, choices: &[CompletionChoice], with_usage: bool, out: &mut Out) -> Result<()> {
        out.json(&ChatChunk {
            id: &self.head.id,
            object: "text_completion",
            created: self.head.created,
            model: &self.head.model,
            system_fingerprint: &self.head.fingerprint,
            choices,
            usage: (with_usage || self.delivery.continuous_usage).then(|| self.gathered.usage()),
            lease: self.gathered.lease_news(),
        })
    }
}

impl Family for Completion {
    fn piece(&mut self, item: Item, out: &mut Out) -> Result<()> {
        self.gathered.count(&item);
        let mut sent = std::mem::take(&mut self.sent[item.sequence]);
        let mut text = match self.echoes.get(item.job) {
            Some(echo) if !std::mem::replace(&mut sent.echo, true) => echo.clone(),
            _ => String::new(),
        };
        text.push_str(&item.piece.text);
        // Prompt positions are told once a request; every sequence shows those it has not shown yet.
        let input = &self.gathered.prompts[item.job].input;
        let fresh = input.get(sent.input..).unwrap_or_default();
        let logprobs = self.logprobs([fresh, &item.piece.logprobs], &mut sent.offsets);
        sent.input = input.len();
        self.sent[item.sequence] = sent;
        let silent = logprobs.as_ref().is_none_or(|form| form.tokens.is_empty());
        let (finish_reason, matched_stop, grammar_info) =
            item.piece.end.map_or((None, None, None), |end| (Some(end.reason), end.matched, end.grammar));
        if text.is_empty() && silent && finish_reason.is_none() {
            return Ok(());
        }
        let index = item.sequence as u32;
        let choice = CompletionChoice { index, text, logprobs, finish_reason, matched_stop, grammar_info };
        self.chunk(&[choice], false, out)
    }

    fn finish(&mut self, out: &mut Out) -> Result<()> {
        if self.delivery.include_usage {
            self.chunk(&[], true, out)?;
        }
        out.done();
        Ok(())
    }
}
