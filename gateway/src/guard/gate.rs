//! The service before all routes: lets a request in or answers it at once, and counts it to its last byte.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::Body;
use branchline_core::{Error, ErrorCode, Result};
use branchline_telemetry::{Gauge, Histogram, Metrics, RequestSpan, Traces};
use branchline_worker::Fleet;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tower::Service;

use super::routes::{Access, Route, route_of};
use super::usage::Usage;
use super::{Admission, Entry, KeyHash, Keys, Permit, Role, origin};
use crate::app::App;
use crate::http::{Asked, Explanations, is_anthropic, refuse, shape};
use crate::lifecycle::Fault;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const EXPLAIN: HeaderName = HeaderName::from_static("x-branchline-explain");

/// Who a gate's listener is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surface {
    /// Address that it listens on, as configured: one of the names that operators may call it by.
    pub host: String,
    /// Whether operators are served here. Where they are not, nobody is told what only they may see.
    pub operators: bool,
}

/// What the gate needs to know.
struct Rules {
    keys: Keys,
    surface: Surface,
    admission: Option<Arc<Admission>>,
    metrics: Arc<Metrics>,
    explanations: Arc<Explanations>,
    fleet: Arc<Fleet>,
    traces: Option<Arc<Traces>>,
}

/// Wraps the router; one clone serves one connection.
#[derive(Clone)]
pub struct Gate<S> {
    rules: Arc<Rules>,
    inner: S,
}

impl<S> Gate<S> {
    /// A gate before `inner`.
    pub fn new(inner: S, keys: Keys, surface: Surface, app: &App) -> Self {
        let rules = Rules {
            keys,
            surface,
            admission: app.admission.clone(),
            metrics: Arc::clone(&app.metrics),
            explanations: Arc::clone(&app.explanations),
            fleet: Arc::clone(&app.fleet),
            traces: app.traces.clone(),
        };
        Self { rules: Arc::new(rules), inner }
    }
}

/// In the extensions of a request whose sender may see what operators see.
#[derive(Debug, Clone, Copy)]
pub struct Trusted;

impl Rules {
    /// The key that let the request in, if one was needed, and whether its sender is an operator.
    fn check<B>(&self, request: &Request<B>, access: Access) -> Result<(Option<KeyHash>, bool)> {
        let found = if self.keys.required() { self.keys.accept(request.headers()) } else { None };
        let key = found.map(|(key, _)| key);
        let operator = || {
            let keyed = !self.keys.required() || found.is_some_and(|(_, role)| role == Role::Admin);
            self.surface.operators && keyed && self.local(request, key.is_some()).is_ok()
        };
        let access = match access {
            // Here it is a path like any other that does not exist.
            Access::Admin if !self.surface.operators => Access::Client,
            access => access,
        };
        if access == Access::Open {
            // A probe is answered whoever asks; only what it tells differs.
            return Ok((key, operator()));
        }
        if self.keys.required() && found.is_none() {
            let message =
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'";
            return Err(Error::new(ErrorCode::Unauthenticated, message));
        }
        if access == Access::Client {
            // Nothing but the explanation differs.
            return Ok((key, request.headers().contains_key(EXPLAIN) && operator()));
        }
        if found.is_some_and(|(_, role)| role == Role::User) {
            let message = "the API key is a user's and this path is for operators; use an admin's key";
            return Err(Error::new(ErrorCode::PermissionDenied, message));
        }
        self.local(request, key.is_some())?;
        Ok((key, true))
    }

    fn local<B>(&self, request: &Request<B>, keyed: bool) -> Result<()> {
        let authority = request.uri().authority().map(http::uri::Authority::as_str);
        origin::check(request.headers(), authority, &self.surface.host, keyed)
    }
}

/// Bodies are read as they come: a packed one could be a thousand times as large.
fn refuse_packed<B>(request: &Request<B>) -> Option<Response<Body>> {
    let coding = request.headers().get(header::CONTENT_ENCODING)?.to_str().unwrap_or("unreadable");
    if coding.eq_ignore_ascii_case("identity") {
        return None;
    }
    let message = format!("content-encoding '{coding}' is not read here; send the body as it is");
    let mut response = refuse(&Error::invalid("content-encoding", message));
    *response.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
    Some(response)
}

/// What the connection refused before it was a request.
fn refuse_framing<B>(request: &Request<B>) -> Option<Response<Body>> {
    let fault = Fault::of_path(request.uri().path())?;
    let mut response = refuse(&Error::new(ErrorCode::InvalidArgument, fault.message()));
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    Some(response)
}

