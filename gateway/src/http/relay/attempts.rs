//! One request's tries at HTTP workers: who is asked, what of an answer leads to another try, who is charged.
//!
//! Every retry is taken from the fleet's budget and goes to a worker that had no try yet. A worker that is silent
//! for too long while its peers go on is not given up: another one is asked beside it, and the first byte wins.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{
    Choice, Hints, Judgement, LoadGuard, ResponseBody, RouteQuery, Transport, Verdict, Watch, Worker,
};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http::request::Parts;
use http::{HeaderMap, Request, StatusCode, header};
use http_body_util::BodyExt as _;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::body::{Limits, Plain, Upstream};
use super::events::Events;
use super::headers;
use super::peek::Peek;
use super::scan::Family;
use super::split;
use crate::app::App;
use crate::guard::Permit;
use crate::http::answer::refuse;
use crate::http::explain::Called;
use crate::http::hints::hints;
use crate::middleware::route::{self, Plan, RouteHooks};

/// Longest error body that is read to find out whose fault it was, and how long that may take.
const FAULT_BYTES: usize = 64 << 10;
const FAULT_TIME: Duration = Duration::from_secs(2);
/// How long a worker rests that pushes back without saying for how long.
const REST: Duration = Duration::from_secs(1);
/// Tries that may run beside the first one.
const RACERS: usize = 1;

/// One request's tries, each on another worker.
pub(super) struct Attempts<'a> {
    pub(super) app: &'a Arc<App>,
    pub(super) head: &'a Parts,
    pub(super) body: Bytes,
    pub(super) found: Peek<'a>,
    pub(super) headers: HeaderMap,
    pub(super) key: Option<u64>,
    pub(super) hints: Hints,
    pub(super) deadline: Option<Instant>,
    /// Whom middleware rules out.
    pub(super) plan: Plan,
}

/// A worker that is to have a try.
struct Chosen {
    worker: Arc<Worker>,
    guard: LoadGuard,
}

/// What one try came to.
#[allow(clippy::large_enum_variant, reason = "the largest is the usual one, and is moved on at once")]
enum Outcome {
    /// An answer for the client.
    Answer(http::Response<ResponseBody>, LoadGuard),
    /// An answer that another worker may better: a push-back, or a fault of the worker.
    Held(Response, &'static str),
    /// No answer.
    Nothing(Error, &'static str),
}

/// What is known when no try is left.
#[derive(Default)]
struct Heard {
    pushback: Option<Response>,
    fault: Option<Response>,
    failure: Option<Error>,
}

impl Heard {
    fn note(&mut self, outcome: Outcome) -> &'static str {
        match outcome {
            Outcome::Held(response, reason) => {
                let place = if reason == "pushback" { &mut self.pushback } else { &mut self.fault };
                place.get_or_insert(response);
                reason
            }
            Outcome::Nothing(error, reason) => {
                self.failure = Some(error);
                reason
            }
            Outcome::Answer(..) => "",
        }
    }

    /// The best of what was heard, else why nobody could be asked.
    fn answer(self, none: Option<Error>) -> Response {
        if let Some(response) = self.pushback.or(self.fault) {
            return response;
        }
        let error = self.failure.or(none);
        refuse(&error.unwrap_or_else(|| Error::internal("a request had no try")))
    }
}

impl Attempts<'_> {
    pub(super) async fn run(mut self) -> Response {
        let hinted = hints(&self.head.headers).and_then(|hints| self.charge().map(|()| hints));
        self.hints = match hinted {
            Ok(hints) => hints,
            Err(error) => return refuse(&error),
        };
        self.plan = match self.narrow().await {
            Ok(plan) => plan,
            Err(error) => return refuse(&error),
        };
        self.tries().await
    }

    /// Takes the request from what its tenant may use of its model; of any of ours, where it names none.
    fn charge(&self) -> Result<()> {
        let Some(permit) = self.head.extensions.get::<Arc<Permit>>() else { return Ok(()) };
        if let Some(model) = self.found.model.as_deref() {
            return permit.name_model([model]);
        }
        let names = self.app.fleet.names();
        permit.name_model(names.iter().filter(|(_, at)| *at == Transport::Http).map(|(name, _)| &**name))
    }

    /// What middleware says of the workers.
    async fn narrow(&self) -> Result<Plan> {
        let hooks = self.head.extensions.get::<Arc<RouteHooks>>();
        route::plan(self.app, hooks, self.found.model.as_deref(), &self.query()).await
    }

