//! Vectors and ranks: one call to one engine whose model makes them, tried elsewhere if that worker fails.

use std::sync::Arc;
use std::time::Instant;

use branchline_core::{Error, ErrorCode, Result};
use branchline_worker::{Model, RouteQuery, Transport, proto};

use super::contract::time_left;
use super::{LiveGuard, single};
use crate::app::App;
use crate::guard::Permit;
use crate::middleware::route::Plan;

/// Texts as ids and what is wanted of them.
#[derive(Debug)]
pub struct EmbedJob {
    /// The model that reads them.
    pub model: Arc<Model>,
    /// Its entry in the table of live requests.
    pub live: LiveGuard,
    /// Texts, or pairs of them.
    pub inputs: Vec<proto::EmbedInput>,
    /// What is wanted.
    pub task: proto::EmbedTask,
    /// Leading values to keep of each vector.
    pub dimensions: Option<u32>,
    /// All ids one after the other: what the work is weighed by.
    pub(crate) weighed: Vec<u32>,
    /// What it was let in with, if anything is limited.
    pub permit: Option<Arc<Permit>>,
    /// Whom middleware rules out.
    pub(crate) plan: Plan,
}

impl EmbedJob {
    /// A job that middleware has not seen.
    pub fn new(
        model: Arc<Model>,
        live: LiveGuard,
        inputs: Vec<proto::EmbedInput>,
        task: proto::EmbedTask,
    ) -> Self {
        let weighed = inputs.iter().flat_map(|input| &input.token_ids).copied().collect();
        Self { model, live, inputs, task, dimensions: None, weighed, permit: None, plan: Plan::default() }
    }

    /// Tokens of all texts.
    pub fn tokens(&self) -> usize {
        self.weighed.len()
    }

    /// What the fleet is asked when a worker is chosen.
    pub(crate) fn query(&self) -> RouteQuery<'_> {
        RouteQuery { token_ids: &self.weighed, transport: Some(Transport::Grpc), ..RouteQuery::default() }
    }
}

/// One result an input from the best worker. Dropping the future ends the work there.
///
/// # Errors
/// `Unavailable` if no worker can take it, or the worker's refusal.
pub async fn embed(app: &App, job: &EmbedJob, arrived: Instant) -> Result<Vec<Vec<f32>>> {
    let found = single::ask(app, &job.model.name, &job.plan, job.query(), |worker| {
        let request = request(app, job, arrived);
        async move { worker.embed(request).await }
    })
    .await?;
    if let Some(permit) = &job.permit {
        permit.used(u32::try_from(job.tokens()).unwrap_or(u32::MAX));
    }
    whole(found, job.inputs.len())
}

/// The results, if there is one for each input.
fn whole(found: proto::EmbedResponse, wanted: usize) -> Result<Vec<Vec<f32>>> {
    let results: Vec<Vec<f32>> = found.results.into_iter().map(|result| result.values).collect();
    if results.len() != wanted || results.iter().any(Vec::is_empty) {
        let text = format!("the worker gave {} results for {wanted} texts", results.len());
        return Err(Error::new(ErrorCode::UpstreamFailed, text));
    }
    Ok(results)
}

fn request(app: &App, job: &EmbedJob, arrived: Instant) -> proto::EmbedRequest {
    let deadline = time_left(job.permit.as_deref(), app.options.request_timeout, arrived);
    proto::EmbedRequest {
        request_id: job.live.id().as_str().to_owned(),
        inputs: job.inputs.clone(),
        task: job.task.into(),
        dimensions: job.dimensions,
        deadline_ms: deadline.map(|left| left.as_millis().max(1) as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_with_a_result_too_few_or_an_empty_one_is_no_answer() {
        let answer = |results: &[usize]| proto::EmbedResponse {
            results: results.iter().map(|&size| proto::EmbedResult { values: vec![0.5; size] }).collect(),
        };
        assert_eq!(whole(answer(&[2, 2]), 2).unwrap(), [[0.5, 0.5], [0.5, 0.5]]);
        for results in [&[2][..], &[2, 0], &[2, 2, 2]] {
            assert_eq!(whole(answer(results), 2).unwrap_err().code, ErrorCode::UpstreamFailed);
        }
    }
}
