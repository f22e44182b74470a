//! One call without effects to one engine: what failed for that worker's sake is asked of another.

use std::sync::Arc;

use branchline_core::{Error, ErrorCode, Result};
use branchline_worker::{RouteQuery, Worker};

use crate::app::App;
use crate::middleware::route::Plan;

const ATTEMPTS: usize = 3;

/// What `call` gives at the best worker of `model`. Dropping the future ends the work there.
///
/// # Errors
/// `Unavailable` if no worker can take it, or the last worker's refusal.
pub(super) async fn ask<T, F: Future<Output = Result<T>>>(
    app: &App,
    model: &str,
    plan: &Plan,
    query: RouteQuery<'_>,
    call: impl Fn(Arc<Worker>) -> F,
) -> Result<T> {
    let mut tried = Vec::new();
    loop {
        let choice =
            plan.choose(&tried, |exclude| app.fleet.choose(Some(model), &RouteQuery { exclude, ..query }))?;
        tried.push(choice.worker.id);
        let outcome = call(Arc::clone(&choice.worker)).await;
        drop(choice.guard);
        match outcome {
            Err(error) if may_move(&error) && tried.len() < ATTEMPTS => {}
            outcome => return outcome,
        }
    }
}

fn may_move(error: &Error) -> bool {
    matches!(error.code, ErrorCode::UpstreamFailed | ErrorCode::Unavailable | ErrorCode::ResourceExhausted)
}
