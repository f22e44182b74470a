//! The way into every API handler: body, relay or engine, document, model. Knows no API family.

use std::future::Future;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::response::Response;
use branchline_core::{Error, ErrorCode, RequestId, Result};
use branchline_protocol::{
    AdapterChoice, Document, Fields, LeaseAsk, Limits, LogprobRequest, Routing, Sampling,
};
use branchline_worker::{Hints, RouteQuery};
use http::request::Parts;
use http::{Extensions, Request};

use super::answer::refuse;
use super::explain::Asked;
use super::hints::hints;
use super::relay;
use super::session::session_key;
use crate::app::App;
use crate::dispatch::{self, Job, JobLease, LeaseWant, LiveGuard, Model, Running};
use crate::guard::{KeyHash, Permit, read_body};
use crate::middleware::route::{self, Plan, RouteHooks};

/// Longest name of a model.
const MAX_NAME_BYTES: usize = 1024;

/// A request for an engine.
pub(super) struct Intake {
    pub(super) app: Arc<App>,
    pub(super) document: Document,
    pub(super) model: Arc<Model>,
    /// The model as the client named it, which is how answers name it.
    pub(super) name: String,
    /// The adapter that the name asks for.
    pub(super) adapter: Option<AdapterChoice>,
    pub(super) arrived: Instant,
    /// Bytes of the body: bounds the cost of text work.
    pub(super) bytes: usize,
    /// Its place among the requests that run at once, if there is a limit.
    pub(super) permit: Option<Arc<Permit>>,
    traceparent: String,
    /// Whose leases it may take and hit, and whose stored responses it sees.
    pub(super) tenant: String,
    tag: Option<String>,
    asked: Option<Asked>,
    key: Option<u64>,
    hints: Hints,
    hooks: Option<Arc<RouteHooks>>,
}

