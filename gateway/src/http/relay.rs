//! Requests for HTTP workers: choose one, send the body as it came, retry before the first byte, relay.
//!
//! Bodies pass byte for byte both ways. Handlers of the OpenAI and native routes ask [`try_relay`] first and
//! parse only what is for engines; other paths come here through [`fallback`].

mod body;
mod events;
mod headers;
mod paths;
mod peek;
mod scan;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{Choice, LoadGuard, ResponseBody, RouteQuery, Transport};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use tokio::time::{Instant, timeout_at};

use crate::app::App;
use crate::guard::read_body;
use crate::http::answer::refuse;
use body::{Limits, Plain, Upstream};
use events::Events;
use peek::{Peek, peek};
use scan::Family;

pub(crate) use headers::worker_credential;

/// Answers the request from an HTTP worker if it is for one, `None` if it is for an engine.
///
/// A request whose model nobody serves is not answered here either: the caller refuses it in its own words.
pub(crate) async fn try_relay(app: &Arc<App>, head: &Parts, body: &Bytes) -> Option<Response> {
    let found = peek(body);
    let named = found.model.as_deref().filter(|name| !means_first(app, name));
    match app.fleet.transport(named) {
        Ok(Transport::Http) => Some(Attempts::new(app, head, body, found).run().await),
        Ok(Transport::Grpc) | Err(_) => None,
    }
}

/// Whether a name stands for the first model, as it does for engines, and is nobody's own.
fn means_first(app: &App, name: &str) -> bool {
    matches!(name, "" | "default") && !app.fleet.names().iter().any(|(own, _)| own == name)
}

/// The body with the model's real name in the place of one that means the first, all other bytes as they were.
///
/// While no HTTP worker has told its models, the body stays as it is.
fn name_first<'a>(app: &App, body: &Bytes, found: &mut Peek<'a>) -> Bytes {
    if !found.model.as_deref().is_some_and(|name| means_first(app, name)) {
        return body.clone();
    }
    let first = app.fleet.names().into_iter().find(|(_, transport)| *transport == Transport::Http);
    found.model = first.map(|(name, _)| name.into());
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
    Attempts::new(&app, &head, &body, found).run().await
}

/// An answer that asks to come back later, kept in case no worker does better.
struct Pushback {
    response: http::Response<ResponseBody>,
    guard: LoadGuard,
}

/// One request's tries, each on another worker.
struct Attempts<'a> {
    app: &'a Arc<App>,
    head: &'a Parts,
    body: Bytes,
    found: Peek<'a>,
    headers: HeaderMap,
    excluded: Vec<WorkerId>,
    deadline: Option<Instant>,
}

impl<'a> Attempts<'a> {
    fn new(app: &'a Arc<App>, head: &'a Parts, body: &Bytes, mut found: Peek<'a>) -> Self {
        let body = name_first(app, body, &mut found);
        let headers = headers::to_worker(&head.headers, &app.options);
        let deadline = app.options.request_timeout.map(|timeout| Instant::now() + timeout);
        Self { app, head, body, found, headers, excluded: Vec::new(), deadline }
    }

    async fn run(mut self) -> Response {
        let mut pushback: Option<Pushback> = None;
        let mut failure: Option<Error> = None;
        loop {
            let Choice { worker, guard, .. } = match self.choose() {
                Ok(choice) => choice,
                Err(none) => {
                    // Nobody is left: the best of what was heard, else why nobody could be asked.
                    return match pushback {
                        Some(Pushback { response, guard }) => self.relay(response, guard),
                        None => refuse(&failure.unwrap_or(none)),
                    };
                }
            };
            let Some(http) = worker.http() else {
                return refuse(&Error::internal("an engine was chosen for a relay"));
            };
            let reason = match self.send(http).await {
                Ok(response) if is_pushback(response.status()) => {
                    pushback.get_or_insert(Pushback { response, guard });
                    "pushback"
                }
                Ok(response) => return self.relay(response, guard),
                Err(error) if self.is_over() => return refuse(&error),
                Err(error) => {
                    let reason = match error.code {
                        ErrorCode::Unavailable => "unreachable",
                        ErrorCode::DeadlineExceeded => "silent",
                        _ => "broken",
                    };
                    tracing::debug!(worker = %worker.url, error = %error, "attempt failed");
                    failure = Some(error);
                    reason
                }
            };
            self.excluded.push(worker.id);
            self.app.metrics.retries.with([reason]).inc();
        }
    }

    fn choose(&self) -> Result<Choice> {
        let query = RouteQuery {
            text: self.found.text,
            exclude: &self.excluded,
            transport: Some(Transport::Http),
            ..RouteQuery::default()
        };
        self.app.fleet.choose(self.found.model.as_deref(), &query)
    }

    /// Sends the request; resolves with the answer's head. Dropping it closes the connection.
    async fn send(&self, http: &branchline_worker::HttpWorker) -> Result<http::Response<ResponseBody>> {
        let mut request = Request::new(self.body.clone());
        *request.method_mut() = self.head.method.clone();
        *request.uri_mut() = self.head.uri.clone();
        *request.headers_mut() = self.headers.clone();
        let first = self.app.options.first_token_timeout.map(|timeout| Instant::now() + timeout);
        let Some(limit) = [first, self.deadline].into_iter().flatten().min() else {
            return http.send(request).await;
        };
        match timeout_at(limit, http.send(request)).await {
            Ok(outcome) => outcome,
            Err(_) if self.is_over() => Err(Error::new(
                ErrorCode::DeadlineExceeded,
                "no worker answered within --request-timeout; ask for less output or raise it",
            )),
            Err(_) => Err(Error::new(
                ErrorCode::DeadlineExceeded,
                "the worker sent nothing within --first-token-timeout; try again",
            )),
        }
    }

    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    fn relay(&self, response: http::Response<ResponseBody>, guard: LoadGuard) -> Response {
        let (mut head, body) = response.into_parts();
        headers::strip_hop_by_hop(&mut head.headers);
        let stream = is_readable_stream(&head.headers);
        if stream {
            // It may end in an event of ours, which no length of the worker's counts.
            head.headers.remove(header::CONTENT_LENGTH);
        }
        let limits = Limits { idle: self.app.options.idle_timeout, deadline: self.deadline };
        let upstream = Upstream::new(body, guard, limits, Arc::clone(self.app));
        let body = match stream {
            true => Body::new(Events::new(upstream, Family::of(self.head.uri.path()))),
            false => Body::new(Plain::new(upstream)),
        };
        let mut answer = Response::new(body);
        *answer.status_mut() = head.status;
        *answer.headers_mut() = head.headers;
        answer
    }
}

/// Whether a worker says that another may be free.
fn is_pushback(status: StatusCode) -> bool {
    status == StatusCode::SERVICE_UNAVAILABLE || status == StatusCode::TOO_MANY_REQUESTS
}

/// An event stream whose bytes can be read as such: not a compressed one.
fn is_readable_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let stream = kind.get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"));
    stream && !headers.contains_key(header::CONTENT_ENCODING)
}
