//! One worker, whatever its transport.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_telemetry::Metrics;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::grpc::{DeltaStream, Engine};
use crate::health::{Health, Phase};
use crate::http::HttpWorker;
use crate::load::{Load, Record};
use crate::model::Model;
use crate::options::SubmitOptions;
use crate::proto;
use crate::spec::WorkerSpec;

/// How a worker is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// The engine contract.
    Grpc,
    /// HTTP/1.1, bodies untouched.
    Http,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Grpc => "grpc",
            Self::Http => "http",
        })
    }
}

/// A worker's state for admin pages.
#[derive(Debug, Clone, serde::Serialize)]
pub struct WorkerInfo {
    /// Number in this process, as `w3`.
    pub id: String,
    /// As given.
    pub url: String,
    /// `grpc` or `http`.
    pub transport: String,
    /// Whether it may be chosen.
    pub ready: bool,
    /// Why it may not; empty when ready.
    pub reason: String,
    /// What requests say of it: `well`, `suspected`, `resting`, `ejected`, `broken` or `probing`.
    pub health: String,
    /// Whether it gets no new requests on purpose.
    pub draining: bool,
    /// What runs there, as told or found out; empty while unknown.
    pub runtime: String,
    /// Prompt tokens a second that it has shown; absent while unknown.
    pub prefill_rate: Option<f64>,
    /// Requests from choice to last byte.
    pub in_flight: u64,
    /// Served names; empty if it takes any.
    pub models: Vec<String>,
    /// Milliseconds since the last completed step while work exists, from the last load report.
    pub step_age_ms: Option<f64>,
}

pub(crate) enum Client {
    Grpc(Engine),
    Http(HttpWorker),
}

/// One worker of the fleet.
pub struct Worker {
    /// Never reused while the process lives.
    pub id: WorkerId,
    /// As given to [`crate::Fleet::add`].
    pub url: String,
    pub(crate) client: Client,
    pub(crate) load: Arc<Load>,
    pub(crate) status: Arc<Status>,
    pub(crate) record: Record,
    /// Hash of the URL: what key-based policies know it by.
    pub(crate) name: u64,
    spec: ArcSwap<WorkerSpec>,
    draining: AtomicBool,
    /// Its source says that it must get no new requests for now.
    held: AtomicBool,
    /// Ends its task and connections.
    pub(crate) cancel: CancellationToken,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("id", &self.id).field("url", &self.url).finish_non_exhaustive()
    }
}

/// The parts of a new worker.
pub(crate) struct Parts {
    pub(crate) id: WorkerId,
    pub(crate) spec: WorkerSpec,
    pub(crate) client: Client,
    pub(crate) load: Arc<Load>,
    pub(crate) status: Arc<Status>,
    pub(crate) record: Record,
    pub(crate) cancel: CancellationToken,
}