/// What became of a request at the door.
enum Taken {
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

/// Answers a request: relays it if it is for an HTTP worker, else hands it to `serve`. Every API handler is this.
pub(super) async fn answer<F>(
    app: Arc<App>,
    request: Request<Body>,
    serve: impl FnOnce(Intake) -> F,
) -> Response
where
    F: Future<Output = Result<Response>>,
{
    match take(&app, request).await {
        Ok(Taken::Engine(intake)) => settle(serve(*intake).await),
        Ok(Taken::Answered(relayed)) => relayed,
        Err(error) => refuse(&error),
    }
}

/// Reads the body, relays it if it is for an HTTP worker, else parses it and finds the model.
async fn take(app: &Arc<App>, request: Request<Body>) -> Result<Taken> {
    let arrived = Instant::now();
    let (head, body) = request.into_parts();
    let body = read_body(body, app.body_limit()).await?;
    if let Some(response) = relay::try_relay(app, &head, &body).await {
        return Ok(Taken::Answered(response));
    }
    let document = Document::parse(&body)?;
    let Named { model, name, adapter } = resolve(app, document.fields().string("model")?)?;
    let hints = hints(&head.headers)?;
    let permit = head.extensions.get::<Arc<Permit>>().cloned();
    if let Some(permit) = &permit {
        permit.name_model([&*model.name])?;
    }
    let needs_key = app.fleet.needs_key(Some(&model.name));
    let key =
        needs_key.then(|| session_key(&head.headers, &app.options, || relay::session_of(&body))).flatten();
    Ok(Taken::Engine(Box::new(Intake {
        app: Arc::clone(app),
        document,
        model,
        name,
        adapter,
        arrived,
        bytes: body.len(),
        permit,
        tenant: tenant_of(&head.extensions),
        traceparent: header(&head, "traceparent").unwrap_or_default(),
        tag: header(&head, "x-request-id"),
        asked: head.extensions.get().copied(),
        key,
        hints,
        hooks: head.extensions.get::<Arc<RouteHooks>>().cloned(),
    })))
}

/// What a name means.
pub(super) struct Named {
    pub(super) model: Arc<Model>,
    /// As the client wrote it, or the first model's own.
    pub(super) name: String,
    pub(super) adapter: Option<AdapterChoice>,
}

/// The engines' model for a name; none, "" and "default" mean the first unless a model has that very name, and
/// `base:adapter` an adapter of what `base` means.
pub(super) fn resolve(app: &App, name: Option<&str>) -> Result<Named> {
    let name = name.unwrap_or_default();
    if name.len() > MAX_NAME_BYTES {
        let text = format!("`model` has {} bytes; a name has at most {MAX_NAME_BYTES}", name.len());
        return Err(Error::invalid("model", text));
    }
    if let Some((model, name)) = base_of(app, name) {
        return Ok(Named { model, name, adapter: None });
    }
    // Names of models may have colons, those of adapters never.
    let split = name.rsplit_once(':').and_then(|(base, own)| Some((base_of(app, base)?.0, own)));
    let Some((model, own)) = split else {
        return Err(unknown(app, (!matches!(name, "" | "default")).then_some(name)));
    };
    let adapter = Some(adapter_of(app, &model, own, "model")?);
    Ok(Named { model, name: name.to_owned(), adapter })
}

/// The model that has the name, with the name that answers give it.
fn base_of(app: &App, name: &str) -> Option<(Arc<Model>, String)> {
    let own = app.fleet.canonical(name);
    if let Some(model) = app.fleet.model(own.as_deref().unwrap_or(name)) {
        return Some((model, name.to_owned()));
    }
    if !matches!(name, "" | "default") {
        return None;
    }
    let model = app.fleet.models().into_iter().next()?;
    let name = model.name.clone();
    Some((model, name))
}

/// The loaded adapter of this name, as of now. Errors name `field`.
pub(super) fn adapter_of(app: &App, model: &Model, name: &str, field: &str) -> Result<AdapterChoice> {
    let digest = app.fleet.adapter(&model.name, name).map_err(|error| error.with_field(field))?;
    Ok(AdapterChoice { name: name.to_owned(), digest })
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

/// Who sent a request, as workers know it: empty where nobody needs a key.
pub(super) fn tenant_of(extensions: &Extensions) -> String {
    extensions.get::<KeyHash>().map(KeyHash::tenant).unwrap_or_default()
}

fn header(head: &Parts, name: &str) -> Option<String> {
    head.headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
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
    pub(super) async fn start(
        &self,
        live: LiveGuard,
        tokens: Vec<u32>,
        (sampling, logprobs): (Sampling, Option<LogprobRequest>),
        mut routing: Routing,
    ) -> Result<Running> {
        routing.adapter = routing.adapter.or_else(|| self.adapter.clone());
        let lease = self.lease(&routing, sampling.max_tokens)?;
        let mut job = Job {
            model: Arc::clone(&self.model),
            live,
            tokens,
            sampling,
            logprobs,
            routing,
            lease,
            permit: self.permit.clone(),
            traceparent: self.traceparent.clone(),
            tag: self.tag.clone(),
            asked: self.asked,
            key: self.key,
            hints: self.hints,
            seed: rand::random(),
            plan: Plan::default(),
        };
        job.plan = self.plan(&job.query(&job.tokens)).await?;
        dispatch::start(&self.app, job, self.arrived)
    }

    /// What middleware says of the workers that could be chosen.
    pub(super) async fn plan(&self, query: &RouteQuery<'_>) -> Result<Plan> {
        route::plan(&self.app, self.hooks.as_ref(), Some(&self.model.name), query).await
    }

    /// The request's lease, once its id has been read.
    pub(super) fn lease(&self, routing: &Routing, max_tokens: Option<u32>) -> Result<Option<JobLease>> {
        let want = match &routing.lease {
            None => return Ok(None),
            Some(LeaseAsk::Take { .. }) if max_tokens != Some(0) => {
                let message = "`lease.ttl_ms` holds a planted prefix: set the limit of new tokens to 0, or hold \
                               the prefix first and name the lease by `lease.id`";
                return Err(Error::invalid("lease.ttl_ms", message));
            }
            Some(LeaseAsk::Take { ttl_ms }) => LeaseWant::Take(*ttl_ms),
            Some(LeaseAsk::Hit { id }) => LeaseWant::Hit(dispatch::read_lease(
                &self.app.leases,
                id,
                &self.tenant,
                ErrorCode::InvalidArgument,
                "lease.id",
            )?),
        };
        Ok(Some(JobLease { tenant: self.tenant.clone(), want }))
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
