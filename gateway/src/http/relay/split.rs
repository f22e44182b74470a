//! Requests that two HTTP workers answer together: one computes the prompt, the other one decodes.
//!
//! SGLang's halves get the request at the same time and meet in a room; vLLM's one after the other, the first one's
//! answer telling the second where the pages are. One half's end ends both; only the half at fault is charged; the
//! pair is tried whole on others until the first byte of the answer.

#![allow(clippy::result_large_err, reason = "an answer to tell, moved once a request")]

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{Choice, LoadGuard, PairChoice, ResponseBody, RouteQuery, Verdict, Worker};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::attempts::Attempts;
use super::splice::{self, Meeting};
use super::{attempts, headers};
use crate::app::App;
use crate::dispatch::RoomRange;
use crate::http::answer::refuse;

/// Longest answer of a vLLM prefill worker that is read for its parameters.
const PARAMETER_BYTES: usize = 4 << 20;
/// How long telling a worker to forget a request may take.
const ABORT_TIME: Duration = Duration::from_secs(2);

/// Ends the other half's task when the answer is over or given up.
pub(super) struct Beside(AbortHandle);

impl Drop for Beside {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Which half did not do its part, and what may be told of it.
struct Broken {
    part: &'static str,
    /// Who is not tried again.
    worker: WorkerId,
    told: Response,
    /// Whether others would say the same.
    is_final: bool,
}

enum Outcome {
    Answer(Response),
    Broken(Broken),
}

/// What came of a half that computes the prompt.
type Prompt = std::result::Result<Bytes, (Response, bool)>;

/// Answers a request by a pair; `None` if a worker alone should have it.
pub(super) async fn run(given: &Attempts<'_>) -> Option<Response> {
    let (app, model) = (given.app, given.found.model.as_deref());
    let query = given.query();
    if !app.fleet.may_split(model, &query) {
        return None;
    }
    let mut tried: Vec<WorkerId> = Vec::new();
    let mut told: Option<Response> = None;
    loop {
        let choose = |exclude: &[WorkerId]| app.fleet.choose_pair(model, &RouteQuery { exclude, ..query });
        let pair = match given.plan.choose(&tried, choose) {
            Ok(pair) => pair,
            Err(none) => return given_up(app, &query, model, told, &none),
        };
        let alone = pair.decode.worker.serves_alone();
        if alone && pair.decode.decision.uncached_tokens() <= app.options.pd_bypass_tokens as u64 {
            app.metrics.pd_requests.with(["bypass"]).inc();
            return None;
        }
        if told.is_some() && (!given.may_try(tried.len()) || !app.fleet.spend_retry()) {
            return told;
        }
        app.metrics.pd_requests.with(["pair"]).inc();
        let outcome = match pair.prefill.worker.runtime().as_str() {
            "vllm" => one_after_the_other(given, pair).await,
            _ => both_at_once(given, pair).await,
        };
        match outcome {
            Outcome::Answer(response) => return Some(response),
            Outcome::Broken(broken) => {
                app.metrics.pd_failures.with([broken.part]).inc();
                if broken.is_final {
                    return Some(broken.told);
                }
                app.metrics.retries.with([broken.part]).inc();
                tried.push(broken.worker);
                told = Some(broken.told);
            }
        }
    }
}

/// No whole pair is left: a worker that can does it alone, else the client hears what is known.
fn given_up(
    app: &App,
    query: &RouteQuery<'_>,
    model: Option<&str>,
    told: Option<Response>,
    none: &Error,
) -> Option<Response> {
    if app.fleet.choose(model, query).is_ok() {
        app.metrics.pd_requests.with(["decode_only"]).inc();
        return None;
    }
    Some(told.unwrap_or_else(|| refuse(none)))
}

/// SGLang's way.
async fn both_at_once(given: &Attempts<'_>, pair: PairChoice) -> Outcome {
    let PairChoice { prefill, decode } = pair;
    let (computes, decodes) = (prefill.worker.id, decode.worker.id);
    let meeting = Meeting::new(&given.app.rooms, &prefill.worker, &given.found, RoomRange::Wide);
    let request = |worker: &Worker, body: Bytes| request(given, worker, body);
    let (tell, mut told) = oneshot::channel();
    let first = request(&prefill.worker, meeting.body(&given.body, true));
    let task = given.app.tracker.spawn(compute(prefill, first, tell));
    let beside = Beside(task.abort_handle());
    let second = request(&decode.worker, meeting.body(&given.body, false));
    let Choice { worker, mut guard, .. } = decode;
    let sending = send(given, &worker, second);
    tokio::pin!(sending);
    let mut computed = false;
    let head = loop {
        tokio::select! {
            biased;
            outcome = &mut told, if !computed => match prompt_of(outcome) {
                Ok(_) => { computed = true; guard.waits_no_longer(); }
                Err((told, is_final)) => {
                    forget(given.app, &worker, &meeting);
                    return Outcome::Broken(Broken { part: "prefill", worker: computes, told, is_final });
                }
            },
            head = &mut sending => break head,
        }
    };
    let response = match sort(head, &mut guard) {
        Ok(response) => response,
        Err((told, is_final)) => {
            let told = told.into_response(given, guard).await;
            return Outcome::Broken(Broken { part: "decode", worker: decodes, told, is_final });
        }
    };
    let (head, body) = response.into_parts();
    let mut upstream = given.upstream(body, guard, head.status);
    // Until the first byte, the other half's failure is this one's.
    loop {
        tokio::select! {
            biased;
            outcome = &mut told, if !computed => match prompt_of(outcome) {
                Ok(_) => computed = true,
                Err((told, is_final)) => {
                    drop(upstream.hold());
                    forget(given.app, &worker, &meeting);
                    return Outcome::Broken(Broken { part: "prefill", worker: computes, told, is_final });
                }
            },
            data = std::future::poll_fn(|cx| upstream.poll_data(cx)) => match data {
                Some(Err(error)) => {
                    let told = refuse(&error);
                    return Outcome::Broken(Broken { part: "decode", worker: decodes, told, is_final: false });
                }
                first => {
                    upstream.unread(first.and_then(Result::ok), beside, meeting);
                    return Outcome::Answer(given.relay_stream(head, upstream));
                }
            },
        }
    }
}

/// vLLM's way.
async fn one_after_the_other(given: &Attempts<'_>, pair: PairChoice) -> Outcome {
    let PairChoice { prefill, decode } = pair;
    let (computes, decodes) = (prefill.worker.id, decode.worker.id);
    let source = Arc::clone(&prefill.worker);
    let Some((first, id)) = splice::prompt_only(&given.body, &source) else {
        let error = Error::new(ErrorCode::InvalidArgument, "the body is no JSON object; send one");
        return Outcome::Answer(refuse(&error));
    };
    let (tell, told) = oneshot::channel();
    let task = given.app.tracker.spawn(compute(prefill, request(given, &source, first), tell));
    let beside = Beside(task.abort_handle());
    let limit = given.first_limit();
    let outcome = match limit {
        Some(limit) => tokio::time::timeout_at(limit, told).await.unwrap_or_else(|_| {
            let text = "the prefill worker sent nothing within --first-token-timeout; try again";
            Ok(Err((refuse(&Error::new(ErrorCode::DeadlineExceeded, text)), false)))
        }),
        None => told.await,
    };
    drop(beside);
    let parameters = match prompt_of(outcome) {
        Ok(answer) => splice::parameters(&answer, &source, id.as_deref()),
        Err((told, is_final)) => {
            return Outcome::Broken(Broken { part: "prefill", worker: computes, told, is_final });
        }
    };
    let second = splice::with_parameters(&given.body, &parameters);
    let Choice { worker, mut guard, .. } = decode;
    guard.waits_no_longer();
    match sort(send(given, &worker, request(given, &worker, second)).await, &mut guard) {
        Ok(response) => Outcome::Answer(given.relay(response, guard, false)),
        Err((told, is_final)) => {
            let told = told.into_response(given, guard).await;
            Outcome::Broken(Broken { part: "decode", worker: decodes, told, is_final })
        }
    }
}

/// The half that computes the prompt, to the end of its answer.
async fn compute(choice: Choice, request: Request<Bytes>, tell: oneshot::Sender<Prompt>) {
    let Choice { worker, mut guard, .. } = choice;
    let outcome = match worker.http() {
        Some(http) => http.send(request).await,
        None => Err(Error::internal("an engine was chosen for a relay")),
    };
    let outcome = match outcome {
        Ok(response) => whole(response, &mut guard).await,
        Err(error) => {
            guard.settle(Verdict::Failure);
            Err((refuse(&error), false))
        }
    };
    drop(guard);
    // Nobody waits any more if the request is over.
    drop(tell.send(outcome));
}

/// The whole answer of a prompt's worker, its verdict given.
async fn whole(response: http::Response<ResponseBody>, guard: &mut LoadGuard) -> Prompt {
    let (head, mut body) = response.into_parts();
    let good = head.status.is_success();
    if good {
        guard.prefilled();
    }
    // Of a stream only that it ends counts.
    let is_stream = headers::is_event_stream(&head.headers);
    let read = match is_stream {
        true => loop {
            match body.frame().await {
                Some(Ok(_)) => {}
                Some(Err(error)) => break Err(error.message),
                None => break Ok(Bytes::new()),
            }
        },
        false => {
            let read = Limited::new(body, PARAMETER_BYTES).collect().await;
            read.map(http_body_util::Collected::to_bytes).map_err(|error| error.to_string())
        }
    };
    match read {
        Ok(text) if good => {
            guard.settle(Verdict::Success);
            Ok(text)
        }
        Ok(text) => {
            let fault = head.status.is_server_error() && head.status != StatusCode::SERVICE_UNAVAILABLE;
            guard.settle(if fault { Verdict::Failure } else { Verdict::Neutral });
            let is_final = head.status.is_client_error() && head.status != StatusCode::TOO_MANY_REQUESTS;
            Err((attempts::whole(head, text), is_final))
        }
        Err(why) => {
            guard.settle(Verdict::Failure);
            tracing::warn!(why, "the answer of a prefill worker broke off");
            let text = "the prefill worker broke off its answer; try again";
            Err((refuse(&Error::new(ErrorCode::UpstreamFailed, text)), false))
        }
    }
}

fn prompt_of(outcome: std::result::Result<Prompt, oneshot::error::RecvError>) -> Prompt {
    outcome.unwrap_or_else(|_| {
        let text = "the prompt's computation was given up; try again";
        Err((refuse(&Error::new(ErrorCode::Unavailable, text)), false))
    })
}

/// What a decoding worker said that is no answer.
#[allow(clippy::large_enum_variant, reason = "it is moved once")]
enum Told {
    Error(Error),
    Response(http::Response<ResponseBody>),
}

impl Told {
    async fn into_response(self, given: &Attempts<'_>, guard: LoadGuard) -> Response {
        match self {
            Self::Error(error) => refuse(&error),
            Self::Response(response) => given.read_held(response, guard).await,
        }
    }
}

/// An answer for the client, or what is told if no other pair does better. The verdict is given for the latter.
fn sort(
    head: Result<http::Response<ResponseBody>>,
    guard: &mut LoadGuard,
) -> std::result::Result<http::Response<ResponseBody>, (Told, bool)> {
    let response = head.map_err(|error| {
        guard.settle(Verdict::Failure);
        (Told::Error(error), false)
    })?;
    let status = response.status();
    match status {
        StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
            guard.settle(Verdict::Neutral);
            Err((Told::Response(response), false))
        }
        status if status.is_server_error() => {
            guard.settle(Verdict::Failure);
            Err((Told::Response(response), false))
        }
        _ => Ok(response),
    }
}