    async fn tries(self) -> Response {
        self.app.fleet.earn_retry();
        if let Some(answer) = Box::pin(split::run(&self)).await {
            return answer;
        }
        let mut tried: Vec<WorkerId> = Vec::new();
        let mut heard = Heard::default();
        let mut racing = FuturesUnordered::new();
        let mut beside = 0;
        let first = match self.choose(&tried) {
            Ok(choice) => choice,
            Err(none) => return refuse(&none),
        };
        tried.push(first.worker.id);
        let mut watch = first.guard.watch();
        let mut look = Instant::now() + first_look(watch.as_ref());
        racing.push(self.attempt(first));
        loop {
            tokio::select! {
                biased;
                Some(outcome) = racing.next() => {
                    if let Outcome::Answer(response, guard) = outcome {
                        return self.relay(response, guard, false);
                    }
                    let reason = heard.note(outcome);
                    if !racing.is_empty() {
                        continue;
                    }
                    let next = match self.may_try(tried.len()) {
                        true => self.choose(&tried),
                        false => return heard.answer(None),
                    };
                    let choice = match next {
                        Ok(choice) if self.app.fleet.spend_retry() => choice,
                        Ok(_) => return heard.answer(None),
                        Err(none) => return heard.answer(Some(none)),
                    };
                    self.app.metrics.retries.with([reason]).inc();
                    tried.push(choice.worker.id);
                    watch = choice.guard.watch();
                    look = Instant::now() + first_look(watch.as_ref());
                    racing.push(self.attempt(choice));
                }
                () = sleep_until(look), if watch.is_some() => {
                    let judgement = watch.as_ref().map(|watch| self.app.fleet.judge(watch));
                    if let Some(Judgement::Wait(time)) = judgement {
                        look = Instant::now() + time;
                        continue;
                    }
                    watch = None;
                    if beside < RACERS && self.may_try(tried.len())
                        && let Ok(choice) = self.choose(&tried)
                        && self.app.fleet.spend_retry()
                    {
                        beside += 1;
                        self.app.metrics.retries.with(["suspected"]).inc();
                        tried.push(choice.worker.id);
                        racing.push(self.attempt(choice));
                    }
                }
            }
        }
    }

    pub(super) fn may_try(&self, tries: usize) -> bool {
        tries <= self.app.options.max_retries && !self.is_over()
    }

