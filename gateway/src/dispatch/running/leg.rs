//! One worker's stream of deltas for a job, or for one of its sequences.

use std::sync::Arc;
use std::time::Instant;

use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{Choice, DeltaStream, PairChoice, RouteQuery, SubmitOptions, Watch, Worker, proto};

use super::emitted::Emitted;
use super::half::Half;
use crate::app::App;
use crate::dispatch::contract::time_left;
use crate::dispatch::{Job, RoomRange};
use crate::http::Called;

/// Who is to have a job.
#[allow(clippy::large_enum_variant, reason = "it is moved once")]
pub(super) enum Chosen {
    /// One worker alone.
    One(Choice),
    /// One for the prompt and one for the output.
    Pair(PairChoice),
}

impl Chosen {
    /// The workers.
    pub(super) fn ids(&self) -> Vec<WorkerId> {
        match self {
            Self::One(choice) => vec![choice.worker.id],
            Self::Pair(pair) => vec![pair.prefill.worker.id, pair.decode.worker.id],
        }
    }
}

/// A stream and whose it is.
pub(super) struct Leg {
    pub(super) stream: DeltaStream,
    pub(super) worker: Arc<Worker>,
    /// What the worker calls it.
    pub(super) id: String,
    /// The one sequence that it continues; none for all of the job's.
    pub(super) sequence: Option<u32>,
    /// What its worker promises of its bits.
    pub(super) numerics_id: String,
    /// Prompt tokens that were believed to be cached there.
    pub(super) predicted: u32,
    /// The other half, if the prompt is computed elsewhere.
    pub(super) half: Option<Half>,
}

impl Leg {
    /// A worker of the policy's choice for the whole job, or the cheapest pair, none of `tried`.
    ///
    /// A prompt of which there is little to compute is not split, and one for which no whole pair is there neither.
    pub(super) fn choose(app: &App, job: &Job, tried: &[WorkerId]) -> Result<Chosen> {
        job.plan.choose(tried, |exclude| Self::choose_but(app, job, exclude))
    }

    fn choose_but(app: &App, job: &Job, exclude: &[WorkerId]) -> Result<Chosen> {
        let query = RouteQuery { exclude, ..job.query(&job.tokens) };
        let model = Some(job.model.name.as_str());
        // Middleware sees those who can serve alone: what it rules out is ruled out for either half.
        let splits = job.may_be_split() && app.fleet.may_split(model, &query);
        if splits {
            let bypass = app.options.pd_bypass_tokens as u64;
            match app.fleet.choose_pair(model, &query) {
                Ok(pair) if pair.decode.decision.uncached_tokens() > bypass => return Ok(Chosen::Pair(pair)),
                Ok(_) => app.metrics.pd_requests.with(["bypass"]).inc(),
                Err(_) => app.metrics.pd_requests.with(["decode_only"]).inc(),
            };
        }
        app.fleet.choose(model, &query).map(Chosen::One)
    }

    /// A worker that promises the same bits as a lost leg's and can go on with a sequence of it.
    pub(super) fn choose_next(
        app: &App,
        job: &Job,
        lost: &Self,
        tried: &[WorkerId],
        emitted: &Emitted,
    ) -> Result<Choice> {
        let tokens: Vec<u32> = job.tokens.iter().chain(&emitted.ids).copied().collect();
        let mut exclude = tried.to_vec();
        exclude.push(lost.worker.id);
        job.plan.choose(&exclude, |exclude| {
            let query = RouteQuery { exclude, numerics_id: Some(&lost.numerics_id), ..job.query(&tokens) };
            app.fleet.choose(Some(&job.model.name), &query)
        })
    }

    /// The whole job on whoever was chosen. `again` counts earlier tries of it that may not have left their workers yet.
    pub(super) fn first(
        app: &App,
        job: &Job,
        chosen: Chosen,
        arrived: Instant,
        again: usize,
    ) -> Result<Self> {
        let mut request = job.request();
        if again > 0 {
            request.request_id = format!("{}~{again}", request.request_id);
        }
        match chosen {
            Chosen::One(choice) => Self::send(app, job, choice, request, arrived, None),
            Chosen::Pair(pair) => Self::split(app, job, pair, request, arrived),
        }
    }

