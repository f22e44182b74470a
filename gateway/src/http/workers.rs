//! `/workers` and the older `/add_worker`, `/remove_worker`, `/list_workers`: registration in the shapes that users of
//! SGLang's gateway and its descendants know.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use axum::routing::{get, post};
use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{Phase, Source, Worker, WorkerPatch, WorkerSpec};
use http::{Request, StatusCode, header};
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Refusal, json as answer};
use crate::app::App;
use crate::guard::read_body;
use crate::workers::{Added, key};

type Answered = std::result::Result<Response, Refusal>;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/workers", get(list).post(add))
        .route("/workers/{id}", get(show).patch(patch).put(patch).delete(remove))
        .route("/add_worker", post(add_by_url))
        .route("/remove_worker", post(remove_by_url))
        .route("/list_workers", get(list_urls))
}

/// A worker as the lists show it: our names, and the peers' beside them.
pub(super) fn describe(worker: &Worker) -> Value {
    let (info, spec) = (worker.info(), worker.spec());
    let status = match (info.ready, info.draining) {
        (_, true) => "Draining",
        (true, false) => "Ready",
        (false, false) if info.reason == "not reached yet" => "Pending",
        (false, false) => "NotReady",
    };
    json!({
        "id": info.id,
        "url": info.url,
        "kind": info.transport,
        "ready": info.ready,
        "reason": info.reason,
        "health": info.health,
        "breaker": worker.breaker().name(),
        "draining": info.draining,
        "runtime": info.runtime,
        "prefill_rate": info.prefill_rate,
        "model": info.models.first(),
        "models": info.models,
        "in_flight": info.in_flight,
        "model_id": info.models.first(),
        "connection_mode": info.transport,
        "runtime_type": info.runtime,
        "worker_type": spec.worker_type,
        "priority": spec.priority,
        "cost": spec.cost,
        "labels": spec.labels,
        "source": source(&spec.source),
        "is_healthy": info.ready && worker.breaker() == Phase::Closed,
        "status": status,
        "load": info.in_flight,
    })
}

/// Where a worker came from.
fn source(source: &Source) -> Value {
    match source {
        Source::Kubernetes(namespace, pod, uid) => {
            json!({"kind": source.name(), "namespace": namespace, "pod": pod, "uid": uid})
        }
        _ => json!({"kind": source.name()}),
    }
}

async fn list(State(app): State<Arc<App>>, Query(query): Query<HashMap<String, String>>) -> Response {
    let all = app.fleet.workers();
    let wanted = query.get("model").or_else(|| query.get("model_id"));
    let serves = |worker: &&Arc<Worker>| {
        wanted.is_none_or(|model| worker.served().is_some_and(|names| names.contains(model)))
    };
    let chosen: Vec<_> = all.iter().filter(serves).collect();
    let mut workers: Vec<_> = chosen.iter().map(|worker| describe(worker)).collect();
    let healthy = chosen.iter().filter(|worker| worker.is_ready()).count();
    let load: u64 = chosen.iter().map(|worker| worker.in_flight()).sum();
    let of_type = |name: &str| chosen.iter().filter(|worker| worker.spec().worker_type == name).count();
    let (prefill, decode) = (of_type("prefill"), of_type("decode"));
    let mut models: Vec<String> =
        chosen.iter().flat_map(|worker| worker.served().unwrap_or_default()).collect();
    models.sort();
    models.dedup();
    let pending = if wanted.is_none() { app.workers.pending() } else { Vec::new() };
    workers.extend(pending.iter().map(|url| {
        let reason = "has not told yet what it speaks";
        json!({"id": url, "url": url, "ready": false, "is_healthy": false, "status": "Pending", "reason": reason})
    }));
    let stats = json!({
        "total_workers": workers.len(),
        "healthy_workers": healthy,
        "total_models": models.len(),
        "total_load": load,
        "by_type": {"regular": workers.len() - prefill - decode, "prefill": prefill, "decode": decode},
    });
    answer(StatusCode::OK, &json!({"workers": workers, "total": workers.len(), "stats": stats}))
}

async fn add(State(app): State<Arc<App>>, request: Request<Body>) -> Answered {
    let spec: WorkerSpec = read_json(&app, request).await?;
    Ok(accepted(&app, spec)?)
}