async fn send(
    given: &Attempts<'_>,
    worker: &Worker,
    request: Request<Bytes>,
) -> Result<http::Response<ResponseBody>> {
    let Some(http) = worker.http() else {
        return Err(Error::internal("an engine was chosen for a relay"));
    };
    match given.first_limit() {
        None => http.send(request).await,
        Some(limit) => tokio::time::timeout_at(limit, http.send(request)).await.unwrap_or_else(|_| {
            let text = "the worker sent nothing within --first-token-timeout; try again";
            Err(Error::new(ErrorCode::DeadlineExceeded, text))
        }),
    }
}

fn request(given: &Attempts<'_>, worker: &Worker, body: Bytes) -> Request<Bytes> {
    let mut request = Request::new(body);
    *request.method_mut() = given.head.method.clone();
    *request.uri_mut() = given.head.uri.clone();
    *request.headers_mut() = given.headers.clone();
    authorise(worker, &mut request);
    request
}

fn authorise(worker: &Worker, request: &mut Request<Bytes>) {
    if let Some(key) = &worker.spec().api_key
        && let Some(value) = headers::bearer(key)
    {
        request.headers_mut().insert(header::AUTHORIZATION, value);
    }
}

/// Tells an SGLang worker to forget a request, since one that waits for pages does not watch its connection.
fn forget(app: &Arc<App>, worker: &Arc<Worker>, meeting: &Meeting) {
    let worker = Arc::clone(worker);
    let ids = meeting.ids().to_vec();
    app.tracker.spawn(async move {
        for id in ids {
            let Some(http) = worker.http() else { return };
            let mut request = Request::new(Bytes::from(serde_json::json!({ "rid": id }).to_string()));
            *request.method_mut() = http::Method::POST;
            *request.uri_mut() = http::Uri::from_static("/abort_request");
            request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            authorise(&worker, &mut request);
            match timeout(ABORT_TIME, http.send(request)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!(worker = %worker.url, %error, "an abort was not taken"),
                Err(_) => tracing::debug!(worker = %worker.url, "an abort was not answered"),
            }
        }
    });
}