    /// Both halves at once: the prompt on one worker, the rest on the other one, which pulls the prompt's pages.
    fn split(
        app: &App,
        job: &Job,
        pair: PairChoice,
        mut request: proto::GenerateRequest,
        arrived: Instant,
    ) -> Result<Self> {
        let PairChoice { prefill, decode } = pair;
        let room = app.rooms.reserve(RoomRange::Wide, 0, 1);
        let (host, port) = prefill
            .worker
            .host_and_port()
            .ok_or_else(|| Error::new(ErrorCode::Unavailable, "the prefill worker's url has no host"))?;
        let mut first = proto::GenerateRequest {
            request_id: format!("{}/p", request.request_id),
            sampling: Some(proto::SamplingParams { max_tokens: Some(0), n: Some(1), ..Default::default() }),
            disaggregation: Some(proto::Disaggregation {
                bootstrap_room: room.number(),
                half: proto::DisaggregationHalf::Prefill.into(),
                ..Default::default()
            }),
            ..request.clone()
        };
        (first.logprobs, first.grammar) = (None, None);
        request.disaggregation = Some(proto::Disaggregation {
            bootstrap_host: host,
            bootstrap_port: port.into(),
            bootstrap_room: room.number(),
            half: proto::DisaggregationHalf::Decode.into(),
            ..Default::default()
        });
        app.metrics.pd_requests.with(["pair"]).inc();
        let prompt = Self::send(app, job, prefill, first, arrived, None)?;
        let mut leg = Self::send(app, job, decode, request, arrived, None)
            .inspect_err(|_| job.live.left(&prompt.worker, &prompt.id))?;
        let tracker = app.tracker.clone();
        leg.half = Some(Half::new(prompt.worker, prompt.id, prompt.stream, room, tracker));
        Ok(leg)
    }

    /// What to ask about whoever the first piece waits for.
    pub(super) fn watch(&self) -> Option<Watch> {
        match &self.half {
            Some(half) if !half.done => half.watch(),
            _ => self.stream.watch(),
        }
    }

    /// Whoever the first piece waits for was silent for too long.
    pub(super) fn blame(&mut self) {
        match &mut self.half {
            Some(half) if !half.done => half.blame(),
            _ => self.stream.blame(),
        }
    }

    /// A sequence from where a lost leg left it.
    pub(super) fn resume(
        app: &App,
        job: &Job,
        choice: Choice,
        arrived: Instant,
        sequence: u32,
        emitted: &Emitted,
    ) -> Result<Self> {
        let mut request = job.request();
        if sequence > 0 {
            // Two sequences may meet on one worker.
            request.request_id = format!("{}#{sequence}", request.request_id);
        }
        if let Some(sampling) = &mut request.sampling {
            sampling.n = Some(1);
        }
        if let Some(logprobs) = &mut request.logprobs {
            logprobs.input_start = None;
        }
        // The lease is the dead worker's.
        request.lease = None;
        request.resume = Some(proto::Resume {
            emitted_token_ids: emitted.ids.clone(),
            emitted_text_bytes: emitted.text_bytes,
            sequence_index: sequence,
        });
        Self::send(app, job, choice, request, arrived, Some(sequence))
    }

    fn send(
        app: &App,
        job: &Job,
        choice: Choice,
        request: proto::GenerateRequest,
        arrived: Instant,
        sequence: Option<u32>,
    ) -> Result<Self> {
        let Choice { worker, guard, predicted_cached_tokens, decision } = choice;
        let id = request.request_id.clone();
        job.live.runs_at(&worker, &id);
        if job.live.is_aborted() {
            return Err(Error::new(ErrorCode::Cancelled, "the request was aborted before a worker had it"));
        }
        let called = Called { id: job.live.id().as_str(), tag: job.tag.as_deref(), asked: job.asked };
        app.explanations.note(called, Some(&job.model.name), decision);
        let deadline = time_left(job.permit.as_deref(), app.options.request_timeout, arrived);
        let numerics_id = worker.model().map(|model| model.info.numerics_id.clone()).unwrap_or_default();
        let stream = worker
            .submit(request, SubmitOptions { deadline, guard: Some(guard), ..SubmitOptions::default() })
            .inspect_err(|_| job.live.left(&worker, &id))?;
        let predicted = predicted_cached_tokens;
        Ok(Self { stream, worker, id, sequence, numerics_id, predicted, half: None })
    }
}
