//! Operators' routes that load and unload LoRA adapters, in SGLang's form and in vLLM's: both mean every engine of a model.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::{Document, Fields};
use branchline_worker::{Worker, proto};
use futures_util::future::join_all;
use http::{Request, StatusCode};
use serde_json::{Map, Value, json};

use super::admin::report;
use super::answer::{Refusal, json as answer};
use super::intake::{Named, resolve};
use crate::app::App;
use crate::guard::read_body;

/// Longest wait for one worker to read an adapter.
const PATIENCE: Duration = Duration::from_secs(120);

type Answered = std::result::Result<Response, Refusal>;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/load_lora_adapter", post(load))
        .route("/unload_lora_adapter", post(unload))
        .route("/v1/load_lora_adapter", post(load_v1))
        .route("/v1/unload_lora_adapter", post(unload_v1))
}

async fn load(State(app): State<Arc<App>>, request: Request<Body>) -> Answered {
    let done = change(&app, request, true).await?;
    Ok(done.told())
}

async fn unload(State(app): State<Arc<App>>, request: Request<Body>) -> Answered {
    let done = change(&app, request, false).await?;
    Ok(done.told())
}

async fn load_v1(State(app): State<Arc<App>>, request: Request<Body>) -> Answered {
    let done = change(&app, request, true).await?;
    Ok(format!("Success: LoRA adapter '{}' added successfully.", done.name).into_response())
}

async fn unload_v1(State(app): State<Arc<App>>, request: Request<Body>) -> Answered {
    let done = change(&app, request, false).await?;
    Ok(format!("Success: LoRA adapter '{}' removed successfully.", done.name).into_response())
}

/// A change that every engine has made.
struct Done {
    name: String,
    workers: Vec<Value>,
    /// What is loaded afterwards, by name.
    loaded: Map<String, Value>,
}

impl Done {
    fn told(self) -> Response {
        let Self { workers, loaded, .. } = self;
        let body = json!({"success": true, "loaded_adapters": loaded, "workers": workers});
        answer(StatusCode::OK, &body)
    }
}

/// Does it on every engine of the model at once. What some have done stays done: the error says who has not.
async fn change(app: &App, request: Request<Body>, load: bool) -> Result<Done> {
    let body = Document::parse(&read_body(request.into_body(), app.body_limit()).await?)?;
    let fields = body.fields();
    check_names(&fields, load)?;
    let name = required(&fields, "lora_name")?;
    let path = if load { required(&fields, "lora_path")? } else { String::new() };
    let base = base(app, fields.string("model")?)?;
    let engines = app.fleet.adapter_engines(&base);
    if engines.is_empty() {
        let text = format!("no engine serves model '{base}'; adapters are for engines");
        return Err(Error::new(ErrorCode::NotFound, text).with_field("model"));
    }
    let asked = join_all(engines.iter().map(|worker| {
        let (name, path) = (name.clone(), path.clone());
        async move {
            let outcome = tokio::time::timeout(PATIENCE, ask(worker, name, path, load)).await;
            outcome.unwrap_or_else(|_| {
                let text = format!("the worker did not answer within {PATIENCE:?}");
                Err(Error::new(ErrorCode::DeadlineExceeded, text))
            })
        }
    }))
    .await;
    // What is not there need not be unloaded, as long as it was somewhere.
    let gone = !load && asked.iter().any(Result::is_ok);
    let is_fault = |error: &&Error| !(gone && error.code == ErrorCode::NotFound);
    let faults: Vec<&Error> =
        asked.iter().filter_map(|outcome| outcome.as_ref().err()).filter(is_fault).collect();
    if let Some(error) = faults.first() {
        return Err(refusal((*error).clone(), faults.len(), engines.len(), load));
    }
    let workers =
        engines.iter().zip(asked).map(|(worker, outcome)| report(worker, outcome)).collect::<Vec<_>>();
    let mut loaded = Map::new();
    for adapter in engines.iter().flat_map(|worker| worker.adapters().adapters.clone()) {
        loaded.insert(adapter.name, adapter.path.into());
    }
    Ok(Done { name, workers, loaded })
}

async fn ask(worker: &Worker, name: String, path: String, load: bool) -> Result<Value> {
    if load {
        let adapter = worker.load_adapter(proto::LoadAdapterRequest { name, path }).await?;
        return Ok(json!({"digest": adapter.digest, "rank": adapter.rank}));
    }
    let running = worker.unload_adapter(proto::UnloadAdapterRequest { name }).await?;
    Ok(json!({"running": running}))
}

/// The first engine's error in the words of these routes; which it is not for all, if it is so.
fn refusal(mut error: Error, failed: usize, all: usize, load: bool) -> Error {
    error.field = match error.field.as_deref() {
        Some("name") => Some("lora_name".to_owned()),
        Some("path") => Some("lora_path".to_owned()),
        None if error.code == ErrorCode::NotFound => Some("lora_name".to_owned()),
        _ => None,
    };
    if failed < all {
        let done = if load { "loaded" } else { "unloaded" };
        error.message =
            format!("{done} on {} of {all} engines; another one: {}", all - failed, error.message);
        error.code = ErrorCode::UpstreamFailed;
    }
    error
}

/// Refuses what would be dropped in silence. What is never evicted is pinned; the number of an adapter is its worker's own.
fn check_names(fields: &Fields<'_>, load: bool) -> Result<()> {
    for name in fields.names() {
        let known = match name {
            "lora_name" | "model" => true,
            "lora_path" | "pinned" => load,
            "lora_int_id" => !load,
            // vLLM's: put it in the place of another one.
            "load_inplace" => load && fields.bool(name)? != Some(true),
            _ => false,
        };
        if !known && fields.get(name).is_some() {
            let remedy = if name == "load_inplace" { "unload the old one first" } else { "leave it out" };
            return Err(Error::invalid(name, format!("`{name}` is not implemented here; {remedy}")));
        }
    }
    Ok(())
}

fn required(fields: &Fields<'_>, name: &str) -> Result<String> {
    match fields.string(name)? {
        Some(text) if !text.is_empty() => Ok(text.to_owned()),
        _ => Err(Error::invalid(name, format!("`{name}` is missing; send a string that is not empty"))),
    }
}

/// The base model that is meant: the one there is, unless it is named.
fn base(app: &App, named: Option<&str>) -> Result<String> {
    let models: Vec<_> = app.fleet.models().into_iter().filter(|model| model.can("generate")).collect();
    if named.is_none() && models.len() > 1 {
        let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
        let text = format!("`model` is missing and there are several; send one of: {}", names.join(", "));
        return Err(Error::invalid("model", text));
    }
    match (named, models.first()) {
        (None, Some(only)) => Ok(only.name.clone()),
        _ => match resolve(app, named)? {
            Named { model, adapter: None, .. } => Ok(model.name.clone()),
            _ => Err(Error::invalid("model", "`model` names an adapter; send the name of its base model")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_that_some_engines_made_is_told_of_as_half_done() {
        let error = || Error::invalid("path", "adapter /a: there is no adapter_config.json in it");
        let all = refusal(error(), 2, 2, true);
        assert_eq!((all.code, all.field.as_deref()), (ErrorCode::InvalidArgument, Some("lora_path")));
        let some = refusal(error(), 1, 3, true);
        assert_eq!(some.code, ErrorCode::UpstreamFailed);
        assert!(
            some.message.starts_with("loaded on 2 of 3 engines; another one: adapter /a"),
            "{}",
            some.message
        );
    }
}
