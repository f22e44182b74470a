//! Operators' routes: probes, metrics, cache flush and aborts; `workers` has the registration. `info` has the two server reports.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Extension, State};
use axum::response::Response;
use axum::routing::{get, post};
use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::Document;
use branchline_worker::{Transport, Worker};
use http::{Method, Request, StatusCode};
use serde_json::{Value, json};

use super::answer::{Refusal, json as answer};
use super::{fan, info, scrape, tree};
use crate::app::App;
use crate::guard::{Trusted, read_body};

type Answered = std::result::Result<Response, Refusal>;

/// Probes, which every listener but that of metrics has.
pub(super) fn probes() -> Router<Arc<App>> {
    Router::new()
        .route("/health", get(health))
        .route("/health_generate", get(health))
        .route("/readiness", get(readiness))
        .route("/liveness", get(liveness))
}

/// This module's routes for operators.
pub(super) fn routes() -> Router<Arc<App>> {
    metrics_routes()
        .route("/server_info", get(info::server))
        .route("/get_server_info", get(info::server))
        .route("/get_model_info", get(info::model))
        .route("/cache/tree", get(tree::tree))
        .route("/flush_cache", post(flush).get(flush))
        .route("/abort_request", post(abort))
}

/// What the metrics port has.
pub(super) fn metrics_routes() -> Router<Arc<App>> {
    Router::new().route("/metrics", get(scrape::metrics))
}

/// 200 while at least one worker, or one whole pair, can be chosen. Which they are is told to operators only.
async fn health(State(app): State<Arc<App>>, trusted: Option<Extension<Trusted>>) -> Response {
    let workers = app.fleet.workers();
    let ready = workers.iter().filter(|worker| worker.is_ready()).count();
    let serving = app.fleet.is_serving(None);
    let status = if serving { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let word = match (serving, ready) {
        (true, _) => "ok",
        (false, 0) => "no worker is ready",
        (false, _) => "no whole pair of workers is ready",
    };
    let mut told = json!({"status": word, "workers_ready": ready, "workers_total": workers.len()});
    if trusted.is_some() {
        told["workers"] = workers.iter().map(|worker| super::workers::describe(worker)).collect();
    }
    answer(status, &told)
}

/// 200 while new requests are welcome: a worker or a whole pair is ready and no stop has been asked for.
async fn readiness(State(app): State<Arc<App>>) -> Response {
    let (status, word) = if app.is_draining() {
        (StatusCode::SERVICE_UNAVAILABLE, "draining")
    } else if app.fleet.is_serving(None) {
        (StatusCode::OK, "ready")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "no worker is ready")
    };
    answer(status, &json!({"status": word}))
}

/// 200 while the process serves at all.
async fn liveness() -> Response {
    answer(StatusCode::OK, &json!({"status": "alive"}))
}

async fn flush(State(app): State<Arc<App>>) -> Response {
    let asked = fan::ask_all(&app, |worker| {
        let app = Arc::clone(&app);
        async move {
            match worker.http() {
                None => {
                    let flushed = worker.flush_cache().await?;
                    Ok(json!({"flushed_pages": flushed.flushed_pages, "held_pages": flushed.held_pages}))
                }
                Some(_) => {
                    let (status, body) =
                        fan::call(&app, &worker, Method::POST, "/flush_cache", Bytes::new()).await?;
                    // Most servers have no such path; that leaves nothing undone that could be done.
                    let supported = !matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED);
                    if supported {
                        accepted(status, &body)?;
                    }
                    Ok(json!({"status": status.as_u16(), "supported": supported}))
                }
            }
        }
    })
    .await;
    let failed = asked.iter().filter(|(_, outcome)| outcome.is_err()).count();
    let workers: Vec<Value> = asked.into_iter().map(|(worker, outcome)| report(&worker, outcome)).collect();
    let status = if failed == 0 { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
    answer(status, &json!({"success": failed == 0, "workers": workers}))
}

fn accepted(status: StatusCode, body: &Bytes) -> Result<()> {
    if status.is_success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(body);
    let message =
        format!("the worker answered {}: {}", status.as_u16(), text.chars().take(200).collect::<String>());
    Err(Error::new(ErrorCode::UpstreamFailed, message))
}

/// A worker's part of a fan-out's answer.
pub(super) fn report(worker: &Worker, outcome: Result<Value>) -> Value {
    let mut shown =
        json!({"id": worker.id.to_string(), "url": worker.url, "kind": worker.transport().to_string()});
    let extra = match outcome {
        Ok(value) => value,
        Err(error) => json!({"error": {"message": error.message, "code": error.code.name()}}),
    };
    if let (Some(shown), Value::Object(extra)) = (shown.as_object_mut(), extra) {
        shown.extend(extra);
    }
    shown
}

/// Ends requests by their exact id, wherever they run. An unknown id is not an error: it may have just ended.
async fn abort(State(app): State<Arc<App>>, request: Request<Body>) -> Answered {
    let body = Document::parse(&read_body(request.into_body(), app.body_limit()).await?)?;
    let rid = body.fields().string("rid")?.unwrap_or_default().to_owned();
    let abort_all = body.fields().bool("abort_all")?.unwrap_or_default();
    if rid.is_empty() && !abort_all {
        let message = "neither rid nor abort_all is given; send {\"rid\": \"…\"} or {\"abort_all\": true}";
        return Err(Error::invalid("rid", message).into());
    }
    // Whoever is not on a worker yet is stopped here; only unknown ids need everybody asked.
    let mut most = u64::MAX;
    let asked = match app.live.abort(&rid) {
        _ if abort_all => {
            app.live.abort_all();
            fan::ask_all(&app, |worker| abort_on(Arc::clone(&app), worker, rid.clone(), true)).await
        }
        Some(parts) if parts.is_empty() => {
            app.metrics.aborts.with(["api"]).inc();
            return Ok(answer(StatusCode::OK, &json!({"aborted": 1, "workers": []})));
        }
        Some(parts) => {
            // However many workers have a part of it, it is one request.
            most = 1;
            fan::ask_each(parts, |(worker, id)| {
                (Arc::clone(&worker), abort_on(Arc::clone(&app), worker, id, false))
            })
            .await
        }
        None => fan::ask_all(&app, |worker| abort_on(Arc::clone(&app), worker, rid.clone(), false)).await,
    };
    let counts =
        asked.iter().filter_map(|(_, outcome)| outcome.as_ref().ok()).filter_map(|v| v["aborted"].as_u64());
    let found = counts.sum::<u64>().min(most);
    app.metrics.aborts.with(["api"]).inc_by(found);
    let workers: Vec<Value> = asked.into_iter().map(|(worker, outcome)| report(&worker, outcome)).collect();
    Ok(answer(StatusCode::OK, &json!({"aborted": found, "workers": workers})))
}

async fn abort_on(app: Arc<App>, worker: Arc<Worker>, rid: String, all: bool) -> Result<Value> {
    match worker.transport() {
        Transport::Http => {
            let body = json!({"rid": rid, "abort_all": all}).to_string();
            let (status, body) =
                fan::call(&app, &worker, Method::POST, "/abort_request", body.into()).await?;
            accepted(status, &body)?;
            Ok(json!({"status": status.as_u16()}))
        }
        _ if all => Ok(json!({"aborted": worker.abort_all().await?})),
        _ => Ok(json!({"aborted": worker.abort(&rid).await?})),
    }
}