impl Rules {
    /// The span of a client's request, which its own workers' spans shall be under.
    fn span<B>(&self, request: &mut Request<B>, route: Route) -> Option<RequestSpan> {
        if route.access != Access::Client || request.method() != Method::POST {
            return None;
        }
        let given = request.headers().get(TRACEPARENT).and_then(|value| value.to_str().ok());
        let span = self.traces.as_ref()?.begin(request.method().as_str(), route.label, given);
        if let Some(context) = span.traceparent().and_then(|context| HeaderValue::try_from(context).ok()) {
            request.headers_mut().insert(TRACEPARENT, context);
        }
        Some(span)
    }
}

impl<S, B> Service<Request<B>> for Gate<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    type Response = Response<Counted>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = std::result::Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<std::result::Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let route = route_of(request.uri().path());
        let mut tally = Tally::start(Arc::clone(&self.rules.metrics), route);
        tally.span = self.rules.span(&mut request, route);
        tally.anthropic = is_anthropic(request.uri().path());
        if let Some(refusal) = refuse_framing(&request) {
            return Box::pin(std::future::ready(Ok(tally.attach(refusal))));
        }
        let (key, trusted) = match self.rules.check(&request, route.access) {
            Ok((key, trusted)) => {
                key.map(|key| request.extensions_mut().insert(key));
                trusted.then(|| request.extensions_mut().insert(Trusted));
                (key, trusted)
            }
            Err(error) => return Box::pin(std::future::ready(Ok(tally.attach(refuse(&error))))),
        };
        if let Some(refusal) = refuse_packed(&request) {
            return Box::pin(std::future::ready(Ok(tally.attach(refusal))));
        }
        let asked = trusted.then(|| self.rules.explanations.ask());
        let named = Named::of(&mut request, asked);
        let mut request = request.map(Body::new);
        let rules = Arc::clone(&self.rules);
        let counted = route.is_work() && request.method() == Method::POST;
        let entry = rules.admission.as_ref().filter(|_| counted).map(|door| door.ask(key, &mut request));
        let queued = match entry.transpose() {
            Ok(None) => None,
            Ok(Some(Entry::In(permit))) => {
                tally.admit(permit, &mut request);
                None
            }
            Ok(Some(Entry::Waits(queued))) => Some(queued),
            Err(error) => {
                let response = tally.finish(refuse(&error), named, &rules);
                return Box::pin(std::future::ready(Ok(response)));
            }
        };
        let Some(queued) = queued else {
            let answer = self.inner.call(request);
            return Box::pin(async move {
                let Ok(response) = answer.await;
                Ok(tally.finish(response, named, &rules))
            });
        };
        // The ready one is used up; its clone takes its place.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(async move {
            match queued.turn().await {
                Ok(permit) => tally.admit(permit, &mut request),
                Err(error) => return Ok(tally.finish(refuse(&error), named, &rules)),
            }
            let Ok(response) = inner.call(request).await;
            Ok(tally.finish(response, named, &rules))
        })
    }
}

/// A request that its client named, or an operator asks about.
struct Named {
    id: HeaderValue,
    asked: Option<Asked>,
}

impl Named {
    /// `None` if there is nothing to tell; a request that is asked about gets a name. `asked` is there if its sender may
    /// ask: other clients are told neither workers nor loads.
    fn of<B>(request: &mut Request<B>, asked: Option<Asked>) -> Option<Self> {
        let word = request.headers().get(EXPLAIN).map(HeaderValue::as_bytes);
        let asked = asked.filter(|_| word.is_some_and(|word| !matches!(word, b"" | b"0" | b"false" | b"no")));
        if let Some(asked) = asked {
            request.extensions_mut().insert(asked);
        }
        let headers = request.headers_mut();
        let id = match headers.get(REQUEST_ID) {
            Some(id) => id.clone(),
            None if asked.is_some() => {
                let id = HeaderValue::from_str(&uuid::Uuid::new_v4().simple().to_string()).ok()?;
                headers.insert(REQUEST_ID, id.clone());
                id
            }
            None => return None,
        };
        Some(Self { id, asked })
    }

