//! What requests teach of one worker: breaker, pace, doubt, rest and warm-up. No I/O and no clock of its own.
//!
//! The breaker shuts a worker out. Doubt, rest and ejection only put it behind its peers: it is still asked when
//! nobody else is left. Health checks of the transport are elsewhere ([`crate::worker::Status`]).

mod breaker;
mod budget;
mod outlier;
mod pace;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

pub(crate) use breaker::{Breaker, Ticket};
pub use breaker::{BreakerOptions, Phase, Verdict};
pub use budget::{BudgetOptions, RetryBudget};
pub use outlier::OutlierOptions;
pub(crate) use outlier::review;
pub(crate) use pace::Pace;

/// How a worker is judged by what its requests see.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HealthOptions {
    /// When failures shut it out.
    pub breaker: BreakerOptions,
    /// How long a worker that has become ready gets less than its share.
    pub slow_start: Duration,
    /// Least silence that puts it in doubt; absent for never.
    pub suspect_after: Option<Duration>,
    /// Times the predicted wait for the first byte that are added to it.
    pub suspect_factor: f64,
    /// How long a worker in doubt waits for its probe.
    pub suspect_for: Duration,
    /// When a worker that fails more than its peers is put aside.
    pub outlier: OutlierOptions,
}

impl Default for HealthOptions {
    fn default() -> Self {
        Self {
            breaker: BreakerOptions::default(),
            slow_start: Duration::from_secs(10),
            suspect_after: Some(Duration::from_millis(500)),
            suspect_factor: 2.0,
            suspect_for: Duration::from_secs(10),
            outlier: OutlierOptions::default(),
        }
    }
}

/// Whether a worker should get a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stand {
    /// Never: its breaker is open, or its probe is out.
    Shut,
    /// Only if no worker is well: in doubt, resting or ejected.
    Aside,
    /// As any other.
    Well,
}

/// Silence that a first byte elsewhere on the worker does not excuse, in units of a request's patience.
const HOPELESS: u32 = 4;
/// Share of its traffic that a worker gets when it has just become ready.
const COLD_SHARE: f64 = 0.1;

#[derive(Debug, Default)]
struct Doubt {
    until: Duration,
    probing: bool,
    /// Tokens flow, but no request begins: only a first byte ends this doubt.
    starving: bool,
}

/// One worker's record. Times are on the fleet's clock.
#[derive(Debug)]
pub(crate) struct Health {
    pub(crate) options: HealthOptions,
    pub(crate) breaker: Breaker,
    pub(crate) pace: Pace,
    /// Microseconds of the latest byte of any answer, and of the latest first one.
    heard: AtomicU64,
    begun: AtomicU64,
    ready_since: AtomicU64,
    rest_until: AtomicU64,
    pub(crate) ejected_until: AtomicU64,
    /// A failure was counted since the last review of outliers.
    pub(crate) failed: AtomicBool,
    in_doubt: AtomicBool,
    doubt: Mutex<Doubt>,
}

