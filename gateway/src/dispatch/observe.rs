//! What dispatch counts. Times and statuses are counted at the gate, before all routes.

use std::sync::Arc;

use branchline_core::Error;
use branchline_telemetry::Metrics;

use super::{End, PromptFound};

/// Counts an error that a client sees, as an answer or as an event.
pub fn failed(metrics: &Metrics, error: &Error) {
    metrics.errors.with([error.code.name()]).inc();
}

/// The counters of one job.
#[derive(Debug)]
pub(super) struct Observer {
    metrics: Arc<Metrics>,
}

impl Observer {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics }
    }

    pub(super) fn chosen(&self, predicted: u32) {
        self.metrics.predicted_cached_tokens.with([""; 0]).inc_by(predicted.into());
    }

    pub(super) fn retried(&self, reason: &'static str) {
        self.metrics.retries.with([reason]).inc();
    }

    /// What the worker says of the prompt, beside what was predicted of its cached tokens.
    pub(super) fn prompt(&self, found: PromptFound, predicted: u32) {
        self.metrics.prediction_error.with([""; 0]).inc_by(found.cached.abs_diff(predicted).into());
        self.metrics.prompt_tokens.with([""; 0]).inc_by(found.tokens.into());
        self.metrics.cached_tokens.with([""; 0]).inc_by(found.cached.into());
    }

    /// A sequence ended.
    pub(super) fn ended(&self, end: &End) {
        self.metrics.completion_tokens.with([""; 0]).inc_by(end.completion_tokens.into());
        if let Some(told) = end.timings {
            let parts = [
                ("queue", told.queue_ms),
                ("prefill", told.prefill_ms),
                ("decode", told.decode_ms),
                ("detokenize", told.detokenise_ms),
            ];
            for (part, ms) in parts {
                self.metrics.part_seconds.with([part]).observe(ms / 1e3);
            }
        }
    }

    /// The job ends before its answer did.
    pub(super) fn abandoned(&self, shutdown: bool) {
        self.metrics.aborts.with([if shutdown { "shutdown" } else { "client" }]).inc();
    }
}
