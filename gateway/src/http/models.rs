//! `GET /v1/models` and `/v1/models/{id}`: every name that requests may use, of engines and HTTP workers.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::get;
use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::openai::{Model, ModelList};
use http::StatusCode;

use super::answer::json;
use super::intake::{Named, now, resolve, settle};
use crate::app::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v1/models", get(list)).route("/v1/models/{*id}", get(one))
}

async fn list(State(app): State<Arc<App>>) -> Response {
    settle(listing(&app))
}

/// An empty list would say that there is nothing to ask for, which nobody knows before a worker has been reached.
fn listing(app: &App) -> Result<Response> {
    let names = app.fleet.names();
    if names.is_empty() && !app.fleet.workers().iter().any(|worker| worker.is_ready()) {
        return Err(Error::new(ErrorCode::Unavailable, "no worker has been reached yet; try again")
            .with_retry_after(Duration::from_secs(1)));
    }
    let mut data = Vec::new();
    for (name, _) in names {
        let adapters = app.fleet.adapters(&name);
        data.push(describe(app, name.clone()));
        data.extend(adapters.into_iter().map(|own| adapter(app, &name, &own)));
    }
    Ok(json(StatusCode::OK, &ModelList { object: "list", data }))
}

async fn one(State(app): State<Arc<App>>, id: std::result::Result<Path<String>, PathRejection>) -> Response {
    let id = id.map_err(|_| {
        Error::invalid("model", "the model's name in the path is not UTF-8; percent-encode it as UTF-8")
    });
    settle(id.and_then(|Path(id)| find(&app, id)))
}

/// `default` is the first model, as in requests, unless a model has that very name.
fn find(app: &App, id: String) -> Result<Response> {
    let names = app.fleet.names();
    if id == "default"
        && !names.iter().any(|(name, _)| *name == id)
        && let Some((name, _)) = names.into_iter().next()
    {
        return Ok(json(StatusCode::OK, &describe(app, name)));
    }
    if app.fleet.transport(Some(&id)).is_err()
        && let Named { model, adapter: Some(own), .. } = resolve(app, Some(&id))?
    {
        return Ok(json(StatusCode::OK, &Model { id, ..adapter(app, &model.name, &own.name) }));
    }
    Ok(json(StatusCode::OK, &describe(app, id)))
}

fn describe(app: &App, id: String) -> Model {
    let max_model_len = app.fleet.model(&id).map(|model| model.info.context_length);
    Model { id, object: "model", created: now(), owned_by: "branchline", max_model_len, parent: None }
}

fn adapter(app: &App, base: &str, name: &str) -> Model {
    Model { id: format!("{base}:{name}"), parent: Some(base.to_owned()), ..describe(app, base.to_owned()) }
}
