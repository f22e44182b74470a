//! The registry of workers. Readers take a snapshot; changes copy it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_telemetry::Metrics;
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::address::Address;
use crate::clock::FleetClock;
use crate::grpc::Engine;
use crate::health::{Health, RetryBudget};
use crate::http::HttpWorker;
use crate::index::Index;
use crate::load::{Load, Record};
use crate::model::Model;
use crate::options::FleetOptions;
use crate::route::{Router, unavailable};
use crate::spec::{WorkerPatch, WorkerSpec};
use crate::tokenizers::Tokenizers;
use crate::worker::{Client, Parts, Status, Transport, Worker};

/// What the workers' tasks share.
pub(crate) struct Shared {
    pub(crate) options: Arc<FleetOptions>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) router: Router,
    pub(crate) tokenizers: Tokenizers,
    pub(crate) tracker: TaskTracker,
    cancel: CancellationToken,
    /// Counts changes of readiness, for those who wait.
    changes: watch::Sender<u64>,
    pub(crate) clock: FleetClock,
    pub(crate) budget: RetryBudget,
}

impl Shared {
    /// Takes a worker's series from the metrics.
    fn drop_series(&self, url: &str) {
        for gauge in [&self.metrics.worker_ready, &self.metrics.worker_in_flight] {
            gauge.remove([url.to_owned()]);
        }
        for counter in [&self.metrics.worker_failures, &self.metrics.worker_suspected] {
            counter.remove([url.to_owned()]);
        }
    }
}

/// All workers of one gateway.
pub struct Fleet {
    pub(crate) shared: Arc<Shared>,
    pub(crate) workers: Arc<ArcSwap<Vec<Arc<Worker>>>>,
    /// Serialises changes of `workers`.
    changing: Arc<Mutex<()>>,
    next: AtomicU32,
}

impl Fleet {
    /// An empty fleet.
    pub fn new(options: FleetOptions, metrics: Arc<Metrics>) -> Arc<Self> {
        let random = options.seed.map_or_else(rand::make_rng, StdRng::seed_from_u64);
        let clock = options.clock.clone();
        let router = Router {
            policy: options.policy.build(),
            by_model: options
                .model_policies
                .iter()
                .map(|(name, kind)| (name.clone(), kind.build()))
                .collect(),
            random: Mutex::new(random),
            index: Index::new(options.text_index_bytes, options.text_index_ttl, options.block_index_bytes),
            clock: clock.clone(),
            health: options.health,
        };
        let budget = RetryBudget::new(options.budget);
        let shared = Shared {
            options: Arc::new(options),
            metrics,
            router,
            tokenizers: Tokenizers::default(),
            tracker: TaskTracker::new(),
            cancel: CancellationToken::new(),
            changes: watch::Sender::new(0),
            clock,
            budget,
        };
        Arc::new(Self {
            shared: Arc::new(shared),
            workers: Arc::default(),
            changing: Arc::default(),
            next: AtomicU32::new(0),
        })
    }

    /// Adds a worker of which nothing but the URL is known; see [`Self::register`].
    pub fn add(&self, url: &str) -> Result<Arc<Worker>> {
        self.register(WorkerSpec::new(url))
    }

    /// Adds a worker and starts its task; it becomes ready by itself. Must be called on a tokio runtime.
    pub fn register(&self, spec: WorkerSpec) -> Result<Arc<Worker>> {
        spec.check()?;
        let address = Address::parse(&spec.url)?;
        address.agrees(spec.connection_mode.as_deref())?;
        let url = spec.url.clone();
        let _changing = self.changing.lock();
        let old = self.workers.load_full();
        if self.shared.cancel.is_cancelled() {
            return Err(unavailable("the fleet is shutting down"));
        }
        if old.iter().any(|worker| same_url(&worker.url, &url)) {
            let text = format!("worker '{url}' is in the fleet already; remove it first");
            return Err(Error::new(ErrorCode::Conflict, text).with_field("worker_url"));
        }
        let worker = Arc::new(self.build(spec, &address)?);
        let mut new = Vec::clone(&old);
        new.push(worker.clone());
        self.workers.store(Arc::new(new));
        let (shared, task) = (self.shared.clone(), worker.clone());
        let (workers, changing) = (self.workers.clone(), self.changing.clone());
        self.shared.tracker.spawn(async move {
            match &task.client {
                Client::Grpc(engine) => crate::grpc::supervise(&task, engine, &shared, &task.cancel).await,
                Client::Http(http) => crate::http::watch(&task, http, &shared.options, &task.cancel).await,
            }
            shared.router.index.purge(task.id);
            // Another one of the same URL has the same series; it must not come while this looks for it.
            let _changing = changing.lock();
            if !workers.load().iter().any(|other| other.id != task.id && other.url == task.url) {
                shared.drop_series(&task.url);
            }
        });
        Ok(worker)
    }