/// The fleet takes a worker at once; that it is reached is another matter, which `status` tells.
fn accepted(app: &Arc<App>, spec: WorkerSpec) -> Result<Response> {
    if spec.url.is_empty() {
        return Err(Error::invalid("url", "url is missing; give {\"url\": \"http://host:port\"}"));
    }
    let url = spec.url.clone();
    let (id, mut shown) = match app.workers.add(&app.fleet, spec)? {
        Added::Worker(worker) => {
            tracing::info!(worker = %worker.id, url = %worker.url, "worker added");
            (worker.id.to_string(), describe(&worker))
        }
        Added::Pending(address) => {
            tracing::info!(url, "worker will be added once it tells what it speaks");
            let shown = json!({"id": address, "url": url, "ready": false});
            (address, shown)
        }
    };
    let location = format!("/workers/{id}");
    shown["worker_id"] = id.as_str().into();
    shown["status"] = "accepted".into();
    shown["location"] = location.as_str().into();
    shown["message"] = "the worker is being reached; its status tells when it takes requests".into();
    let mut response = answer(StatusCode::ACCEPTED, &shown);
    if let Ok(location) = location.parse() {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

async fn show(State(app): State<Arc<App>>, Path(id): Path<String>) -> Answered {
    Ok(answer(StatusCode::OK, &describe(&*find(&app, &id)?)))
}

async fn patch(State(app): State<Arc<App>>, Path(id): Path<String>, request: Request<Body>) -> Answered {
    let patch: WorkerPatch = read_json(&app, request).await?;
    let worker = find(&app, &id)?;
    let worker = app.workers.patch(&app.fleet, worker.id, &patch)?;
    tracing::info!(worker = %worker.id, url = %worker.url, "worker changed");
    Ok(answer(StatusCode::OK, &describe(&worker)))
}

async fn remove(State(app): State<Arc<App>>, Path(id): Path<String>) -> Answered {
    if app.workers.withdraw(&id)? {
        return Ok(answer(StatusCode::OK, &json!({"id": id, "url": id, "removed": true})));
    }
    Ok(take_out(&app, &*find(&app, &id)?)?)
}

/// Answers at once: the worker gets no new requests from now on, and its running ones may end.
fn take_out(app: &Arc<App>, worker: &Worker) -> Result<Response> {
    app.workers.forget(worker)?;
    tracing::info!(worker = %worker.id, url = %worker.url, "worker removed");
    let mut shown = describe(worker);
    shown["status"] = "Draining".into();
    shown["removed"] = true.into();
    let drained = app.fleet.retire(worker.id, app.options.drain_timeout);
    let stop = app.stop.clone();
    app.tracker.spawn(async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = drained => {}
        }
    });
    Ok(answer(StatusCode::OK, &shown))
}

#[derive(Deserialize)]
struct ByUrl {
    url: String,
    api_key: Option<String>,
}

async fn add_by_url(State(app): State<Arc<App>>, Query(query): Query<ByUrl>) -> Answered {
    let spec = WorkerSpec { api_key: query.api_key, ..WorkerSpec::new(query.url) };
    let _ = accepted(&app, spec.clone())?;
    let message = format!("Successfully added worker: {}", spec.url);
    Ok(answer(StatusCode::OK, &json!({"success": true, "message": message, "url": spec.url})))
}

async fn remove_by_url(State(app): State<Arc<App>>, Query(query): Query<ByUrl>) -> Answered {
    if !app.workers.withdraw(&query.url)? {
        let worker = find(&app, &query.url)?;
        let _ = take_out(&app, &worker)?;
    }
    let message = format!("Successfully removed worker: {}", query.url);
    Ok(answer(StatusCode::OK, &json!({"success": true, "message": message, "url": query.url})))
}

async fn list_urls(State(app): State<Arc<App>>) -> Response {
    let urls: Vec<String> = app.fleet.workers().iter().map(|worker| worker.url.clone()).collect();
    answer(StatusCode::OK, &json!({"urls": urls}))
}

/// The worker with this id or URL.
fn find(app: &App, id: &str) -> Result<Arc<Worker>> {
    let number = id.strip_prefix('w').and_then(|number| number.parse().ok()).map(WorkerId);
    if let Some(worker) = number.and_then(|id| app.fleet.worker(id)) {
        return Ok(worker);
    }
    let same = |worker: &&Arc<Worker>| key(&worker.url) == key(id);
    app.fleet.workers().iter().find(same).cloned().ok_or_else(|| {
        let message = format!("worker '{id}' is not in the fleet; GET /workers lists all");
        Error::new(ErrorCode::NotFound, message).with_field("id")
    })
}

/// The body as JSON of a known form.
async fn read_json<T: for<'de> Deserialize<'de>>(app: &App, request: Request<Body>) -> Result<T> {
    let body = read_body(request.into_body(), app.body_limit()).await?;
    serde_json::from_slice(&body).map_err(|error| {
        Error::new(ErrorCode::InvalidArgument, format!("the body is not what this path takes: {error}"))
    })
}
