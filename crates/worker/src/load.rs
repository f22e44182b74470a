//! What a worker has on its plate, as this gateway knows it. Held by guards, so it can't leak or go negative.
//!
//! A guard also carries the request's verdict to the worker's record: what it saw of the worker, given once.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use branchline_routing::hinted_tokens;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Notify;

use crate::clock::FleetClock;
use crate::health::{Entry, Health, Phase, Verdict};
use crate::index::Reservation;

/// Counters of one worker; changed by [`LoadGuard`] only.
#[derive(Debug, Default)]
pub(crate) struct Load {
    running: AtomicU64,
    prefill_tokens: AtomicU64,
    /// What running requests are expected to write beyond usual ones, in tokens of prefill.
    hinted: AtomicI64,
    /// Answers that have begun and whose readers wait for the worker, not it for them.
    awaited: AtomicU64,
    /// Microseconds of the fleet's clock at which the first of these began to be awaited.
    awaited_since: AtomicU64,
    /// Requests that the worker reported beyond ours: other gateways'.
    foreign: AtomicU64,
    recent: Recent,
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

    /// What its running requests are worth beyond usual ones, by their clients' word; may be less.
    pub(crate) fn hinted(&self) -> i64 {
        self.hinted.load(Ordering::Relaxed)
    }

    /// Requests of other gateways, as last reported.
    pub(crate) fn foreign(&self) -> u64 {
        self.foreign.load(Ordering::Relaxed)
    }

    /// The worker says how many requests it has in all.
    pub(crate) fn reported(&self, all: u64) {
        self.foreign.store(all.saturating_sub(self.running()), Ordering::Relaxed);
    }

    /// Prompt tokens sent to it lately.
    pub(crate) fn recent(&self, now: Duration) -> u64 {
        self.recent.read(now) as u64
    }

    /// A prompt of so many tokens goes there.
    pub(crate) fn sent(&self, tokens: u64, now: Duration) {
        self.recent.add(tokens as f32, now);
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

    /// Answers that have begun and whose next piece is the worker's to bring.
    pub(crate) fn awaited(&self) -> u64 {
        self.awaited.load(Ordering::Relaxed)
    }

    /// How long one of them at least has been awaited without a break: a silence before that was nobody's loss.
    pub(crate) fn awaited_for(&self, now: Duration) -> Duration {
        now.saturating_sub(Duration::from_micros(self.awaited_since.load(Ordering::Relaxed)))
    }

    fn await_more(&self, now: Duration) {
        if self.awaited.fetch_add(1, Ordering::Relaxed) == 0 {
            let micros = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
            self.awaited_since.store(micros, Ordering::Relaxed);
        }
    }

    /// Uncached prompt tokens of requests without a first token yet.
    pub(crate) fn prefill_tokens(&self) -> u64 {
        self.prefill_tokens.load(Ordering::Relaxed)
    }
}

/// A sum that halves every minute: the sum in the upper half, in the lower one the milliseconds of its last change.
#[derive(Debug, Default)]
struct Recent(AtomicU64);

impl Recent {
    const HALF_LIFE_MS: f32 = 60_000.0;

    fn read(&self, now: Duration) -> f32 {
        Self::faded(self.0.load(Ordering::Relaxed), now)
    }

    fn add(&self, more: f32, now: Duration) {
        let grown = |packed| {
            let sum = Self::faded(packed, now) + more;
            Some(u64::from(sum.to_bits()) << 32 | u64::from(now.as_millis() as u32))
        };
        // The closure never declines.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown);
    }

    fn faded(packed: u64, now: Duration) -> f32 {
        // Wraps after 49 days: a worker idle for longer counts as just used, for a minute.
        let age = (now.as_millis() as u32).wrapping_sub(packed as u32);
        // Another thread may have read a later clock.
        let age = if age > u32::MAX / 2 { 0 } else { age };
        f32::from_bits((packed >> 32) as u32) * (-(age as f32) / Self::HALF_LIFE_MS).exp2()
    }
}

/// A worker's record as its requests reach it.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub(crate) url: Arc<str>,
    pub(crate) health: Arc<Health>,
    pub(crate) clock: FleetClock,
}

