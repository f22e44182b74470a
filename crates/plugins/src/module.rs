//! One loaded module: its settings, code and state, and its hooks with their answers checked and counted.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use uuid::Uuid;

use crate::disk::Record;
use crate::failure::{Called, Failure};
use crate::grants::Grants;
use crate::runtime::{self, Code};
use crate::spec::{FailMode, Hook};
use crate::state::{Line, State, now_ms};
use crate::view::{
    EventAction, EventView, FailureView, Needs, RequestAction, RequestView, ResponseAction, ResponseView,
    RouteAction, RouteView,
};
use crate::{check, spec::Spec};

/// A module as it was at one moment; a change makes a new one, and requests in flight keep theirs.
pub struct Module {
    pub(crate) record: Record,
    /// Its settings; those of the record.
    pub spec: Spec,
    /// Length of its bytes.
    pub size: usize,
    pub(crate) needs: Needs,
    pub(crate) code: Arc<Code>,
    pub(crate) state: Arc<State>,
    pub(crate) config: Arc<str>,
    pub(crate) grants: Arc<Grants>,
    /// Its calls at once.
    pub(crate) places: Arc<Semaphore>,
    /// Its streams at once.
    pub(crate) streams: Arc<Semaphore>,
}

/// Streams of one module for each call at once: a stream holds its instance from event to event.
const STREAMS_PER_CALL: usize = 4;

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Module")
            .field("uuid", &self.record.uuid)
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

impl Module {
    pub(crate) fn new(record: Record, size: usize, needs: Needs, code: Arc<Code>, state: Arc<State>) -> Self {
        let spec = record.spec.clone();
        let concurrency = spec.limits.concurrency as usize;
        Self {
            config: spec.config_text().into(),
            grants: Arc::new(spec.grants.clone()),
            places: Arc::new(Semaphore::new(concurrency)),
            streams: Arc::new(Semaphore::new(concurrency * STREAMS_PER_CALL)),
            record,
            spec,
            size,
            needs,
            code,
            state,
        }
    }

    /// Its id.
    pub fn uuid(&self) -> Uuid {
        self.record.uuid
    }

    /// SHA-256 of its bytes, in hex.
    pub fn sha256(&self) -> &str {
        &self.record.sha256
    }

    /// Whether the hook is there, asked for, and not switched off. A quarantined module still has its hooks.
    pub fn wants(&self, hook: Hook) -> bool {
        self.spec.enabled
            && self.code.has(hook)
            && (self.spec.hooks.is_empty() || self.spec.hooks.contains(&hook))
    }

    /// Whether it was taken out after repeated failures.
    pub fn is_quarantined(&self) -> bool {
        self.state.is_quarantined()
    }

    /// Whether a request has to wait for its body before this module.
    pub fn waits_for_request_body(&self) -> bool {
        (self.needs.request_body && self.wants(Hook::OnRequest)) || !self.spec.routes.models.is_empty()
    }

    /// Whether on-request is shown the body.
    pub fn sees_request_body(&self) -> bool {
        self.needs.request_body
    }

    /// Whether on-response and on-error are shown the body.
    pub fn sees_response_body(&self) -> bool {
        self.needs.response_body
    }

    /// Whether its contract knows no streams, so that it is not shown one.
    pub fn skips_streams(&self) -> bool {
        self.code.skips_streams()
    }

    /// The same module with a state of its own: what it does there leaves no trace.
    pub fn twin(&self) -> Arc<Self> {
        let state = State::new(&self.spec.name, Arc::new(branchline_telemetry::Metrics::default()));
        let (record, code) = (self.record.clone(), Arc::clone(&self.code));
        Arc::new(Self::new(record, self.size, self.needs.clone(), code, Arc::new(state)))
    }

    /// Whether a failure lets the request through.
    pub fn fails_open(&self) -> bool {
        self.spec.fail == FailMode::Open
    }

    /// Log lines after the one with this number.
    pub fn lines(&self, after: u64) -> Vec<Line> {
        self.state.lines(after)
    }

    /// Counts a request that met the quarantine.
    pub fn count_quarantined(&self, hook: Hook) {
        self.outcome(hook, "quarantined");
    }

    fn outcome(&self, hook: Hook, outcome: &'static str) {
        let labels = [self.spec.name.clone(), hook.name().to_owned(), outcome.to_owned()];
        self.state.metrics.wasm_calls.with(labels).inc();
    }

    fn settle<A>(
        &self,
        hook: Hook,
        called: Called<A>,
        check: impl FnOnce(A) -> Result<A, Failure>,
        name: impl Fn(&A) -> &'static str,
    ) -> Called<A> {
        let Called { result, cost } = called;
        let result = result.and_then(check);
        let counts = &self.state.counts;
        counts.calls.fetch_add(1, Ordering::Relaxed);
        counts.micros.fetch_add(cost.micros, Ordering::Relaxed);
        counts.slowest_micros.fetch_max(cost.micros, Ordering::Relaxed);
        counts.last_ms.store(now_ms(), Ordering::Relaxed);
        let labels = [self.spec.name.clone(), hook.name().to_owned()];
        self.state.metrics.wasm_call_seconds.with(labels).observe(cost.micros as f64 / 1e6);
        match &result {
            Ok(action) => self.outcome(hook, name(action)),
            Err(failure) => {
                counts.failures.fetch_add(1, Ordering::Relaxed);
                self.outcome(hook, failure.cause.name());
                let (cause, detail) = (failure.cause.name(), &failure.detail);
                tracing::warn!(module = %self.spec.name, hook = hook.name(), cause, detail, "a module failed");
                self.state
                    .log(crate::state::Level::Error, &format!("{} failed ({cause}): {detail}", hook.name()));
                self.state.failed(self.spec.quarantine_after, Instant::now());
            }
        }
        Called { result, cost }
    }

