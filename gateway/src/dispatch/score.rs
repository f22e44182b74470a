//! A score: one call to one engine, tried elsewhere while it has not begun.

use std::sync::Arc;
use std::time::Instant;

use branchline_core::Result;
use branchline_protocol::Routing;
use branchline_worker::{Model, RouteQuery, Transport, proto};

use super::contract::{cache_key, cache_namespace, time_left};
use super::{JobLease, LiveGuard, single};
use crate::app::App;
use crate::guard::Permit;
use crate::middleware::route::Plan;

/// One prompt and its continuations, as ids.
#[derive(Debug)]
pub struct ScoreJob {
    /// The model that scores.
    pub model: Arc<Model>,
    /// Its entry in the table of live requests.
    pub live: LiveGuard,
    /// The prompt.
    pub prefix: Vec<u32>,
    /// What may follow; none is empty.
    pub choices: Vec<Vec<u32>>,
    /// Cache separation.
    pub routing: Routing,
    /// Its lease, checked.
    pub lease: Option<JobLease>,
    /// What it was let in with, if anything is limited.
    pub permit: Option<Arc<Permit>>,
    /// Whom middleware rules out.
    pub(crate) plan: Plan,
}

impl ScoreJob {
    /// What the fleet is asked when a worker is chosen.
    pub(crate) fn query(&self) -> RouteQuery<'_> {
        RouteQuery {
            token_ids: &self.prefix,
            namespace: cache_key(&self.routing),
            transport: Some(Transport::Grpc),
            engine_id: self.lease.as_ref().and_then(JobLease::engine_id),
            ..RouteQuery::default()
        }
    }
}

/// Scores on the best worker. Dropping the future ends the work there.
///
/// # Errors
/// `Unavailable` if no worker can take it, or the worker's refusal.
pub async fn score(app: &App, job: ScoreJob, arrived: Instant) -> Result<(ScoreJob, proto::ScoreResponse)> {
    let found = single::ask(app, &job.model.name, &job.plan, job.query(), |worker| {
        let request = request(app, &job, arrived);
        async move { worker.score(request).await }
    })
    .await?;
    if let Some(permit) = &job.permit {
        let choices: usize = job.choices.iter().map(Vec::len).sum();
        permit.used(u32::try_from(job.prefix.len() + choices).unwrap_or(u32::MAX));
    }
    Ok((job, found))
}

fn request(app: &App, job: &ScoreJob, arrived: Instant) -> proto::ScoreRequest {
    let deadline = time_left(job.permit.as_deref(), app.options.request_timeout, arrived);
    proto::ScoreRequest {
        request_id: job.live.id().as_str().to_owned(),
        prefix_token_ids: job.prefix.clone(),
        choices: job.choices.iter().map(|ids| proto::Tokens { token_ids: ids.clone() }).collect(),
        cache_namespace: cache_namespace(&job.routing),
        lease: job.lease.as_ref().map(JobLease::to_proto),
        deadline_ms: deadline.map(|left| left.as_millis().max(1) as u64),
        traceparent: String::new(),
    }
}
