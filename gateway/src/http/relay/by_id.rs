//! What one HTTP worker keeps under an id that only it knows: all of them are asked, and the one that has it answers.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use branchline_core::{Error, ErrorCode, Result};
use branchline_worker::{ResponseBody, Worker};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::request::Parts;
use http::{Request, StatusCode, header};
use tokio::time::timeout;

use super::headers;
use crate::app::App;

/// How long a worker may take to say whether it has something.
const PATIENCE: Duration = Duration::from_secs(10);

/// The answer of the worker that has what the path names; `None` if none has it.
///
/// # Errors
/// `Unavailable` if none has it of those that could be asked, and others could not.
pub(crate) async fn ask_all(app: &Arc<App>, head: &Parts) -> Result<Option<Response>> {
    let workers: Vec<Arc<Worker>> =
        app.fleet.workers().iter().filter(|worker| worker.http().is_some()).cloned().collect();
    let mut asked: FuturesUnordered<_> = workers.iter().map(|worker| ask(app, head, worker)).collect();
    let mut silent = 0_usize;
    while let Some(answer) = asked.next().await {
        match answer {
            Ok(Some(answer)) => return Ok(Some(answer)),
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, "a worker could not be asked for what it keeps");
                silent += 1;
            }
        }
    }
    if silent == 0 {
        return Ok(None);
    }
    let text = format!("no worker that could be asked has it, and {silent} could not be asked; try again");
    Err(Error::new(ErrorCode::Unavailable, text).with_retry_after(Duration::from_secs(1)))
}

async fn ask(app: &App, head: &Parts, worker: &Worker) -> Result<Option<Response>> {
    let Some(http) = worker.http() else { return Ok(None) };
    let mut request = Request::new(Bytes::new());
    *request.method_mut() = head.method.clone();
    *request.uri_mut() = head.uri.clone();
    *request.headers_mut() = headers::to_worker(&head.headers, &app.options);
    request.headers_mut().remove(header::CONTENT_TYPE);
    if let Some(key) = &worker.spec().api_key
        && let Some(value) = headers::bearer(key)
    {
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
    let late = |_| Error::new(ErrorCode::DeadlineExceeded, "it does not answer");
    let answer: http::Response<ResponseBody> =
        timeout(PATIENCE, http.send(request)).await.map_err(late)??;
    match answer.status() {
        // It has never heard of the id, or of such ids at all.
        StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED => Ok(None),
        status if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
            Err(Error::new(ErrorCode::UpstreamFailed, format!("it answers {status}")))
        }
        _ => {
            let (mut head, body) = answer.into_parts();
            headers::strip_hop_by_hop(&mut head.headers);
            Ok(Some(Response::from_parts(head, Body::new(body))))
        }
    }
}