    /// Calls on-request.
    pub async fn on_request(self: &Arc<Self>, view: RequestView) -> Called<RequestAction> {
        let called = runtime::on_request(self, view).await;
        self.settle(
            Hook::OnRequest,
            called,
            |action| check::request(action, &self.spec),
            |action| match action {
                RequestAction::Continue => "continue",
                RequestAction::Modify(_) => "modify",
                RequestAction::Reject(_) => "reject",
            },
        )
    }

    /// Calls on-response.
    pub async fn on_response(
        self: &Arc<Self>,
        request: RequestView,
        view: ResponseView,
    ) -> Called<ResponseAction> {
        let called = runtime::on_response(self, request, view).await;
        self.settle(Hook::OnResponse, called, |action| check::response(action, &self.spec), response_name)
    }

    /// Calls on-error.
    pub async fn on_error(
        self: &Arc<Self>,
        request: RequestView,
        view: FailureView,
    ) -> Called<ResponseAction> {
        let called = runtime::on_error(self, request, view).await;
        self.settle(Hook::OnError, called, |action| check::response(action, &self.spec), response_name)
    }

    /// Calls on-route.
    pub async fn on_route(self: &Arc<Self>, view: RouteView) -> Called<RouteAction> {
        let known: Vec<String> = view.candidates.iter().map(|candidate| candidate.id.clone()).collect();
        let called = runtime::on_route(self, view).await;
        self.settle(
            Hook::OnRoute,
            called,
            |action| check::route(action, &known),
            |action| match action {
                RouteAction::Continue => "continue",
                RouteAction::Filter(_) | RouteAction::Weigh(_) | RouteAction::Pick(_) => "route",
            },
        )
    }

    /// The module as lists show it: the field's own names first, then ours.
    pub fn describe(&self) -> Value {
        let counts = &self.state.counts;
        let hooks: Vec<&str> =
            Hook::ALL.into_iter().filter(|hook| self.wants(*hook)).map(Hook::name).collect();
        let points: Vec<Value> = [(Hook::OnRequest, "OnRequest"), (Hook::OnResponse, "OnResponse")]
            .into_iter()
            .chain([(Hook::OnError, "OnError")])
            .filter(|(hook, _)| self.wants(*hook))
            .map(|(_, point)| json!({"Middleware": point}))
            .collect();
        json!({
            "module_uuid": self.record.uuid,
            "module_meta": {
                "name": self.spec.name,
                "file_path": self.record.origin.as_deref().unwrap_or_default(),
                "sha256_hash": self.record.sha256,
                "size_bytes": self.size,
                "created_at": self.record.created_ms / 1000,
                "last_accessed_at": counts.last_ms.load(Ordering::Relaxed) / 1000,
                "access_count": counts.calls.load(Ordering::Relaxed),
                "attach_points": points,
            },
            "uuid": self.record.uuid,
            "version": self.record.version,
            "updated_ms": self.record.updated_ms,
            "hooks": hooks,
            "needs": self.needs,
            "signature": self.record.signature,
            "settings": self.spec,
            "quarantined": self.is_quarantined(),
            "calls": counts.calls.load(Ordering::Relaxed),
            "failures": counts.failures.load(Ordering::Relaxed),
            "store_bytes": self.state.store.bytes(),
        })
    }
}

fn response_name(action: &ResponseAction) -> &'static str {
    match action {
        ResponseAction::Continue => "continue",
        ResponseAction::Modify(_) => "modify",
        ResponseAction::Reject(_) => "reject",
    }
}

/// The events of one stream before one module.
pub struct Events {
    module: Arc<Module>,
    stream: runtime::Stream,
    index: u64,
}

impl Events {
    /// Before the first event.
    pub fn new(module: Arc<Module>) -> Self {
        Self { stream: runtime::Stream::new(Arc::clone(&module)), module, index: 0 }
    }

    /// The module.
    pub fn module(&self) -> &Arc<Module> {
        &self.module
    }

    /// Calls on-stream-event. The request's headers only go with the first event.
    pub async fn event(
        &mut self,
        request: &Arc<RequestView>,
        name: Option<String>,
        data: String,
    ) -> Called<EventAction> {
        let view = EventView { name, data, index: self.index };
        self.index += 1;
        let called = self.stream.event(Arc::clone(request), view).await;
        let spec = &self.module.spec;
        self.module.settle(
            Hook::OnStreamEvent,
            called,
            |action| check::event(action, spec),
            |action| match action {
                EventAction::Continue => "continue",
                EventAction::Replace(_) => "replace",
                EventAction::Stop(_) => "stop",
            },
        )
    }
}
