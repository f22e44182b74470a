//! What a worker has on its plate, as this gateway knows it. Held by guards, so it can't leak or go negative.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Notify;

use crate::index::Reservation;

/// Counters of one worker; changed by [`LoadGuard`] only.
#[derive(Debug, Default)]
pub(crate) struct Load {
    running: AtomicU64,
    prefill_tokens: AtomicU64,
    gauge: Gauge,
    /// Told when `running` has come to zero.
    idle: Notify,
}

impl Load {
    /// Counters that are also shown by `gauge`.
    pub(crate) fn new(gauge: Gauge) -> Self {
        Self { gauge, ..Self::default() }
    }

    /// Requests from choice to last byte.
    pub(crate) fn running(&self) -> u64 {
        self.running.load(Ordering::Relaxed)
    }

    /// Completes when no request is left.
    pub(crate) async fn drained(&self) {
        loop {
            let told = self.idle.notified();
            if self.running() == 0 {
                return;
            }
            told.await;
        }
    }

    /// Uncached prompt tokens of requests without a first token yet.
    pub(crate) fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens.load(Ordering::Relaxed)
    }
}

/// One request on a worker's count, from its choice to the last byte. Dropping it takes the request off.
#[derive(Debug)]
#[must_use = "dropping the guard takes the request off the worker's load"]
pub struct LoadGuard {
    load: Arc<Load>,
    prefill: u64,
    /// Blocks this request will bring; released with the guard.
    reservation: Option<Reservation>,
}

impl LoadGuard {
    /// Counts a request with `prefill` uncached prompt tokens.
    pub(crate) fn new(load: Arc<Load>, prefill: u64, reservation: Option<Reservation>) -> Self {
        load.running.fetch_add(1, Ordering::Relaxed);
        load.prefill_tokens.fetch_add(prefill, Ordering::Relaxed);
        load.gauge.inc();
        Self { load, prefill, reservation }
    }

    /// The prompt is computed (first token or first body byte seen): its prefill no longer counts.
    pub fn prefilled(&mut self) {
        self.load.prefill_tokens.fetch_sub(std::mem::take(&mut self.prefill), Ordering::Relaxed);
        self.reservation = None;
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.prefilled();
        self.load.gauge.dec();
        if self.load.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.load.idle.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_returns_to_zero_whatever_the_order_of_ends() {
        let load = Arc::new(Load::default());
        let mut first = LoadGuard::new(load.clone(), 100, None);
        let second = LoadGuard::new(load.clone(), 50, None);
        assert_eq!((load.running(), load.prefill_tokens()), (2, 150));
        first.prefilled();
        first.prefilled();
        assert_eq!((load.running(), load.prefill_tokens()), (2, 50));
        drop(second);
        drop(first);
        assert_eq!((load.running(), load.prefill_tokens(), load.gauge.get()), (0, 0, 0));
    }
}