/// A request's place in the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    ticket: Ticket,
    /// It is the one request that may end a doubt.
    probes_doubt: bool,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Health {
    pub(crate) fn new(options: HealthOptions) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            options,
            breaker: Breaker::new(options.breaker),
            pace: Pace::default(),
            heard: zero(),
            begun: zero(),
            ready_since: zero(),
            rest_until: zero(),
            ejected_until: zero(),
            failed: AtomicBool::new(false),
            in_doubt: AtomicBool::new(false),
            doubt: Mutex::default(),
        }
    }

    /// Whether it should get a request now.
    pub(crate) fn stand(&self, now: Duration) -> Stand {
        if !self.breaker.admits(now) {
            return Stand::Shut;
        }
        let at = micros(now);
        let later = |until: &AtomicU64| at < until.load(Ordering::Relaxed);
        if later(&self.rest_until) || later(&self.ejected_until) {
            return Stand::Aside;
        }
        if self.in_doubt.load(Ordering::Acquire) {
            let doubt = self.doubt.lock();
            if doubt.probing || now < doubt.until {
                return Stand::Aside;
            }
        }
        Stand::Well
    }

    /// Lets a request in; `None` if another one has just become the probe.
    pub(crate) fn enter(&self, now: Duration) -> Option<Entry> {
        let ticket = self.breaker.enter(now)?;
        let mut probes_doubt = false;
        if self.in_doubt.load(Ordering::Acquire) {
            let mut doubt = self.doubt.lock();
            if now >= doubt.until && !doubt.probing {
                doubt.probing = true;
                probes_doubt = true;
            }
        }
        Some(Entry { ticket, probes_doubt })
    }

    /// Takes a request's verdict; answers the breaker's phase if it changed.
    pub(crate) fn settle(&self, entry: Entry, verdict: Verdict, now: Duration) -> Option<Phase> {
        if entry.probes_doubt {
            let mut doubt = self.doubt.lock();
            doubt.probing = false;
            // Whoever was let go without a byte leaves the doubt as it was.
            doubt.until = now + self.options.suspect_for;
        }
        if verdict == Verdict::Failure {
            self.failed.store(true, Ordering::Release);
        }
        self.breaker.settle(entry.ticket, verdict, now)
    }

    /// A byte of an answer came.
    pub(crate) fn heard(&self, now: Duration) {
        self.heard.store(micros(now), Ordering::Relaxed);
        if self.in_doubt.load(Ordering::Relaxed) && !self.doubt.lock().starving {
            self.in_doubt.store(false, Ordering::Release);
        }
    }

    /// The first byte of an answer came, with `tokens` of prompt work before it, `took` after its choice.
    pub(crate) fn begun(&self, now: Duration, tokens: u64, took: Duration) {
        self.pace.observe(tokens, took);
        self.begun.store(micros(now), Ordering::Relaxed);
        self.heard.store(micros(now), Ordering::Relaxed);
        self.in_doubt.store(false, Ordering::Release);
    }

    /// How long an answer that has begun may be silent while `ahead` tokens of other prompts are computed; `None` if
    /// that is not judged.
    pub(crate) fn stall_limit(&self, ahead: u64) -> Option<Duration> {
        let least = self.options.suspect_after? * 2;
        match ahead {
            0 => Some(least),
            // A long prompt may hold up every stream of its worker.
            ahead => Some(least + self.pace.predict(ahead)?.mul_f64(self.options.suspect_factor)),
        }
    }

    /// How long no byte has come.
    pub(crate) fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(Duration::from_micros(self.heard.load(Ordering::Relaxed)))
    }

    /// Whether a byte came after `since`.
    pub(crate) fn has_moved(&self, since: Duration) -> bool {
        self.heard.load(Ordering::Relaxed) > micros(since)
    }

    /// How much longer a request chosen at `chosen` may wait for its first byte before its worker is in doubt; zero
    /// once it is.
    pub(crate) fn patience_left(&self, chosen: Duration, patience: Duration, now: Duration) -> Duration {
        if self.is_in_doubt() {
            return patience.saturating_sub(now.saturating_sub(chosen));
        }
        let from = |time: &AtomicU64| Duration::from_micros(time.load(Ordering::Relaxed)).max(chosen);
        let silent = (from(&self.heard) + patience).saturating_sub(now);
        let starving = (from(&self.begun) + patience * HOPELESS).saturating_sub(now);
        silent.min(starving)
    }

    /// Puts the worker in doubt; whether that is news.
    pub(crate) fn suspect(&self, patience: Duration, now: Duration) -> bool {
        let mut doubt = self.doubt.lock();
        if self.in_doubt.swap(true, Ordering::AcqRel) {
            return false;
        }
        let heard = Duration::from_micros(self.heard.load(Ordering::Relaxed));
        let starving = now.saturating_sub(heard) < patience;
        *doubt = Doubt { until: now + self.options.suspect_for, probing: false, starving };
        true
    }

    /// Whether it is in doubt.
    pub(crate) fn is_in_doubt(&self) -> bool {
        self.in_doubt.load(Ordering::Acquire)
    }

    /// The worker asked to be left alone for so long.
    pub(crate) fn rest(&self, time: Duration, now: Duration) {
        let time = time.min(Duration::from_secs(60));
        self.rest_until.fetch_max(micros(now + time), Ordering::Relaxed);
    }

    /// A new process answers at its address: failures and doubts of the old one are void.
    pub(crate) fn renew(&self) {
        self.breaker.reset();
        self.in_doubt.store(false, Ordering::Release);
        self.rest_until.store(0, Ordering::Relaxed);
        self.ejected_until.store(0, Ordering::Relaxed);
    }

    /// It has become ready: its cache and connections are cold.
    pub(crate) fn warm_up(&self, now: Duration) {
        self.ready_since.store(micros(now), Ordering::Relaxed);
    }

    /// The part of its share that it should get, (0, 1].
    pub(crate) fn share(&self, now: Duration) -> f64 {
        let whole = self.options.slow_start.as_secs_f64();
        if whole == 0.0 {
            return 1.0;
        }
        let since = Duration::from_micros(self.ready_since.load(Ordering::Relaxed));
        let part = now.saturating_sub(since).as_secs_f64() / whole;
        (COLD_SHARE + (1.0 - COLD_SHARE) * part).min(1.0)
    }

    /// A word for admin pages.
    pub(crate) fn word(&self, now: Duration) -> &'static str {
        let at = micros(now);
        match self.breaker.phase(now) {
            Phase::Open => "broken",
            Phase::HalfOpen => "probing",
            Phase::Closed if self.is_in_doubt() => "suspected",
            Phase::Closed if at < self.ejected_until.load(Ordering::Relaxed) => "ejected",
            Phase::Closed if at < self.rest_until.load(Ordering::Relaxed) => "resting",
            Phase::Closed => "well",
        }
    }
}

#[cfg(test)]
mod tests;
