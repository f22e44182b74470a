//! Settings of the fleet and of one request. Frozen once the fleet runs.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use branchline_routing::PolicyKind;

use crate::clock::FleetClock;
use crate::health::{BudgetOptions, HealthOptions};
use crate::load::LoadGuard;
use crate::tls::ClientTls;

/// Bounds of what is held for one request whose reader lags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferLimits {
    /// Queued deltas; consecutive plain ones of a sequence are merged long before this.
    pub deltas: usize,
    /// Queued bytes, estimated.
    pub bytes: usize,
}

impl Default for BufferLimits {
    fn default() -> Self {
        Self { deltas: 1024, bytes: 4 << 20 }
    }
}

/// Settings of a [`crate::Fleet`].
#[derive(Debug, Clone)]
pub struct FleetOptions {
    /// How a worker is chosen.
    pub policy: PolicyKind,
    /// How a worker is chosen for some models.
    pub model_policies: HashMap<String, PolicyKind>,
    /// Further names of models: what a client says → what workers say.
    pub model_aliases: HashMap<String, String>,
    /// How workers are judged by what requests see of them.
    pub health: HealthOptions,
    /// What they are judged by.
    pub clock: FleetClock,
    /// How many retries there may be.
    pub budget: BudgetOptions,
    /// Share of its KV pool from which on an engine gets no new request, (0, 1]; 1 for never.
    pub usage_limit: f64,
    /// Bearer token sent to engines, and to HTTP workers' health and model probes.
    pub worker_token: Option<String>,
    /// How workers are spoken to over TLS.
    pub tls: Arc<ClientTls>,
    /// Name of this gateway in the engines' logs.
    pub gateway_id: String,
    /// Limit of a TCP connect and of each set-up call.
    pub connect_timeout: Duration,
    /// First wait after a lost engine; doubles up to `backoff_max`.
    pub backoff_min: Duration,
    /// Longest wait between two attempts to reach an engine.
    pub backoff_max: Duration,
    /// How often an engine's load is polled.
    pub load_interval: Duration,
    /// How often an HTTP worker's health is polled.
    pub health_interval: Duration,
    /// Failed polls in a row that make an HTTP worker not ready.
    pub health_failures: u32,
    /// Wait before the first poll after a refused connection; doubles up to `health_interval`.
    pub health_retry: Duration,
    /// Idle connections to an HTTP worker are closed after this long.
    pub idle_timeout: Duration,
    /// Idle connections kept for each HTTP worker.
    pub idle_connections: usize,
    /// Default buffer of a request.
    pub buffer: BufferLimits,
    /// Memory of the approximate prompt index for HTTP workers.
    pub text_index_bytes: usize,
    /// How long that index believes a prompt to be cached after its last use.
    pub text_index_ttl: Duration,
    /// Memory of the exact index of engines' blocks.
    pub block_index_bytes: usize,
    /// Seed of the choices among near-equals; absent for one from the operating system.
    pub seed: Option<u64>,
}

impl Default for FleetOptions {
    fn default() -> Self {
        Self {
            policy: PolicyKind::CacheAware,
            model_policies: HashMap::new(),
            model_aliases: HashMap::new(),
            health: HealthOptions::default(),
            clock: FleetClock::default(),
            budget: BudgetOptions::default(),
            usage_limit: 1.0,
            worker_token: None,
            tls: Arc::default(),
            gateway_id: "gateway".to_owned(),
            connect_timeout: Duration::from_secs(5),
            backoff_min: Duration::from_millis(50),
            backoff_max: Duration::from_secs(2),
            load_interval: Duration::from_secs(1),
            health_interval: Duration::from_secs(5),
            health_failures: 2,
            health_retry: Duration::from_millis(250),
            idle_timeout: Duration::from_secs(50),
            idle_connections: 256,
            buffer: BufferLimits::default(),
            text_index_bytes: 64 << 20,
            text_index_ttl: Duration::from_secs(1800),
            block_index_bytes: 512 << 20,
            seed: None,
        }
    }
}

/// Settings of one request to an engine.
#[derive(Debug, Default)]
pub struct SubmitOptions {
    /// Buffer of this request; absent for the fleet's.
    pub buffer: Option<BufferLimits>,
    /// Time left; sent as `deadline_ms` unless the request has one, and enforced here too.
    pub deadline: Option<Duration>,
    /// Held by the stream until it is dropped; its prefill part is released at the first token.
    pub guard: Option<LoadGuard>,
}
