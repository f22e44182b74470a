//! Requests for HTTP workers: choose one, send the body as it came, retry before the first byte, relay.
//!
//! Bodies pass byte for byte both ways. Handlers of the OpenAI and native routes ask [`try_relay`] first and
//! parse only what is for engines; other paths come here through [`fallback`].

mod body;
mod events;
mod headers;
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
    match app.fleet.transport(found.model.as_deref()) {
        Ok(Transport::Http) => Some(Attempts::new(app, head, body, found).run().await),
        Ok(Transport::Grpc) | Err(_) => None,
    }
}

/// Any route that is not ours: relayed if an HTTP worker may know it.
pub(crate) async fn fallback(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    let known = request.method() == Method::POST
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
    body: &'a Bytes,
    found: Peek<'a>,
    headers: HeaderMap,
    excluded: Vec<WorkerId>,
    deadline: Option<Instant>,
}

impl<'a> Attempts<'a> {
    fn new(app: &'a Arc<App>, head: &'a Parts, body: &'a Bytes, found: Peek<'a>) -> Self {
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
        let limits = Limits { idle: self.app.options.idle_timeout, deadline: self.deadline };
        let upstream = Upstream::new(body, guard, limits, Arc::clone(self.app));
        let body = match is_readable_stream(&head.headers) {
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