    pub(super) fn query(&self) -> RouteQuery<'_> {
        RouteQuery {
            text: self.found.text,
            key: self.key,
            hints: self.hints,
            transport: Some(Transport::Http),
            ..RouteQuery::default()
        }
    }

    fn choose(&self, tried: &[WorkerId]) -> Result<Chosen> {
        let model = self.found.model.as_deref();
        let choice = self
            .plan
            .choose(tried, |exclude| self.app.fleet.choose(model, &RouteQuery { exclude, ..self.query() }))?;
        let Choice { worker, guard, decision, .. } = choice;
        let tag = self.head.headers.get("x-request-id").and_then(|id| id.to_str().ok());
        if let Some(id) = self.found.rid.as_deref().or(tag) {
            let called = Called { id, tag, asked: self.head.extensions.get().copied() };
            self.app.explanations.note(called, model, decision);
        }
        Ok(Chosen { worker, guard })
    }

    /// One try. The worker is charged here if it did not answer; if it did, by how the answer ends.
    async fn attempt(&self, chosen: Chosen) -> Outcome {
        let Chosen { worker, mut guard } = chosen;
        match self.send(&worker).await {
            Ok(response) => self.sort(response, guard).await,
            Err(error) => {
                tracing::debug!(worker = %worker.url, error = %error, "attempt failed");
                let (reason, verdict) = match error.code {
                    // The prober watches what takes no connection.
                    ErrorCode::Unavailable => ("unreachable", Verdict::Neutral),
                    ErrorCode::DeadlineExceeded if self.is_over() => ("over", Verdict::Neutral),
                    ErrorCode::DeadlineExceeded => ("silent", Verdict::Failure),
                    _ => ("broken", Verdict::Failure),
                };
                guard.settle(verdict);
                Outcome::Nothing(error, reason)
            }
        }
    }

    /// Whether an answer is for the client, or another worker should have its try first.
    async fn sort(&self, response: http::Response<ResponseBody>, mut guard: LoadGuard) -> Outcome {
        let status = response.status();
        match status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                guard.rest(retry_after(response.headers()).unwrap_or(REST));
                guard.settle(Verdict::Neutral);
                let (head, body) = response.into_parts();
                let response = match read_fault(&head.headers, body).await {
                    Ok(text) => whole(head, text),
                    Err(body) => self.relay(http::Response::from_parts(head, body), guard, true),
                };
                Outcome::Held(response, "pushback")
            }
            status if status.is_server_error() => {
                let (head, body) = response.into_parts();
                let body = read_fault(&head.headers, body).await;
                if let Ok(text) = &body
                    && is_over_length(text)
                {
                    guard.settle(Verdict::Neutral);
                    return Outcome::Held(whole(head, text.clone()), "pushback");
                }
                guard.settle(Verdict::Failure);
                let response = match body {
                    Ok(text) => whole(head, text),
                    Err(body) => self.relay(http::Response::from_parts(head, body), guard, true),
                };
                Outcome::Held(response, "fault")
            }
            _ => Outcome::Answer(response, guard),
        }
    }

    /// Sends the request; resolves with the answer's head. Dropping it closes the connection.
    async fn send(&self, worker: &Worker) -> Result<http::Response<ResponseBody>> {
        let Some(http) = worker.http() else {
            return Err(Error::internal("an engine was chosen for a relay"));
        };
        let mut request = Request::new(self.body.clone());
        *request.method_mut() = self.head.method.clone();
        *request.uri_mut() = self.head.uri.clone();
        *request.headers_mut() = self.headers.clone();
        if let Some(key) = &worker.spec().api_key
            && let Some(value) = headers::bearer(key)
        {
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        let Some(limit) = self.first_limit() else {
            return http.send(request).await;
        };
        match timeout_at(limit, http.send(request)).await {
            Ok(outcome) => outcome,
            Err(_) if self.is_over() => Err(Error::new(
                ErrorCode::DeadlineExceeded,
                "no worker answered within --request-timeout or the request's own deadline; ask for less output or for more time",
            )),
            Err(_) => Err(Error::new(
                ErrorCode::DeadlineExceeded,
                "the worker sent nothing within --first-token-timeout; try again",
            )),
        }
    }

    /// When the first byte must have come.
    pub(super) fn first_limit(&self) -> Option<Instant> {
        let first = self.app.options.first_token_timeout.map(|timeout| Instant::now() + timeout);
        [first, self.deadline].into_iter().flatten().min()
    }

    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// A worker's body with what bounds it.
    pub(super) fn upstream(&self, body: ResponseBody, guard: LoadGuard, status: StatusCode) -> Upstream {
        let limits = Limits { idle: self.app.options.idle_timeout, deadline: self.deadline };
        // What a client did wrong says nothing of the worker.
        let good = if status.is_client_error() { Verdict::Neutral } else { Verdict::Success };
        Upstream::new(body, guard, good, limits, Arc::clone(self.app))
    }

    /// An answer that is no good, as it is told if nobody does better.
    pub(super) async fn read_held(
        &self,
        response: http::Response<ResponseBody>,
        guard: LoadGuard,
    ) -> Response {
        let (head, body) = response.into_parts();
        match read_fault(&head.headers, body).await {
            Ok(text) => whole(head, text),
            Err(body) => self.relay(http::Response::from_parts(head, body), guard, true),
        }
    }

    pub(super) fn relay(
        &self,
        response: http::Response<ResponseBody>,
        guard: LoadGuard,
        held: bool,
    ) -> Response {
        let (head, body) = response.into_parts();
        let upstream = self.upstream(body, guard, head.status);
        self.relay_stream(head, if held { upstream.hold() } else { upstream })
    }

    /// The answer for the client: the worker's head, and its body as it comes.
    pub(super) fn relay_stream(&self, mut head: http::response::Parts, upstream: Upstream) -> Response {
        headers::strip_hop_by_hop(&mut head.headers);
        let stream = headers::is_event_stream(&head.headers);
        if stream {
            // It may end in an event of ours, which no length of the worker's counts.
            head.headers.remove(header::CONTENT_LENGTH);
        }
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

/// When to ask about the worker for the first time.
fn first_look(watch: Option<&Watch>) -> Duration {
    watch.map_or(Duration::ZERO, Watch::patience)
}

/// A held answer whose body was read.
pub(super) fn whole(mut head: http::response::Parts, body: Bytes) -> Response {
    headers::strip_hop_by_hop(&mut head.headers);
    let mut answer = Response::new(Body::from(body));
    *answer.status_mut() = head.status;
    *answer.headers_mut() = head.headers;
    answer
}

/// The body of an error if it is short and comes soon, else the body unread.
async fn read_fault(headers: &HeaderMap, body: ResponseBody) -> std::result::Result<Bytes, ResponseBody> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if length.is_none_or(|length: usize| length > FAULT_BYTES) {
        return Err(body);
    }
    let read = timeout(FAULT_TIME, body.collect()).await;
    Ok(read.ok().and_then(|body| body.ok()).map(|body| body.to_bytes()).unwrap_or_default())
}

/// Some servers answer a prompt that is too long with a fault of their own.
fn is_over_length(body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body).to_ascii_lowercase();
    let long =
        ["maximum context length", "context length", "context window", "max_model_len", "context size"];
    let over = ["exceed", "longer than", "too long", "maximum", "larger than", "reduce the length"];
    long.iter().any(|words| text.contains(words)) && over.iter().any(|words| text.contains(words))
}

/// Seconds that the worker asks to wait; dates are not read.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds: f64 = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn a_fault_that_speaks_of_a_long_prompt_is_the_clients() {
        for text in [
            "This model's maximum context length is 4096 tokens. However, you requested 5000",
            "the request exceeds the available context size, try increasing it",
            "Input length (9000) exceeds the model's context length",
        ] {
            assert!(is_over_length(text.as_bytes()), "{text}");
        }
        for text in ["CUDA out of memory", "internal server error", "", "context lost"] {
            assert!(!is_over_length(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn the_wait_is_read_in_seconds_and_nonsense_is_none() {
        let read = |value| {
            let mut headers = HeaderMap::new();
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static(value));
            retry_after(&headers)
        };
        assert_eq!(read("2"), Some(Duration::from_secs(2)));
        for value in ["", "soon", "-1", "NaN", "Wed, 21 Oct 2015 07:28:00 GMT"] {
            assert_eq!(read(value), None, "{value}");
        }
    }
}
