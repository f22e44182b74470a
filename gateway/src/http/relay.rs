//! Requests for HTTP workers: choose one, send the body as it came, retry before the first byte, relay.
//!
//! Bodies pass byte for byte both ways. Handlers of the OpenAI and native routes ask [`try_relay`] first and
//! parse only what is for engines; other paths come here through [`fallback`].

mod attempts;
mod body;
mod by_id;
mod events;
mod headers;
mod paths;
mod peek;
mod scan;
mod splice;
mod split;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use branchline_core::{Error, ErrorCode};
use branchline_protocol::MAX_DEPTH;
use branchline_worker::{Hints, Transport};
use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request};
use tokio::time::Instant;

use crate::app::App;
use crate::guard::{Permit, read_body};
use crate::http::answer::refuse;
use crate::http::session::session_key;
use crate::middleware::route::Plan;
use attempts::Attempts;
use peek::{Fault, Peek, peek};

pub(crate) use by_id::ask_all;
pub(crate) use events::error_event;
pub(crate) use headers::bearer;
pub(crate) use scan::Family;

/// Answers the request from an HTTP worker if it is for one, `None` if it is for an engine.
///
/// A request whose model nobody serves is not answered here either: the caller refuses it in its own words.
pub(crate) async fn try_relay(app: &Arc<App>, head: &Parts, body: &Bytes) -> Option<Response> {
    let found = peek(body);
    let named = found.model.as_deref().filter(|name| !means_first(app, name));
    let alias = named.and_then(|name| app.fleet.canonical(name));
    match app.fleet.transport(alias.as_deref().or(named)) {
        Ok(Transport::Http) => Some(match refusal(&found) {
            Some(error) => refuse(&error),
            None => attempts(app, head, body, found).run().await,
        }),
        Ok(Transport::Grpc) | Err(_) => None,
    }
}

/// What a body says it belongs to: a session before a user.
pub(crate) fn session_of(body: &[u8]) -> Option<String> {
    peek(body).session()
}

/// Whether a name stands for the first model, as it does for engines, and is nobody's own.
fn means_first(app: &App, name: &str) -> bool {
    matches!(name, "" | "default") && !app.fleet.names().iter().any(|(own, _)| own == name)
}

/// The body with the model's real name in the place of an alias or of one that means the first, all other bytes as
/// they were.
///
/// While no HTTP worker has told its models, a body that means the first stays as it is.
fn name_truly<'a>(app: &App, body: &Bytes, found: &mut Peek<'a>) -> Bytes {
    let Some(given) = found.model.as_deref() else { return body.clone() };
    let name = match means_first(app, given) {
        true => app.fleet.names().into_iter().find(|(_, at)| *at == Transport::Http).map(|(name, _)| name),
        false => match app.fleet.canonical(given) {
            Some(name) => Some(name),
            None => return body.clone(),
        },
    };
    found.model = name.map(Into::into);
    let Some(name) = &found.model else { return body.clone() };
    let (before, after) = (&body[..found.model_at.start], &body[found.model_at.end..]);
    Bytes::from([before, serde_json::json!(name).to_string().as_bytes(), after].concat())
}

/// Any route that is not ours: relayed if it is a known API's and an HTTP worker may serve it.
pub(crate) async fn fallback(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    let known = request.method() == Method::POST
        && paths::may_pass(request.uri().path())
        && app.fleet.workers().iter().any(|worker| worker.transport() == Transport::Http);
    if !known {
        let message = format!("{} {} does not exist here", request.method(), request.uri().path());
        return refuse(&Error::new(ErrorCode::NotFound, format!("{message}; check the path and the method")));
    }
    let (head, body) = request.into_parts();
    let body = match read_body(body, app.body_limit()).await {
        Ok(body) => body,
        Err(error) => return refuse(&error),
    };
    let found = peek(&body);
    match refusal(&found) {
        Some(error) => refuse(&error),
        None => attempts(&app, &head, &body, found).run().await,
    }
}

/// Why no worker may get the body.
fn refusal(found: &Peek<'_>) -> Option<Error> {
    Some(match found.fault? {
        Fault::Peer(name) => {
            let message = format!("`{name}` is set by the gateway alone; leave it out");
            Error::invalid(name, message)
        }
        Fault::Deep => {
            let message = format!("the body is nested deeper than {MAX_DEPTH} levels; flatten it");
            Error::new(ErrorCode::InvalidArgument, message)
        }
    })
}

/// The tries of a request that is for HTTP workers.
fn attempts<'a>(app: &'a Arc<App>, head: &'a Parts, body: &Bytes, mut found: Peek<'a>) -> Attempts<'a> {
    let body = name_truly(app, body, &mut found);
    let needs_key = app.fleet.needs_key(found.model.as_deref());
    let key = needs_key.then(|| session_key(&head.headers, &app.options, || found.session())).flatten();
    let headers = headers::to_worker(&head.headers, &app.options);
    let own =
        head.extensions.get::<Arc<Permit>>().and_then(|permit| permit.deadline()).map(Instant::from_std);
    let limit = app.options.request_timeout.map(|timeout| Instant::now() + timeout);
    let deadline = own.into_iter().chain(limit).min();
    Attempts {
        app,
        head,
        body,
        found,
        headers,
        key,
        hints: Hints::default(),
        deadline,
        plan: Plan::default(),
    }
}
