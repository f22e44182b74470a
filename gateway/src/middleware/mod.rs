//! WebAssembly middleware between the gate and the routes: who sees a request, in which order, and what it does to it.
//!
//! Only routes of clients are touched, never those of operators. Without modules a request passes with one look at an
//! empty list. `branchline-plugins` runs the modules; here is HTTP.

mod body;
mod ending;
mod events;
mod request;
mod response;
pub(crate) mod route;

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use branchline_plugins::{Hook, Module, RequestView, visible};
use bytes::Bytes;
use futures_util::future::{BoxFuture, Either};
use http::request::Parts;
use http::{HeaderValue, Request, Response, header};
use tower::Service;

use crate::app::App;
use crate::guard::{Access, route_of};
use request::Verdict;

/// Wraps the routes.
#[derive(Clone)]
pub struct Middleware<S> {
    app: Arc<App>,
    inner: S,
}

impl<S> Middleware<S> {
    /// Middleware before `inner`.
    pub fn new(app: Arc<App>, inner: S) -> Self {
        Self { app, inner }
    }
}

impl<S> Service<Request<Body>> for Middleware<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, BoxFuture<'static, Result<Response<Body>, Infallible>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let skip = self.app.plugins.is_empty() || route_of(request.uri().path()).access != Access::Client;
        if skip {
            return Either::Left(self.inner.call(request));
        }
        // The clone that was polled ready serves; the fresh one waits for the next request.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let app = Arc::clone(&self.app);
        Either::Right(Box::pin(async move {
            let (head, body) = request.into_parts();
            match request::run(&app, head, body).await {
                Verdict::Answer(response) => Ok(response),
                Verdict::Refused { seen, view, response } => {
                    Ok(response::run(&app, &seen, &view, response).await)
                }
                Verdict::Pass { seen, view, request } => {
                    let Ok(answer) = inner.call(request).await;
                    Ok(response::run(&app, &seen, &view, answer).await)
                }
            }
        }))
    }
}

/// A request as its modules know it while it is served.
struct View {
    id: String,
    model: Option<String>,
    /// Head as it is sent on.
    method: String,
    path: String,
    query: String,
    headers: http::HeaderMap,
}

/// Who asks for which tenant.
fn tenant(headers: &http::HeaderMap) -> Option<&str> {
    headers.get("x-tenant-id").and_then(|value| value.to_str().ok())
}

impl View {
    fn of(id: String, model: Option<String>, head: &Parts) -> Self {
        Self {
            id,
            model,
            method: head.method.as_str().to_owned(),
            path: head.uri.path().to_owned(),
            query: head.uri.query().unwrap_or_default().to_owned(),
            headers: head.headers.clone(),
        }
    }

    /// As one module may see it.
    fn show(&self, module: &Module, body: Option<Bytes>) -> RequestView {
        RequestView {
            id: self.id.clone(),
            method: self.method.clone(),
            path: self.path.clone(),
            query: self.query.clone(),
            headers: visible(&self.headers, &module.spec.grants),
            model: self.model.clone(),
            tenant: tenant(&self.headers).map(str::to_owned),
            body: body.map(Vec::from),
        }
    }
}

/// Asks workers for answers that modules can read.
fn ask_for_plain(head: &mut Parts, seen: &[Arc<Module>]) {
    let reads = |module: &Arc<Module>| module.wants(Hook::OnStreamEvent) || module.sees_response_body();
    if seen.iter().any(reads) && head.headers.contains_key(header::ACCEPT_ENCODING) {
        head.headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
}

/// The answer when a module can't do its work and must not be passed by.
fn quarantined(module: &Module) -> Response<Body> {
    let message = format!(
        "middleware '{}' is quarantined after repeated failures; tell the operator",
        module.spec.name
    );
    let error = branchline_core::Error::new(branchline_core::ErrorCode::Unavailable, message);
    crate::http::refuse(&error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_who_the_header_names_if_it_is_text() {
        let mut headers = http::HeaderMap::new();
        assert_eq!(tenant(&headers), None);
        headers.insert("x-tenant-id", HeaderValue::from_static("gold"));
        assert_eq!(tenant(&headers), Some("gold"));
        headers.insert("x-tenant-id", HeaderValue::from_bytes(b"\xff").expect("a value"));
        assert_eq!(tenant(&headers), None);
    }

    #[test]
    fn a_view_keeps_path_query_and_method_apart() {
        let request = Request::builder().method("PUT").uri("/v1/x?a=1&b=2").body(()).expect("a request");
        let view = View::of("r1".to_owned(), Some("m".to_owned()), &request.into_parts().0);
        assert_eq!(
            (view.method.as_str(), view.path.as_str(), view.query.as_str()),
            ("PUT", "/v1/x", "a=1&b=2")
        );
        assert_eq!((view.id.as_str(), view.model.as_deref()), ("r1", Some("m")));
    }

    #[test]
    fn no_worker_is_asked_for_a_plain_answer_when_nobody_reads_it() {
        let request = Request::builder().header("accept-encoding", "gzip").body(()).expect("a request");
        let mut head = request.into_parts().0;
        ask_for_plain(&mut head, &[]);
        assert_eq!(head.headers["accept-encoding"], "gzip");
    }
}
