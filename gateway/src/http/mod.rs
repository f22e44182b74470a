//! Routes. Handlers convert between HTTP and the parts; choosing and talking to workers is below them.

mod adapters;
mod admin;
mod answer;
mod chat;
mod completions;
pub(crate) mod dry_run;
mod explain;
mod fan;
mod gather;
mod generate;
mod hints;
mod info;
mod intake;
mod leases;
mod messages;
mod models;
mod page;
pub(crate) mod relay;
mod responses;
mod score;
mod scrape;
mod session;
mod speech;
mod spell;
mod stream;
mod tokenize;
mod tree;
mod turn;
mod vectors;
mod wasm;
mod workers;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use branchline_core::{Error, ErrorCode};
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use tower::Service as _;

use crate::app::App;
use crate::guard::{Counted, Gate, Keys, Surface};
use crate::middleware::Middleware;

pub use answer::{Refusal, json, refuse};
pub(crate) use answer::{is_anthropic, shape};
pub use explain::{Asked, Called, Explanations};
pub(crate) use relay::{Family, error_event};
pub use responses::ResponseStore;
pub use scrape::Shown;

/// Routes of operators.
fn operators() -> Router<Arc<App>> {
    admin::routes()
        .merge(adapters::routes())
        .merge(workers::routes())
        .merge(explain::routes())
        .merge(wasm::routes())
}

/// Routes of clients.
fn clients() -> Router<Arc<App>> {
    chat::routes()
        .merge(completions::routes())
        .merge(generate::routes())
        .merge(leases::routes())
        .merge(score::routes())
        .merge(messages::routes())
        .merge(responses::routes())
        .merge(vectors::routes())
        .merge(tokenize::routes())
        .merge(models::routes())
}

/// The routes of clients and of probes, and those of operators where they have no listener of their own.
fn router(app: &Arc<App>, with_operators: bool) -> Router {
    let routes = if with_operators { clients().merge(operators()) } else { clients() };
    let keyed = Keys::of(&app.options).required();
    let place = page::Place { clients: true, operators: with_operators, keyed };
    routes
        .merge(admin::probes())
        .merge(page::routes(app, place))
        .method_not_allowed_fallback(wrong_method)
        .fallback(relay::fallback)
        .with_state(Arc::clone(app))
}

/// The routes behind middleware.
fn inner(app: &Arc<App>, with_operators: bool) -> Middleware<Router> {
    Middleware::new(Arc::clone(app), router(app, with_operators))
}

/// What the main port serves, behind the gate and middleware.
pub fn service(app: &Arc<App>) -> Gate<Middleware<Router>> {
    let operators = app.options.admin_port.is_none();
    let surface = Surface { host: app.options.host.clone(), operators };
    let keys = Keys::of(&app.options).and(app.key_file.clone());
    Gate::new(inner(app, operators), keys, surface, app)
}

/// What the operators' port serves: their routes and probes, behind a gate of its own.
pub fn admin_service(app: &Arc<App>) -> Gate<Router> {
    let keyed = Keys::of_admin(&app.options).required();
    let place = page::Place { clients: false, operators: true, keyed };
    let routes = operators().merge(admin::probes()).merge(page::routes(app, place));
    let router = routes.method_not_allowed_fallback(wrong_method).fallback(unknown_path);
    let surface = Surface { host: app.options.admin_host.clone(), operators: true };
    let keys = Keys::of_admin(&app.options).and(app.key_file.clone());
    Gate::new(router.with_state(Arc::clone(app)), keys, surface, app)
}

/// What the metrics port serves: /metrics, open to whoever reaches it.
pub fn metrics_service(app: &Arc<App>) -> Router {
    admin::metrics_routes().fallback(unknown_path).with_state(Arc::clone(app))
}

/// Every route for callers in this process: no key, no socket, counted as all others.
#[derive(Clone)]
pub struct InProcess(Gate<Middleware<Router>>);

/// The body of an answer in this process.
pub type Answered = Counted;

impl InProcess {
    /// Made once a gateway.
    pub fn new(app: &Arc<App>) -> Self {
        let surface = Surface { host: app.options.host.clone(), operators: true };
        Self(Gate::new(inner(app, true), Keys::default(), surface, app))
    }

    /// Answers one request. Dropping the future, or the body, ends it.
    pub async fn call(mut self, mut request: Request<Bytes>) -> http::Response<Answered> {
        // Nobody's browser is between a process and itself.
        request.headers_mut().insert(http::header::HOST, http::HeaderValue::from_static("localhost"));
        let Ok(response) = self.0.call(request.map(Full::new)).await;
        response
    }
}

async fn unknown_path(request: Request<Body>) -> Response {
    let message = format!(
        "{} {} does not exist; see the router's reference for the paths",
        request.method(),
        request.uri().path()
    );
    refuse(&Error::new(ErrorCode::NotFound, message))
}

async fn wrong_method(request: Request<Body>) -> Response {
    let message =
        format!("{} is not a method of {}; see the allow header", request.method(), request.uri().path());
    refuse(&Error::new(ErrorCode::MethodNotAllowed, message))
}
