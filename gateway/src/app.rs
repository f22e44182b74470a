//! What a gateway process holds: made once, shared by every handler, torn down by `lifecycle`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use branchline_core::Result;
use branchline_telemetry::Metrics;
use branchline_worker::{Fleet, FleetOptions};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Options;
use crate::dispatch::{LeaseSigner, LiveRequests, Offload};
use crate::guard::BodyLimit;

/// The parts of a running gateway.
pub struct App {
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// What the operator wants.
    pub options: Options,
    /// Every series.
    pub metrics: Arc<Metrics>,
    /// Owner of every task that the gateway starts.
    pub tracker: TaskTracker,
    /// Cancelled when the drain's deadline has passed: whatever still runs must end now.
    pub stop: CancellationToken,
    /// Requests on engines, by id.
    pub live: Arc<LiveRequests>,
    /// Where tokenising and template rendering run.
    pub offload: Offload,
    /// Signs and reads lease ids.
    pub leases: LeaseSigner,
    draining: AtomicBool,
}

impl App {
    /// Builds the parts and starts connecting to the workers. Must run inside a tokio runtime.
    ///
    /// # Errors
    /// `InvalidArgument` if a worker's address can't be used.
    pub fn build(options: Options) -> Result<Arc<Self>> {
        let metrics = Arc::new(Metrics::default());
        let fleet = Fleet::new(fleet_options(&options), Arc::clone(&metrics));
        for url in &options.worker_urls {
            fleet.add(url)?;
        }
        if options.lease_key.is_none() {
            tracing::info!(
                "lease-key is not set: lease ids are good at this gateway only, and until it stops"
            );
        }
        let tracker = TaskTracker::new();
        let leases = LeaseSigner::new(options.lease_key.as_ref());
        Ok(Arc::new(Self {
            fleet,
            options,
            metrics,
            live: Arc::default(),
            leases,
            offload: Offload::new(tracker.clone()),
            tracker,
            stop: CancellationToken::new(),
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
    }

    /// Whether a stop has been asked for.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

fn fleet_options(options: &Options) -> FleetOptions {
    FleetOptions {
        policy: options.policy,
        worker_token: options.worker_token.as_ref().map(|token| token.reveal().to_owned()),
        gateway_id: format!("{}:{}", options.host, options.port),
        text_index_bytes: options.cache_index_size.0,
        ..FleetOptions::default()
    }
}