    fn build(&self, spec: WorkerSpec, address: &Address) -> Result<Worker> {
        let (shared, url) = (&self.shared, spec.url.as_str());
        let cancel = shared.cancel.child_token();
        let health = Arc::new(Health::new(shared.options.health));
        let record = Record { url: url.into(), health, clock: shared.clock.clone() };
        let status = Arc::new(Status::new(record.clone(), shared.metrics.clone(), shared.changes.clone()));
        let client = match address.transport {
            Transport::Grpc => {
                let token = spec.api_key.as_deref().or(shared.options.worker_token.as_deref());
                Client::Grpc(Engine::new(url, address, token, shared.options.clone())?)
            }
            Transport::Http => {
                let (status, tracker) = (status.clone(), shared.tracker.clone());
                Client::Http(HttpWorker::new(url, address, &shared.options, status, tracker, cancel.clone())?)
            }
        };
        let load = Arc::new(Load::new(shared.metrics.worker_in_flight.with([url.to_owned()])));
        let id = WorkerId(self.next.fetch_add(1, Ordering::Relaxed));
        Ok(Worker::new(Parts { id, spec, client, load, status, record, cancel }))
    }

    /// Changes what the operator said of a worker.
    pub fn patch(&self, id: WorkerId, patch: &WorkerPatch) -> Result<Arc<Worker>> {
        let _changing = self.changing.lock();
        let worker = self.worker(id).ok_or_else(|| gone(id))?;
        if patch.api_key.is_some() && worker.transport() == Transport::Grpc {
            let text = "api_key of an engine is read when it is added; remove the worker and add it again";
            return Err(Error::invalid("api_key", text));
        }
        worker.set_spec(worker.spec().patched(patch)?);
        if let Some(draining) = patch.draining {
            worker.set_draining(draining);
            self.shared.changes.send_modify(|count| *count += 1);
        }
        Ok(worker)
    }

    /// Gives a worker no new requests, or gives it some again; all else goes on. Whether it is in the fleet.
    pub fn hold(&self, id: WorkerId, held: bool) -> bool {
        let Some(worker) = self.worker(id) else { return false };
        worker.set_held(held);
        self.shared.changes.send_modify(|count| *count += 1);
        true
    }

    /// Takes a worker out: no new requests at once; its running ones may end within `grace`, then they fail.
    pub async fn remove(&self, id: WorkerId, grace: Duration) -> Result<()> {
        let worker = self.take(id)?;
        drain(worker, grace).await;
        Ok(())
    }

