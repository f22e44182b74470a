//! Health and model list of one HTTP worker, polled.
//!
//! Any answer below 500 to `GET /health` is life: servers without that path answer 404. `GET /v1/models` is read at
//! each return to life and now and then; a worker without it takes any model name.

use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result};
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::{BodyExt, Limited};
use tokio_util::sync::CancellationToken;

use super::HttpWorker;
use crate::options::FleetOptions;
use crate::worker::Worker;

/// Longest model list that is read.
const LIST_BYTES: usize = 4 << 20;
/// Polls between two readings of the model list.
const LIST_EVERY: u32 = 6;

/// Polls until cancelled.
pub(crate) async fn watch(
    owner: &Worker,
    worker: &HttpWorker,
    options: &FleetOptions,
    cancel: &CancellationToken,
) {
    let mut failures = 0_u32;
    let mut polls = 0_u32;
    let mut retry = options.health_retry;
    loop {
        let outcome = tokio::select! {
            () = cancel.cancelled() => return,
            outcome = poll(owner, worker, options, polls.is_multiple_of(LIST_EVERY) || !worker.status.is_ready()) => outcome,
        };
        polls = polls.wrapping_add(1);
        match outcome {
            Ok(()) => {
                failures = 0;
                retry = options.health_retry;
                worker.status.set_ready();
            }
            Err(error) => {
                failures += 1;
                if failures >= options.health_failures || !worker.status.is_ready() {
                    worker.status.set_down(&error.message);
                }
            }
        }
        // A doubtful worker is asked again soon, then ever more slowly.
        let wait = if failures == 0 { options.health_interval } else { retry.min(options.health_interval) };
        if failures > 0 {
            retry = (retry * 2).min(options.health_interval);
        }
        tokio::select! {
            () = cancel.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
            () = worker.suspect.notified() => {
                tokio::select! {
                    () = cancel.cancelled() => return,
                    () = tokio::time::sleep(options.health_retry) => {}
                }
            }
        }
        worker.pool.prune(&mut worker.pool.idle.lock());
    }
}

async fn poll(owner: &Worker, worker: &HttpWorker, options: &FleetOptions, list: bool) -> Result<()> {
    let limit = options.health_interval.max(Duration::from_secs(1));
    let token = owner.token(options.worker_token.as_deref());
    let late = |_| {
        Error::new(
            ErrorCode::DeadlineExceeded,
            format!("no answer to /health within {} ms", limit.as_millis()),
        )
    };
    let status =
        tokio::time::timeout(limit, get(worker, token.as_deref(), "/health")).await.map_err(late)??.0;
    if status.is_server_error() {
        return Err(Error::new(ErrorCode::Unavailable, format!("/health answered {status}")));
    }
    if list {
        // A slow or failing list leaves the last one in place.
        if let Ok(Ok((status, body))) =
            tokio::time::timeout(limit, get(worker, token.as_deref(), "/v1/models")).await
        {
            worker.served.store(names(status, &body).map(Arc::new));
            if worker.runtime().is_none() {
                let kind = runtime_of(status, &body);
                let asked = async {
                    match kind {
                        Some(kind) => Some(kind),
                        // Unknown paths are not asked of servers that list nothing, nor before they serve.
                        None if worker.status.is_ready() && worker.served().is_some() => {
                            ask_runtime(worker, token.as_deref()).await
                        }
                        None => None,
                    }
                };
                if let Ok(Some(kind)) = tokio::time::timeout(limit, asked).await {
                    tracing::info!(worker = %owner.url, runtime = kind, "found out what runs there");
                    let _ = worker.runtime.set(kind);
                }
            }
        }
    }
    Ok(())
}

/// What the model list's `owned_by` says; `None` if it could be anything.
fn runtime_of(status: StatusCode, body: &[u8]) -> Option<&'static str> {
    if !status.is_success() {
        return None;
    }
    let list: serde_json::Value = serde_json::from_slice(body).ok()?;
    let owner = list.get("data")?.get(0)?.get("owned_by")?.as_str()?;
    crate::RUNTIMES.into_iter().find(|kind| owner.eq_ignore_ascii_case(kind) && *kind != "openai")
}

/// Asks the paths that only one kind of server has.
async fn ask_runtime(worker: &HttpWorker, token: Option<&str>) -> Option<&'static str> {
    let paths = [
        ("/get_model_info", "model_path", "sglang"),
        ("/props", "default_generation_settings", "llamacpp"),
        ("/version", "version", "vllm"),
    ];
    for (path, key, kind) in paths {
        let (status, body) = get(worker, token, path).await.ok()?;
        let answer = serde_json::from_slice::<serde_json::Value>(&body).unwrap_or_default();
        if status.is_success() && answer.get(key).is_some() {
            return Some(kind);
        }
    }
    Some("openai")
}

async fn get(worker: &HttpWorker, token: Option<&str>, path: &str) -> Result<(StatusCode, Bytes)> {
    let mut request = Request::get(path).header(header::ACCEPT, "application/json");
    if let Some(token) = token {
        request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
    }
    let request = request
        .body(Bytes::new())
        .map_err(|cause| Error::internal(format!("probe of {path} cannot be built: {cause}")))?;
    let request = worker.localise(request);
    let response = worker
        .exchange(worker.pool.connect().await?, request)
        .await
        .map_err(|cause| Error::new(ErrorCode::UpstreamFailed, format!("{path} broke off: {cause}")))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), LIST_BYTES).collect().await;
    Ok((status, body.map(|body| body.to_bytes()).unwrap_or_default()))
}

/// The ids of an OpenAI model list; `None` if it is not one.
fn names(status: StatusCode, body: &[u8]) -> Option<Vec<String>> {
    if !status.is_success() {
        return None;
    }
    let list: serde_json::Value = serde_json::from_slice(body).ok()?;
    let names: Vec<_> = list
        .get("data")?
        .as_array()?
        .iter()
        .filter_map(|row| row.get("id")?.as_str())
        .map(str::to_owned)
        .collect();
    (!names.is_empty()).then_some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_list_gives_its_ids() {
        let body = br#"{"object":"list","data":[{"id":"a","object":"model"},{"id":"b"}]}"#;
        assert_eq!(names(StatusCode::OK, body), Some(vec!["a".into(), "b".into()]));
    }

    #[test]
    fn the_owner_of_the_models_tells_the_server() {
        let list = |owner: &str| format!(r#"{{"data":[{{"id":"m","owned_by":"{owner}"}}]}}"#);
        for (owner, kind) in [
            ("vllm", Some("vllm")),
            ("sglang", Some("sglang")),
            ("llamacpp", Some("llamacpp")),
            ("me", None),
            ("openai", None),
        ] {
            assert_eq!(runtime_of(StatusCode::OK, list(owner).as_bytes()), kind, "{owner}");
        }
        assert_eq!(runtime_of(StatusCode::NOT_FOUND, list("vllm").as_bytes()), None);
    }

    #[test]
    fn anything_else_means_any_name() {
        for (status, body) in [
            (StatusCode::NOT_FOUND, &br#"{"data":[{"id":"a"}]}"#[..]),
            (StatusCode::OK, b"<html>"),
            (StatusCode::OK, br#"{"data":[]}"#),
            (StatusCode::OK, br#"{"data":{"id":"a"}}"#),
            (StatusCode::OK, b""),
        ] {
            assert_eq!(names(status, body), None);
        }
    }
}