impl Worker {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { id, spec, client, load, status, record, cancel } = parts;
        Self {
            id,
            url: spec.url.clone(),
            name: xxhash_rust::xxh3::xxh3_64(spec.url.as_bytes()),
            client,
            load,
            status,
            record,
            draining: AtomicBool::new(spec.draining),
            held: AtomicBool::new(false),
            spec: ArcSwap::from_pointee(spec),
            cancel,
        }
    }

    /// Where other workers reach it: the host and the port of its URL.
    pub fn host_and_port(&self) -> Option<(String, u16)> {
        let authority =
            self.url.split_once("://")?.1.trim_end_matches('/').parse::<http::uri::Authority>().ok()?;
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        Some((host, authority.port_u16().unwrap_or(80)))
    }

    /// How it is spoken to.
    pub fn transport(&self) -> Transport {
        match self.client {
            Client::Grpc(_) => Transport::Grpc,
            Client::Http(_) => Transport::Http,
        }
    }

    /// Whether it may be chosen.
    pub fn is_ready(&self) -> bool {
        self.status.is_ready() && !self.is_held()
    }

    /// Whether its source says that it must get no new requests for now.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    /// Requests from choice to last byte.
    pub fn in_flight(&self) -> u64 {
        self.load.running()
    }

    /// State for admin pages.
    pub fn info(&self) -> WorkerInfo {
        WorkerInfo {
            id: self.id.to_string(),
            url: self.url.clone(),
            transport: self.transport().to_string(),
            ready: self.is_ready(),
            reason: if self.is_held() { "its pod is not ready".to_owned() } else { self.status.reason() },
            health: self.record.health.word(self.record.clock.now()).to_owned(),
            draining: self.is_draining(),
            runtime: self.runtime(),
            prefill_rate: self.record.health.pace.rate(),
            in_flight: self.in_flight(),
            models: self.served().unwrap_or_default(),
            step_age_ms: self.load_report().map(|report| report.step_age_ms),
        }
    }

    /// What the operator said of it.
    pub fn spec(&self) -> Arc<WorkerSpec> {
        self.spec.load_full()
    }

    /// What runs there, as told or found out; empty while unknown.
    pub fn runtime(&self) -> String {
        if let Some(told) = &self.spec.load().runtime_type {
            return told.clone();
        }
        match &self.client {
            Client::Grpc(_) => "branchline".to_owned(),
            Client::Http(http) => http.runtime().unwrap_or_default().to_owned(),
        }
    }

    /// Whether it gets no new requests on purpose.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Where its breaker stands.
    pub fn breaker(&self) -> Phase {
        self.record.health.breaker.phase(self.record.clock.now())
    }

    /// Share of its KV pool in use, as last reported; 0 if unknown.
    pub(crate) fn usage(&self) -> f64 {
        let report = self.load_report();
        report.map_or(0.0, |report| report.pages_used as f64 / report.pages_total.max(1) as f64)
    }

    pub(crate) fn health(&self) -> &Arc<Health> {
        &self.record.health
    }

    pub(crate) fn set_spec(&self, spec: WorkerSpec) {
        self.spec.store(Arc::new(spec));
    }

    pub(crate) fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Release);
    }

    pub(crate) fn set_held(&self, held: bool) {
        self.held.store(held, Ordering::Release);
    }

    /// The token sent to it.
    pub fn token(&self, usual: Option<&str>) -> Option<String> {
        self.spec.load().api_key.clone().or_else(|| usual.map(str::to_owned))
    }

    /// Names it serves, `None` if it takes any name or has not said yet.
    pub fn served(&self) -> Option<Vec<String>> {
        let told = self.spec.load().model_ids();
        if !told.is_empty() {
            return Some(told);
        }
        match &self.client {
            Client::Grpc(engine) => engine.model().map(|model| model.names.clone()),
            Client::Http(http) => http.served().map(|names| names.to_vec()),
        }
    }

    /// Whether it serves `model` (absent: anything). An engine not yet reached serves nothing; an HTTP worker that
    /// lists no models takes any name.
    pub(crate) fn can_serve(&self, model: Option<&str>) -> bool {
        let told = self.spec.load().model_ids();
        if let Some(name) = model
            && !told.is_empty()
            && !told.iter().any(|own| own == name)
        {
            return false;
        }
        match (&self.client, model) {
            (Client::Grpc(engine), None) => engine.model().is_some(),
            // The operator's name for an engine's model is as good as its own.
            (Client::Grpc(engine), Some(name)) => {
                engine.model().is_some_and(|model| !told.is_empty() || model.has_name(name))
            }
            (Client::Http(_), None) => true,
            (Client::Http(http), Some(name)) => {
                !told.is_empty() || http.served().is_none_or(|names| names.iter().any(|own| own == name))
            }
        }
    }

    /// The engine's model once it has been read; kept while the engine is away. `None` for HTTP workers.
    pub fn model(&self) -> Option<Arc<Model>> {
        match &self.client {
            Client::Grpc(engine) => engine.model(),
            Client::Http(_) => None,
        }
    }

    /// The HTTP side, if it is an HTTP worker.
    pub fn http(&self) -> Option<&HttpWorker> {
        match &self.client {
            Client::Grpc(_) => None,
            Client::Http(http) => Some(http),
        }
    }

    pub(crate) fn is_engine(&self, engine_id: Option<&str>) -> bool {
        engine_id.is_some_and(|wanted| self.engine_id().is_some_and(|own| *own == wanted))
    }

    fn engine(&self) -> Result<&Engine> {
        match &self.client {
            Client::Grpc(engine) => Ok(engine),
            Client::Http(_) => Err(Error::new(
                ErrorCode::Unimplemented,
                "the worker is an http worker and does not speak the engine contract",
            )),
        }
    }

    /// Starts a request. Refused at once (`Unavailable`) while the engine is not attached.
    pub fn submit(&self, request: proto::GenerateRequest, options: SubmitOptions) -> Result<DeltaStream> {
        self.engine()?.submit(request, options)
    }

    /// Ends a request by its exact id; answers how many were alive.
    pub async fn abort(&self, request_id: &str) -> Result<u32> {
        self.engine()?
            .abort(proto::AbortRequest { request_id: request_id.to_owned(), abort_all: false })
            .await
    }

    /// Ends every request of the engine; answers how many were alive.
    pub async fn abort_all(&self) -> Result<u32> {
        self.engine()?.abort(proto::AbortRequest { request_id: String::new(), abort_all: true }).await
    }

    /// Options, counters and cache statistics, asked now.
    pub async fn server_info(&self) -> Result<proto::GetServerInfoResponse> {
        self.engine()?.server_info().await
    }

    /// Drops every cached page that no request holds.
    pub async fn flush_cache(&self) -> Result<proto::FlushCacheResponse> {
        self.engine()?.flush_cache().await
    }

    /// A piece of the engine's radix tree.
    pub async fn cache_tree(
        &self,
        request: proto::GetCacheTreeRequest,
    ) -> Result<proto::GetCacheTreeResponse> {
        self.engine()?.cache_tree(request).await
    }

    /// What the engine called itself when it was attached; changes at each of its starts. `None` while it is away.
    pub fn engine_id(&self) -> Option<Arc<String>> {
        match &self.client {
            Client::Grpc(engine) => engine.engine_id(),
            Client::Http(_) => None,
        }
    }

    /// Lets a lease end at another time.
    pub async fn renew_lease(&self, request: proto::RenewLeaseRequest) -> Result<proto::RenewLeaseResponse> {
        self.engine()?.renew_lease(request).await
    }

    /// Ends a lease; whether it was alive.
    pub async fn release_lease(&self, request: proto::ReleaseLeaseRequest) -> Result<bool> {
        self.engine()?.release_lease(request).await
    }

    /// Vectors or ranks of texts. Dropping the future ends the work.
    pub async fn embed(&self, request: proto::EmbedRequest) -> Result<proto::EmbedResponse> {
        self.engine()?.embed(request).await
    }

    /// Scores continuations of a prefix. Dropping the future ends the work.
    pub async fn score(&self, request: proto::ScoreRequest) -> Result<proto::ScoreResponse> {
        self.engine()?.score(request).await
    }

    /// What the engine says of its adapters; none of HTTP workers.
    pub(crate) fn listed(&self) -> Option<Arc<proto::ListAdaptersResponse>> {
        match &self.client {
            Client::Grpc(engine) => engine.adapters(),
            Client::Http(_) => None,
        }
    }

    /// Loads an adapter into the engine; it is known here when this returns. Takes as long as reading it takes.
    pub async fn load_adapter(&self, request: proto::LoadAdapterRequest) -> Result<proto::Adapter> {
        self.engine()?.load_adapter(request).await
    }

    /// Unloads one; how many requests still run with it.
    pub async fn unload_adapter(&self, request: proto::UnloadAdapterRequest) -> Result<u32> {
        self.engine()?.unload_adapter(request).await
    }

    /// Load, asked now.
    pub async fn load(&self) -> Result<proto::GetLoadResponse> {
        self.engine()?.load().await
    }

    /// The last polled load; `None` before the first poll, while not attached, and for HTTP workers.
    pub fn load_report(&self) -> Option<Arc<proto::GetLoadResponse>> {
        match &self.client {
            Client::Grpc(engine) => engine.load_report(),
            Client::Http(_) => None,
        }
    }
}