    /// As [`Self::remove`]: it is out when this returns, and drained when the future ends. Nothing if it is not in.
    pub fn retire(&self, id: WorkerId, grace: Duration) -> impl Future<Output = ()> + Send + 'static {
        let worker = self.take(id).ok();
        async move {
            if let Some(worker) = worker {
                drain(worker, grace).await;
            }
        }
    }

    /// Takes a worker out with all that runs on it.
    pub fn forget(&self, id: WorkerId) {
        if let Ok(worker) = self.take(id) {
            worker.status.retire();
            worker.cancel.cancel();
        }
    }

    fn take(&self, id: WorkerId) -> Result<Arc<Worker>> {
        let _changing = self.changing.lock();
        let old = self.workers.load_full();
        let worker = old.iter().find(|worker| worker.id == id).cloned().ok_or_else(|| gone(id))?;
        self.workers.store(Arc::new(old.iter().filter(|worker| worker.id != id).cloned().collect()));
        Ok(worker)
    }

    /// The workers now.
    pub fn workers(&self) -> Arc<Vec<Arc<Worker>>> {
        self.workers.load_full()
    }

    /// The worker with this id.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<Worker>> {
        self.workers.load().iter().find(|worker| worker.id == id).cloned()
    }

    /// The ready engine that called itself so when it was attached.
    pub fn engine(&self, engine_id: &str) -> Option<Arc<Worker>> {
        let workers = self.workers.load();
        let is_meant = |worker: &&Arc<Worker>| worker.status.is_ready() && worker.is_engine(Some(engine_id));
        workers.iter().find(is_meant).cloned()
    }

    /// Models of engines that have ever been reached, ready ones' first; one for each first name.
    pub fn models(&self) -> Vec<Arc<Model>> {
        let workers = self.workers.load();
        let mut models: Vec<Arc<Model>> = Vec::new();
        for ready in [true, false] {
            for worker in workers.iter().filter(|worker| worker.is_ready() == ready) {
                if let Some(model) = worker.model()
                    && !models.iter().any(|known| known.name == model.name)
                {
                    models.push(model);
                }
            }
        }
        models
    }

    /// The engines' model that `name` means.
    pub fn model(&self, name: &str) -> Option<Arc<Model>> {
        let workers = self.workers.load();
        let named = |ready: bool| {
            let mut named =
                workers.iter().filter(|worker| worker.is_ready() == ready && worker.can_serve(Some(name)));
            named.find_map(|worker| worker.model())
        };
        named(true).or_else(|| named(false))
    }

    /// Every name that requests may use, with who serves it; names of engines first, in the order of the fleet.
    pub fn names(&self) -> Vec<(String, Transport)> {
        let mut names: Vec<(String, Transport)> = Vec::new();
        let workers = self.workers.load();
        for transport in [Transport::Grpc, Transport::Http] {
            for worker in workers.iter().filter(|worker| worker.transport() == transport) {
                for name in worker.served().unwrap_or_default() {
                    if !names.iter().any(|(known, _)| *known == name) {
                        names.push((name, transport));
                    }
                }
            }
        }
        names
    }

    /// How requests for `model` are served: by engines if any has the name, else by HTTP workers.
    ///
    /// `NotFound` names the known models; `Unavailable` if no worker has said yet what it serves.
    pub fn transport(&self, model: Option<&str>) -> Result<Transport> {
        let workers = self.workers.load();
        let serves = |transport| {
            workers.iter().any(|worker| worker.transport() == transport && worker.can_serve(model))
        };
        if serves(Transport::Grpc) {
            return Ok(Transport::Grpc);
        }
        if serves(Transport::Http) {
            return Ok(Transport::Http);
        }
        Err(self.unknown(model))
    }

    pub(crate) fn unknown(&self, model: Option<&str>) -> Error {
        let workers = self.workers.load();
        let silent = workers.iter().any(|worker| worker.served().is_none());
        match model {
            _ if workers.is_empty() => unavailable("no worker is in the fleet; add one"),
            Some(name) if !silent => {
                let mut known = Vec::new();
                for (name, _) in self.names() {
                    let adapters =
                        self.adapters(&name).into_iter().map(|adapter| format!("{name}:{adapter}"));
                    known.extend(std::iter::once(name.clone()).chain(adapters.collect::<Vec<_>>()));
                }
                let text = format!("model '{name}' does not exist; use one of: {}", known.join(", "));
                Error::new(ErrorCode::NotFound, text).with_field("model")
            }
            _ => unavailable("no worker has been reached yet; try again"),
        }
    }

    /// Completes when `condition` holds; looked at after each change of a worker's state.
    pub async fn wait_until(&self, condition: impl Fn(&Self) -> bool) {
        let mut changes = self.shared.changes.subscribe();
        while !condition(self) {
            // The sender lives as long as the fleet.
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Blocks that the index believes an engine to hold.
    pub fn indexed_blocks(&self, id: WorkerId) -> usize {
        self.shared.router.index.blocks.read().blocks(id)
    }

    /// Ends all tasks and connections; live requests fail. Completes when they are gone.
    pub async fn shutdown(&self) {
        self.workers.load().iter().for_each(|worker| worker.status.retire());
        self.shared.cancel.cancel();
        self.shared.tracker.close();
        self.shared.tracker.wait().await;
    }
}

async fn drain(worker: Arc<Worker>, grace: Duration) {
    // Out of time is an answer too.
    let _ = tokio::time::timeout(grace, worker.load.drained()).await;
    worker.status.retire();
    worker.cancel.cancel();
}

fn gone(id: WorkerId) -> Error {
    Error::new(ErrorCode::NotFound, format!("worker {id} is not in the fleet"))
}

/// Whether two URLs differ in nothing but a slash at the end.
fn same_url(left: &str, right: &str) -> bool {
    left.trim_end_matches('/') == right.trim_end_matches('/')
}