/// How long a request waits for its first byte before its worker is asked about; see [`crate::Fleet::judge`].
#[derive(Debug, Clone)]
pub struct Watch {
    pub(crate) record: Record,
    pub(crate) chosen: Duration,
    pub(crate) patience: Duration,
}

impl Watch {
    /// How long after the choice to ask for the first time.
    pub fn patience(&self) -> Duration {
        self.patience
    }
}

/// One request on a worker's count, from its choice to the last byte. Dropping it takes the request off.
#[derive(Debug)]
#[must_use = "dropping the guard takes the request off the worker's load"]
pub struct LoadGuard {
    load: Arc<Load>,
    record: Record,
    /// Its place in the record, until its verdict is given.
    entry: Option<Entry>,
    prefill: u64,
    hinted: i64,
    /// Prompt tokens to be computed until its first one: its own and those before it.
    ahead: u64,
    chosen: Duration,
    patience: Option<Duration>,
    begun: bool,
    /// Counted as an answer whose next piece is awaited.
    awaits: bool,
    /// Its first byte depends on another worker's: it says nothing of how fast this one is.
    waits: bool,
    /// Blocks this request will bring; released with the guard.
    reservation: Option<Reservation>,
}

impl LoadGuard {
    /// Counts a request with `prefill` uncached prompt tokens. `patience` is how long its first byte may take.
    pub(crate) fn new(
        load: Arc<Load>,
        record: Record,
        entry: Entry,
        prefill: u64,
        patience: Option<Duration>,
        reservation: Option<Reservation>,
    ) -> Self {
        load.running.fetch_add(1, Ordering::Relaxed);
        let ahead = load.prefill_tokens.fetch_add(prefill, Ordering::Relaxed) + prefill;
        load.gauge.inc();
        let chosen = record.clock.now();
        Self {
            load,
            record,
            entry: Some(entry),
            prefill,
            hinted: 0,
            ahead,
            chosen,
            patience,
            begun: false,
            awaits: false,
            waits: false,
            reservation,
        }
    }

    /// Its client expects so many tokens of output: it counts for as much until it ends.
    pub(crate) fn expects(&mut self, tokens: u32) {
        let hinted = hinted_tokens(tokens);
        self.load.hinted.fetch_add(hinted - self.hinted, Ordering::Relaxed);
        self.hinted = hinted;
    }

    /// What to ask [`crate::Fleet::judge`] with while no byte has come; `None` if the worker is not judged by time.
    pub fn watch(&self) -> Option<Watch> {
        let patience = self.patience.filter(|_| !self.begun && !self.waits)?;
        Some(Watch { record: self.record.clone(), chosen: self.chosen, patience })
    }

    /// The worker can't begin before another one has computed the prompt, so its silence is not its own, and of the
    /// prompt there is hardly anything for it to do.
    pub(crate) fn waits_for_another(&mut self) {
        self.waits = true;
        self.load.prefill_tokens.fetch_sub(std::mem::take(&mut self.prefill), Ordering::Relaxed);
    }

    /// What it waited for is there: from now on its silence is its own.
    pub fn waits_no_longer(&mut self) {
        self.chosen = self.record.clock.now();
        self.waits = false;
        self.ahead = 0;
    }