/// Readiness with its reason. Flips are logged and counted here and nowhere else.
pub(crate) struct Status {
    url: Arc<str>,
    ready: AtomicBool,
    /// Taken out on purpose: whatever breaks from now on is nobody's failure.
    retired: AtomicBool,
    reason: Mutex<String>,
    metrics: Arc<Metrics>,
    changed: tokio::sync::watch::Sender<u64>,
    record: Record,
}

impl Status {
    pub(crate) fn new(
        record: Record,
        metrics: Arc<Metrics>,
        changed: tokio::sync::watch::Sender<u64>,
    ) -> Self {
        let url = Arc::clone(&record.url);
        metrics.worker_ready.with([url.to_string()]).set(0);
        let reason = Mutex::new("not reached yet".into());
        let (ready, retired) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { url, ready, retired, reason, metrics, changed, record }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    fn reason(&self) -> String {
        self.reason.lock().clone()
    }

    /// The worker leaves the fleet, by removal or shutdown. It is not ready ever after.
    pub(crate) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        self.ready.store(false, Ordering::Release);
        "removed from the fleet".clone_into(&mut self.reason.lock());
        self.changed.send_modify(|count| *count += 1);
    }

    /// The worker may be chosen from now on.
    pub(crate) fn set_ready(&self) {
        if self.retired.load(Ordering::Acquire) {
            return;
        }
        self.reason.lock().clear();
        if !self.is_ready() {
            self.record.health.warm_up(self.record.clock.now());
        }
        if !self.ready.swap(true, Ordering::AcqRel) {
            tracing::info!(worker = %self.url, "worker is ready");
            self.metrics.worker_ready.with([self.url.to_string()]).set(1);
        }
        self.changed.send_modify(|count| *count += 1);
    }

    /// The worker must not be chosen; `reason` is shown on admin pages.
    pub(crate) fn set_down(&self, reason: &str) {
        if self.retired.load(Ordering::Acquire) {
            return;
        }
        let mut held = self.reason.lock();
        let news = *held != reason;
        reason.clone_into(&mut held);
        drop(held);
        if self.ready.swap(false, Ordering::AcqRel) {
            tracing::warn!(worker = %self.url, reason, "worker is not ready");
            let url = || [self.url.to_string()];
            self.metrics.worker_ready.with(url()).set(0);
            self.metrics.worker_failures.with(url()).inc();
        } else if news {
            tracing::debug!(worker = %self.url, reason, "worker is still not ready");
        }
        self.changed.send_modify(|count| *count += 1);
    }
}