    fn tell(self, response: &mut Response<Body>, rules: &Rules) {
        let id = self.id.to_str().ok();
        let told =
            self.asked.zip(id).and_then(|(asked, id)| rules.explanations.header(asked, id, &rules.fleet));
        if let Some(told) = told.and_then(|told| HeaderValue::try_from(told).ok()) {
            response.headers_mut().insert(EXPLAIN, told);
        }
        // The client's name for it stands, whatever a worker calls it.
        response.headers_mut().insert(REQUEST_ID, self.id);
    }
}

/// One request's figures; settled when dropped, however the request ended.
struct Tally {
    metrics: Arc<Metrics>,
    route: Route,
    started: Instant,
    status: Option<StatusCode>,
    in_flight: Gauge,
    pace: Pace,
    span: Option<RequestSpan>,
    /// Its place among those that run at once, held to the last byte.
    permit: Option<Arc<Permit>>,
    /// What its answer says of tokens, if somebody is charged for them.
    usage: Option<Usage>,
    /// Its refusals have the shape of Anthropic's API.
    anthropic: bool,
}

/// What of a body is timed.
enum Pace {
    /// The next data is the first.
    First { stream: bool },
    /// Data came at this instant.
    Since { last: Instant, gaps: Histogram },
    /// Nothing more.
    Done,
}

impl Tally {
    fn start(metrics: Arc<Metrics>, route: Route) -> Self {
        let in_flight = metrics.in_flight.with([""; 0]);
        in_flight.inc();
        Self {
            metrics,
            route,
            started: Instant::now(),
            status: None,
            in_flight,
            pace: Pace::Done,
            span: None,
            permit: None,
            usage: None,
            anthropic: false,
        }
    }

    /// Work that outlives its answer takes its place along.
    fn admit(&mut self, permit: Permit, request: &mut Request<Body>) {
        let permit = Arc::new(permit);
        request.extensions_mut().insert(Arc::clone(&permit));
        self.permit = Some(permit);
    }

    fn finish(self, mut response: Response<Body>, named: Option<Named>, rules: &Rules) -> Response<Counted> {
        if let Some(named) = named {
            named.tell(&mut response, rules);
        }
        self.attach(response)
    }

    fn attach(mut self, response: Response<Body>) -> Response<Counted> {
        let response = shape(self.anthropic, response);
        self.status = Some(response.status());
        let code = response.extensions().get::<ErrorCode>();
        if let Some(span) = &mut self.span {
            span.status(response.status().as_u16(), code.map(|code| code.name()));
        }
        if let Some(code) = code {
            self.metrics.errors.with([code.name()]).inc();
        }
        if response.status().is_success() && self.route.access == Access::Client {
            let kind = response.headers().get(header::CONTENT_TYPE);
            let stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
            let charged = self.permit.as_ref().is_some_and(|permit| permit.is_charged());
            self.usage = charged.then(|| Usage::of_stream(stream));
            self.pace = Pace::First { stream };
        }
        response.map(|body| Counted { body, tally: self })
    }

    fn note(&mut self, data: &[u8]) {
        if let Some(usage) = &mut self.usage {
            usage.read(data);
        }
        // Comment lines keep a connection alive; they are not output.
        if data.is_empty() || data[0] == b':' {
            return;
        }
        match &mut self.pace {
            Pace::Done => {}
            Pace::First { stream } => {
                let now = Instant::now();
                let elapsed = now.duration_since(self.started).as_secs_f64();
                self.metrics.first_token_seconds.with([self.route.label]).observe(elapsed);
                if let Some(span) = &mut self.span {
                    span.first_byte();
                }
                self.pace = match stream {
                    true => Pace::Since {
                        last: now,
                        gaps: self.metrics.inter_token_seconds.with([self.route.label]),
                    },
                    false => Pace::Done,
                };
            }
            Pace::Since { last, gaps } => {
                let now = Instant::now();
                gaps.observe(now.duration_since(*last).as_secs_f64());
                *last = now;
            }
        }
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.in_flight.dec();
        if let (Some(permit), Some(usage)) = (&self.permit, &self.usage) {
            permit.told(usage);
        }
        let label = self.route.label;
        self.metrics.request_seconds.with([label]).observe(self.started.elapsed().as_secs_f64());
        // 499 as in the field's logs: the client left before an answer.
        let status = self.status.map_or("499".to_owned(), |status| status.as_str().to_owned());
        self.metrics.requests.with([label.into(), branchline_telemetry::Label::from(status)]).inc();
    }
}

/// A response body that is counted until it is dropped.
pub struct Counted {
    body: Body,
    tally: Tally,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            self.tally.note(data);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