    /// The prompt is computed (first token or first body byte seen): its prefill no longer counts.
    pub fn prefilled(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            let now = self.record.clock.now();
            match self.waits {
                true => self.record.health.heard(now),
                false => self.record.health.begun(now, self.ahead, now.saturating_sub(self.chosen)),
            }
        }
        self.unburden();
    }

    /// More of the answer came.
    pub fn progressed(&mut self) {
        self.record.health.heard(self.record.clock.now());
        self.rests();
    }

    /// The reader waits for more of an answer that has begun: a silence is the worker's from now on.
    pub fn awaits(&mut self) {
        if self.begun && !std::mem::replace(&mut self.awaits, true) {
            self.load.await_more(self.record.clock.now());
        }
    }

    fn rests(&mut self) {
        if std::mem::take(&mut self.awaits) {
            self.load.awaited.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Gives the verdict on the worker; the first one counts, and none is [`Verdict::Neutral`].
    pub fn settle(&mut self, verdict: Verdict) {
        let Some(entry) = self.entry.take() else { return };
        let turned = self.record.health.settle(entry, verdict, self.record.clock.now());
        match turned {
            Some(Phase::Open) => {
                tracing::warn!(worker = %self.record.url, "breaker opened: the worker fails")
            }
            Some(Phase::Closed) => {
                tracing::info!(worker = %self.record.url, "breaker closed: the worker answers")
            }
            Some(Phase::HalfOpen) | None => {}
        }
    }

    /// The worker asked to be left alone for so long.
    pub fn rest(&self, time: Duration) {
        self.record.health.rest(time, self.record.clock.now());
    }

    fn unburden(&mut self) {
        self.load.prefill_tokens.fetch_sub(std::mem::take(&mut self.prefill), Ordering::Relaxed);
        self.reservation = None;
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        self.settle(Verdict::Neutral);
        self.unburden();
        self.rests();
        self.load.hinted.fetch_sub(self.hinted, Ordering::Relaxed);
        self.load.gauge.dec();
        if self.load.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.load.idle.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::HealthOptions;

    fn guard(load: &Arc<Load>, health: &Arc<Health>, prefill: u64) -> LoadGuard {
        let record = Record { url: "w".into(), health: health.clone(), clock: FleetClock::default() };
        let entry = health.enter(record.clock.now()).unwrap();
        LoadGuard::new(load.clone(), record, entry, prefill, None, None)
    }

    #[test]
    fn tokens_sent_lately_halve_every_minute() {
        let (load, second) = (Load::default(), Duration::from_secs(1));
        assert_eq!(load.recent(second), 0);
        load.sent(1000, second);
        load.sent(600, second * 61);
        assert_eq!((load.recent(second * 61), load.recent(second * 121)), (1100, 550));
        assert_eq!(load.recent(second * 60), 1100, "a clock that is behind");
    }

    #[tokio::test]
    async fn load_returns_to_zero_whatever_the_order_of_ends() {
        let (load, health) = (Arc::new(Load::default()), Arc::new(Health::new(HealthOptions::default())));
        let mut first = guard(&load, &health, 100);
        let mut second = guard(&load, &health, 50);
        second.expects(10);
        second.expects(1024);
        assert_eq!(load.hinted(), 192, "the last word counts");
        assert_eq!((load.running(), load.prefill_tokens()), (2, 150));
        first.prefilled();
        first.prefilled();
        assert_eq!((load.running(), load.prefill_tokens()), (2, 50));
        drop(second);
        drop(first);
        assert_eq!((load.running(), load.prefill_tokens(), load.gauge.get(), load.hinted()), (0, 0, 0, 0));
    }

    #[tokio::test]
    async fn a_silence_counts_from_when_a_reader_waits() {
        let (load, health) = (Arc::new(Load::default()), Arc::new(Health::new(HealthOptions::default())));
        let mut guard = guard(&load, &health, 1);
        guard.awaits();
        assert_eq!(load.awaited(), 0, "its first byte is judged elsewhere");
        guard.prefilled();
        load.await_more(Duration::from_secs(7));
        load.await_more(Duration::from_secs(8));
        assert_eq!(load.awaited_for(Duration::from_secs(9)), Duration::from_secs(2));
        load.awaited.store(0, Ordering::Relaxed);
        guard.awaits();
        guard.awaits();
        assert_eq!(load.awaited(), 1);
        guard.progressed();
        assert_eq!(load.awaited(), 0, "a piece came");
        guard.awaits();
        drop(guard);
        assert_eq!(load.awaited(), 0);
    }

    #[tokio::test]
    async fn the_first_verdict_counts_and_a_probe_that_is_dropped_gives_its_place_back() {
        let (load, health) = (Arc::new(Load::default()), Arc::new(Health::new(HealthOptions::default())));
        for _ in 0..5 {
            let mut guard = guard(&load, &health, 1);
            guard.settle(Verdict::Failure);
            guard.settle(Verdict::Success);
        }
        let now = FleetClock::default().now();
        assert_eq!(health.breaker.phase(now), Phase::Open);
        let late = now + Duration::from_secs(11);
        let probe = health.enter(late).unwrap();
        assert!(health.enter(late).is_none());
        health.settle(probe, Verdict::Neutral, late);
        assert!(health.enter(late).is_some());
    }
}
