//! `POST /generate`, the SGLang-native form: single or batch, cumulative text in streams.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use branchline_core::{Error, Result};
use branchline_protocol::native::{Finish, GenerateAnswer, GenerateRequest, Meta, MetaLogprobs};
use branchline_protocol::openai::FinishReason;
use branchline_protocol::{LeaseNote, Prompt};
use futures_util::StreamExt as _;
use http::{Request, StatusCode};

use super::answer::json;
use super::gather::{Gathered, Sequence};
use super::intake::{Intake, adapter_of, answer};
use super::spell::Spell;
use super::stream::{Family, Out, respond};
use crate::app::App;
use crate::dispatch::{self, Batch, End, Item, Running};

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/generate", post(handle))
}

async fn handle(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve).await
}

async fn serve(intake: Intake) -> Result<Response> {
    let request = GenerateRequest::read(&intake.fields(), intake.limits())?;
    let (stream, batch, with_text) = (request.stream, request.batch, request.text_in_logprobs);
    let jobs = prepare(&intake, request).await?;
    let mut native = Native::new(&intake, &jobs, with_text);
    if stream {
        return respond(&intake.app, jobs, native).await;
    }
    let mut pieces = Batch::new(jobs);
    while let Some(item) = pieces.next().await {
        native.add(item?);
    }
    let single = !batch && native.gathered.sequences.len() == 1;
    let answers: Vec<_> =
        (0..native.gathered.sequences.len()).map(|sequence| native.answer(sequence, None)).collect();
    Ok(match answers.first() {
        Some(answer) if single => json(StatusCode::OK, answer),
        _ => json(StatusCode::OK, &answers),
    })
}

/// Tokenises every prompt before the first is started, so that a bad one costs no work.
async fn prepare(intake: &Intake, request: GenerateRequest) -> Result<Vec<Running>> {
    let (app, model, limits) = (&intake.app, &intake.model, intake.limits());
    let mut ready = Vec::with_capacity(request.items.len());
    for (position, item) in request.items.into_iter().enumerate() {
        let field = match item.prompt {
            Prompt::Text(_) => "text",
            Prompt::Tokens(_) => "input_ids",
        };
        let field = if request.batch { format!("{field}[{position}]") } else { field.to_owned() };
        let live = intake.register(item.rid, "")?;
        let tokens =
            dispatch::encode(&app.offload, model, item.prompt, model.add_special_tokens, &field).await?;
        let mut sampling = item.sampling;
        if sampling.terms.reasons {
            let format = app.options.reasoning_parser.0.reasoning(model);
            sampling.terms.marks = format.and_then(|format| format.marks());
        }
        sampling.terms.check(sampling.constraint.is_some())?;
        sampling.fit(tokens.len(), limits, GenerateRequest::FIT.of(&field))?;
        if let Some(logprobs) = &item.logprobs {
            logprobs.fit(tokens.len(), "logprob_start_len")?;
        }
        let mut routing = request.routing.clone();
        if let Some(name) = &item.lora {
            if intake.adapter.is_some() {
                let text = "`lora_path` and an adapter in `model` are both given; send one of them";
                return Err(Error::invalid("lora_path", text));
            }
            routing.adapter = Some(adapter_of(app, model, name, "lora_path")?);
        }
        ready.push((live, tokens, (sampling, item.logprobs), routing));
    }
    let mut jobs = Vec::with_capacity(ready.len());
    for (live, tokens, how, routing) in ready {
        jobs.push(intake.start(live, tokens, how, routing).await?);
    }
    Ok(jobs)
}

/// An answer, whole or as events.
struct Native {
    /// Id of each job.
    ids: Vec<String>,
    gathered: Gathered,
    /// Logprobs of each sequence in their written form, if asked for.
    logprobs: Vec<Option<MetaLogprobs>>,
    /// Prompt positions that each sequence has written.
    written: Vec<usize>,
    /// What became of each job's lease.
    leases: Vec<Option<LeaseNote>>,
    spell: Spell,
    weight_version: String,
    arrived: Instant,
}

