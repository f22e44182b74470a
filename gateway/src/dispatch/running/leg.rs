//! One worker's stream of deltas for a job, or for one of its sequences.

use std::sync::Arc;
use std::time::Instant;

use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{Choice, DeltaStream, RouteQuery, SubmitOptions, Transport, Worker, proto};

use super::emitted::Emitted;
use crate::app::App;
use crate::dispatch::contract::cache_key;
use crate::dispatch::{Job, JobLease};
use crate::http::Called;

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
}

impl Leg {
    /// A worker of the policy's choice for the whole job, none of `tried`.
    pub(super) fn choose(app: &App, job: &Job, tried: &[WorkerId]) -> Result<Choice> {
        let query = RouteQuery { exclude: tried, ..query(job, &job.tokens) };
        app.fleet.choose(Some(&job.model.name), &query)
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
        let query =
            RouteQuery { exclude: &exclude, numerics_id: Some(&lost.numerics_id), ..query(job, &tokens) };
        app.fleet.choose(Some(&job.model.name), &query)
    }

    /// The whole job on a chosen worker.
    pub(super) fn first(app: &App, job: &Job, choice: Choice, arrived: Instant) -> Result<Self> {
        Self::send(app, job, choice, job.request(), arrived, None)
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
        let deadline = app.options.request_timeout.map(|limit| limit.saturating_sub(arrived.elapsed()));
        let numerics_id = worker.model().map(|model| model.info.numerics_id.clone()).unwrap_or_default();
        let stream = worker
            .submit(request, SubmitOptions { deadline, guard: Some(guard), ..SubmitOptions::default() })
            .inspect_err(|_| job.live.left(&worker, &id))?;
        Ok(Self { stream, worker, id, sequence, numerics_id, predicted: predicted_cached_tokens })
    }
}

fn query<'a>(job: &'a Job, tokens: &'a [u32]) -> RouteQuery<'a> {
    RouteQuery {
        token_ids: tokens,
        namespace: cache_key(&job.routing),
        key: job.key,
        transport: Some(Transport::Grpc),
        engine_id: job.lease.as_ref().and_then(JobLease::engine_id),
        ..RouteQuery::default()
    }
}
