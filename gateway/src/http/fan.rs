//! Asks every worker the same thing at once, each with a deadline of its own.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result};
use branchline_worker::Worker;
use bytes::Bytes;
use futures_util::future::join_all;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use tokio::time::timeout;

use crate::app::App;
use crate::config::Secret;
use crate::http::relay::bearer;

/// Longest wait for one worker's answer to an admin call.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest answer of an HTTP worker that is read.
const ANSWER_BYTES: usize = 1 << 20;

/// One answer a worker, in the order of the fleet.
pub(super) async fn ask_all<T, F>(app: &App, ask: impl Fn(Arc<Worker>) -> F) -> Vec<(Arc<Worker>, Result<T>)>
where
    F: Future<Output = Result<T>>,
{
    let workers = app.fleet.workers();
    ask_each(workers.iter().cloned(), |worker| (Arc::clone(&worker), ask(worker))).await
}

/// One answer a question, each of them to some worker.
pub(super) async fn ask_each<Q, T, F>(
    questions: impl IntoIterator<Item = Q>,
    ask: impl Fn(Q) -> (Arc<Worker>, F),
) -> Vec<(Arc<Worker>, Result<T>)>
where
    F: Future<Output = Result<T>>,
{
    join_all(questions.into_iter().map(|question| {
        let (worker, answer) = ask(question);
        async move {
            let outcome = timeout(PATIENCE, answer).await.unwrap_or_else(|_| {
                let message = format!("worker {} did not answer within {PATIENCE:?}", worker.url);
                Err(Error::new(ErrorCode::DeadlineExceeded, message))
            });
            (worker, outcome)
        }
    }))
    .await
}

/// Sends an admin call to an HTTP worker and reads its whole answer.
pub(super) async fn call(
    app: &App,
    worker: &Worker,
    method: Method,
    path: &str,
    body: Bytes,
) -> Result<(StatusCode, Bytes)> {
    let Some(http) = worker.http() else {
        return Err(Error::internal(format!("{path} was to be asked of an engine over HTTP")));
    };
    let mut request =
        Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
    let token = worker.token(app.options.worker_token.as_ref().map(Secret::reveal));
    if let Some(credential) = token.as_deref().and_then(bearer) {
        request = request.header(header::AUTHORIZATION, credential);
    }
    let request =
        request.body(body).map_err(|error| Error::internal(format!("{path} is no request: {error}")))?;
    let response = http.send(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_BYTES).collect().await;
    let body = body
        .map_err(|error| Error::new(ErrorCode::UpstreamFailed, format!("the answer broke off: {error}")))?;
    Ok((status, body.to_bytes()))
}