impl Native {
    fn new(intake: &Intake, jobs: &[Running], with_text: bool) -> Self {
        let gathered = Gathered::new(jobs);
        let lists = |sequence: &Sequence| {
            let asked = jobs[sequence.job].job().logprobs.as_ref()?;
            Some(MetaLogprobs::new(asked.top > 0, !asked.token_ids.is_empty(), with_text))
        };
        Self {
            ids: jobs.iter().map(|running| running.job().live.id().as_str().to_owned()).collect(),
            logprobs: gathered.sequences.iter().map(lists).collect(),
            leases: vec![None; jobs.len()],
            written: vec![0; gathered.sequences.len()],
            gathered,
            spell: Spell(Arc::clone(intake.model.tokenizer.vocabulary())),
            weight_version: intake.model.info.weight_version.clone(),
            arrived: intake.arrived,
        }
    }

    fn add(&mut self, mut item: Item) {
        let (job, sequence) = (item.job, item.sequence);
        let output = std::mem::take(&mut item.piece.logprobs);
        if let Some(lease) = &item.piece.lease {
            self.leases[job] = Some(lease.note());
        }
        self.gathered.add(item);
        if let Some(lists) = &mut self.logprobs[sequence] {
            // Prompt positions are told once a request; every sequence lists them.
            let input = &self.gathered.prompts[job].input;
            lists.push_input(&input[self.written[sequence]..], &self.spell);
            self.written[sequence] = input.len();
            lists.push_output(&output, &self.spell);
        }
    }

    fn answer(&self, sequence: usize, index: Option<u32>) -> GenerateAnswer<'_> {
        let state = &self.gathered.sequences[sequence];
        let prompt = &self.gathered.prompts[state.job];
        GenerateAnswer {
            text: &state.text,
            output_ids: &state.ids,
            meta_info: Meta {
                id: &self.ids[state.job],
                finish_reason: state.end.as_ref().map(finish),
                prompt_tokens: prompt.tokens as u32,
                completion_tokens: state.completion_tokens as u32,
                cached_tokens: prompt.cached as u32,
                e2e_latency: self.arrived.elapsed().as_secs_f64(),
                num_retractions: state.end.as_ref().map_or(0, |end| end.retractions),
                continuations: state.end.as_ref().map_or(0, |end| end.continuations),
                times: state.end.as_ref().and_then(|end| end.timings).map(Into::into),
                weight_version: &self.weight_version,
                lease: self.leases[state.job].as_ref(),
                logprobs: self.logprobs[sequence].as_ref(),
                grammar_info: state.end.as_ref().and_then(|end| end.grammar.as_ref()),
            },
            index,
        }
    }
}

fn finish(end: &End) -> Finish {
    match end.reason {
        FinishReason::Stop | FinishReason::ToolCalls => Finish::Stop { matched: end.matched.clone() },
        FinishReason::Length => Finish::Length { length: end.completion_tokens },
        FinishReason::Abort => Finish::Abort { message: end.message.clone() },
    }
}

impl Family for Native {
    fn piece(&mut self, item: Item, out: &mut Out) -> Result<()> {
        let sequence = item.sequence;
        let news =
            !item.piece.token_ids.is_empty() || !item.piece.text.is_empty() || item.piece.end.is_some();
        self.add(item);
        if !news {
            return Ok(());
        }
        let index = (self.gathered.sequences.len() > 1).then_some(sequence as u32);
        out.json(&self.answer(sequence, index))
    }

    fn finish(&mut self, out: &mut Out) -> Result<()> {
        out.done();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_cut_by_the_pool_or_the_context_tells_how_many_tokens_it_has() {
        let end = End {
            reason: FinishReason::Length,
            matched: None,
            completion_tokens: 3,
            retractions: 0,
            message: String::new(),
            continuations: 0,
            grammar: None,
            timings: None,
        };
        assert_eq!(finish(&end), Finish::Length { length: 3 });
    }
}
