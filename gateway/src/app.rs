//! What a gateway process holds: made once, shared by every handler, torn down by `lifecycle`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use branchline_core::{Error, Result};
use branchline_plugins::{Grantable, PluginOptions, Plugins};
use branchline_telemetry::{Metrics, Traces};
use branchline_worker::{
    BreakerOptions, BudgetOptions, ClientFiles, ClientTls, Fleet, FleetOptions, HealthOptions, OutlierOptions,
};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Options;
use crate::dispatch::{LeaseSigner, LiveRequests, Offload, Rooms};
use crate::guard::{Admission, BodyLimit, KeyFile};
use crate::http::{Explanations, ResponseStore, Shown};
use crate::workers::Workers;

/// The parts of a running gateway.
pub struct App {
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// What the operator wants.
    pub options: Options,
    /// Clients' keys that may change while the gateway runs.
    pub key_file: Option<Arc<KeyFile>>,
    /// How workers are spoken to over TLS.
    pub worker_tls: Arc<ClientTls>,
    /// What requests compete for, if anything is limited.
    pub admission: Option<Arc<Admission>>,
    /// Every series.
    pub metrics: Arc<Metrics>,
    /// Owner of every task that the gateway starts.
    pub tracker: TaskTracker,
    /// Cancelled when the drain's deadline has passed: running answers end with an error of their own.
    pub ending: CancellationToken,
    /// Cancelled a moment later: whatever still runs must end now.
    pub stop: CancellationToken,
    /// Requests on engines, by id.
    pub live: Arc<LiveRequests>,
    /// Why the latest requests went where they went.
    pub explanations: Arc<Explanations>,
    /// Workers from files, names and requests, and what of them survives a restart.
    pub workers: Arc<Workers>,
    /// What the Responses API has stored.
    pub responses: ResponseStore,
    /// WebAssembly middleware.
    pub plugins: Arc<Plugins>,
    /// Where tokenising and template rendering run.
    pub offload: Offload,
    /// Where the halves of split requests meet.
    pub rooms: Arc<Rooms>,
    /// Signs and reads lease ids.
    pub leases: LeaseSigner,
    /// Where spans go, if anywhere.
    pub traces: Option<Arc<Traces>>,
    /// Engines whose figures /metrics shows.
    pub scraped: Shown,
    draining: AtomicBool,
}

impl App {
    /// Builds the parts and starts connecting to the workers. Must run inside a tokio runtime.
    ///
    /// # Errors
    /// `InvalidArgument` if a worker's address or a file can't be used.
    pub fn build(options: Options) -> Result<Arc<Self>> {
        let metrics = Arc::new(Metrics::default());
        let key_file = options.api_key_file.as_deref().map(KeyFile::load).transpose();
        let key_file = key_file
            .map_err(|cause| Error::invalid("api_key_file", format!("api_key_file: {cause}")))?
            .map(Arc::new);
        let admission = Admission::of(&options, &metrics)?;
        let worker_tls = ClientTls::load(ClientFiles {
            ca: options.ca_cert_path.clone(),
            cert: options.client_cert_path.clone(),
            key: options.client_key_path.clone(),
        })?;
        let fleet = FleetOptions { tls: Arc::clone(&worker_tls), ..fleet_options(&options) };
        let fleet = Fleet::new(fleet, Arc::clone(&metrics));
        if options.lease_key.is_none() {
            tracing::info!(
                "lease-key is not set: lease ids are good at this gateway only, and until it stops"
            );
        }
        let traces = options.otlp_endpoint.as_deref().map(Traces::new).transpose()?.map(Arc::new);
        let plugins = Plugins::new(plugin_options(&options), Arc::clone(&metrics))?;
        let tracker = TaskTracker::new();
        let leases = LeaseSigner::new(options.lease_key.as_ref());
        let stop = CancellationToken::new();
        let workers = Workers::start(&options, &fleet, &tracker, &stop)?;
        let responses = ResponseStore::new(options.response_store_size.0);
        Ok(Arc::new(Self {
            explanations: Arc::default(),
            workers,
            fleet,
            options,
            metrics,
            admission,
            key_file,
            worker_tls,
            plugins,
            live: Arc::default(),
            rooms: Arc::default(),
            leases,
            responses,
            offload: Offload::new(tracker.clone()),
            tracker,
            ending: CancellationToken::new(),
            stop,
            traces,
            scraped: Shown::default(),
            draining: AtomicBool::new(false),
        }))
    }

    /// Bounds of request bodies.
    pub fn body_limit(&self) -> BodyLimit {
        BodyLimit { bytes: self.options.max_payload_size.0, stall: self.options.header_timeout }
    }

    /// Takes the gateway out of rotation; running requests go on.
    pub fn begin_drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.workers.close();
    }

    /// Whether a stop has been asked for.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

fn fleet_options(options: &Options) -> FleetOptions {
    FleetOptions {
        policy: options.policy,
        model_policies: options.model_policy.iter().map(|pair| (pair.0.clone(), pair.1)).collect(),
        model_aliases: options.model_alias.iter().map(|pair| (pair.0.clone(), pair.1.clone())).collect(),
        health: health_options(options),
        budget: BudgetOptions { share: options.retry_budget.0, ..BudgetOptions::default() },
        usage_limit: options.worker_usage_limit.0,
        connect_timeout: options.connect_timeout,
        text_index_ttl: options.cache_index_ttl,
        block_index_bytes: options.block_index_size.0,
        worker_token: options.worker_token.as_ref().map(|token| token.reveal().to_owned()),
        gateway_id: format!("{}:{}", options.host, options.port),
        text_index_bytes: options.cache_index_size.0,
        ..FleetOptions::default()
    }
}

fn health_options(options: &Options) -> HealthOptions {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    HealthOptions {
        breaker: BreakerOptions {
            failures: count(options.breaker_failures),
            share: options.breaker_share.0,
            open: options.breaker_open,
            successes: count(options.breaker_successes),
            ..BreakerOptions::default()
        },
        slow_start: options.slow_start,
        suspect_after: options.suspect_after,
        outlier: OutlierOptions {
            share: options.outlier_share.0,
            ceiling: options.outlier_ceiling.0,
            ..OutlierOptions::default()
        },
        ..HealthOptions::default()
    }
}

fn plugin_options(options: &Options) -> PluginOptions {
    PluginOptions {
        dir: options.wasm_dir.clone(),
        upload_dirs: options.wasm_upload_dirs.iter().map(Into::into).collect(),
        compile_timeout: options.wasm_compile_timeout,
        grantable: Grantable {
            folders: options.wasm_grant_dirs.iter().map(Into::into).collect(),
            network: options.wasm_grant_network.to_vec(),
        },
        trusted: options.wasm_trusted_keys.to_vec(),
    }
}
