//! The way into every API handler: body, relay or engine, document, model. Knows no API family.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::response::Response;
use branchline_core::{RequestId, Result};
use branchline_protocol::{Document, Fields, Limits, LogprobRequest, Routing, Sampling};
use http::Request;
use http::request::Parts;

use super::answer::refuse;
use super::relay;
use crate::app::App;
use crate::dispatch::{self, Job, LiveGuard, Model, Running};
use crate::guard::read_body;

/// A request for an engine.
pub(super) struct Intake {
    pub(super) app: Arc<App>,
    pub(super) document: Document,
    pub(super) model: Arc<Model>,
    /// The model as the client named it, which is how answers name it.
    pub(super) name: String,
    pub(super) arrived: Instant,
    /// Bytes of the body: bounds the cost of text work.
    pub(super) bytes: usize,
    traceparent: String,
}

/// What became of a request at the door.
pub(super) enum Taken {
    /// It is for an engine.
    Engine(Box<Intake>),
    /// An HTTP worker answered it.
    Answered(Response),
}

/// What all answers to one request begin with.
#[derive(Debug, Clone)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) fingerprint: String,
}

/// Reads the body, relays it if it is for an HTTP worker, else parses it and finds the model.
pub(super) async fn take(app: &Arc<App>, request: Request<Body>) -> Result<Taken> {
    let arrived = Instant::now();
    let (head, body) = request.into_parts();
    let body = read_body(body, app.body_limit()).await?;
    if let Some(response) = relay::try_relay(app, &head, &body).await {
        return Ok(Taken::Answered(response));
    }
    let document = Document::parse(&body)?;
    let (model, name) = resolve(app, document.fields().string("model")?)?;
    Ok(Taken::Engine(Box::new(Intake {
        app: Arc::clone(app),
        document,
        model,
        name,
        arrived,
        bytes: body.len(),
        traceparent: traceparent(&head),
    })))
}

/// The engines' model for a name; none, "" and "default" mean the first unless a model has that very name.
pub(super) fn resolve(app: &App, name: Option<&str>) -> Result<(Arc<Model>, String)> {
    let name = name.unwrap_or_default();
    if let Some(model) = app.fleet.model(name) {
        return Ok((model, name.to_owned()));
    }
    let named = (!matches!(name, "" | "default")).then_some(name);
    match (named, app.fleet.models().into_iter().next()) {
        (None, Some(model)) => {
            let name = model.name.clone();
            Ok((model, name))
        }
        _ => Err(unknown(app, named)),
    }
}

fn unknown(app: &App, name: Option<&str>) -> branchline_core::Error {
    // Only its refusal is wanted: it knows whether the name is wrong or the workers are away.
    match app.fleet.transport(name) {
        Err(error) => error,
        Ok(transport) => {
            branchline_core::Error::internal(format!("a {transport} worker serves the model unseen"))
        }
    }
}

fn traceparent(head: &Parts) -> String {
    let value = head.headers.get("traceparent").and_then(|value| value.to_str().ok());
    value.unwrap_or_default().to_owned()
}

impl Intake {
    /// The request's fields.
    pub(super) fn fields(&self) -> Fields<'_> {
        self.document.fields()
    }

    /// The model's limits.
    pub(super) fn limits(&self) -> Limits {
        dispatch::limits(&self.model)
    }

    /// Takes the client's id, or a new one, into the table of live requests.
    pub(super) fn register(&self, rid: Option<String>, prefix: &str) -> Result<LiveGuard> {
        let id = rid.unwrap_or_else(|| format!("{prefix}{}", uuid::Uuid::new_v4().simple()));
        self.app.live.register(RequestId::new(id))
    }

    /// Starts one prompt.
    pub(super) fn start(
        &self,
        live: LiveGuard,
        tokens: Vec<u32>,
        (sampling, logprobs): (Sampling, Option<LogprobRequest>),
        routing: Routing,
    ) -> Result<Running> {
        let job = Job {
            model: Arc::clone(&self.model),
            live,
            tokens,
            sampling,
            logprobs,
            routing,
            traceparent: self.traceparent.clone(),
        };
        dispatch::start(&self.app, job, self.arrived)
    }

    /// The head of the answer.
    pub(super) fn head(&self, id: &RequestId) -> Head {
        let info = &self.model.info;
        Head {
            id: id.as_str().to_owned(),
            created: now(),
            model: self.name.clone(),
            fingerprint: format!("fp_{}_{}", info.numerics_id, info.weight_version),
        }
    }
}

/// Unix seconds.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// A handler's outcome as the answer. The gate counts refusals.
pub(super) fn settle(outcome: Result<Response>) -> Response {
    outcome.unwrap_or_else(|error| refuse(&error))
}
