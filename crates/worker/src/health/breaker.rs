//! When a worker that fails gets no requests, and how it comes back. Pure: the time comes as an argument.
//!
//! Closed → open after failures in a row or a share of the last ones → half-open after a wait, with one probe at a
//! time → closed after successes in a row, or open again at the first failure.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// When a breaker opens and closes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BreakerOptions {
    /// Failures in a row that open it; 0 never opens it.
    pub failures: u32,
    /// Share of failures among the last [`Self::window`] outcomes that opens it, (0, 1].
    pub share: f64,
    /// Outcomes that the share is taken of, at most 64.
    pub window: u32,
    /// How long it stays open before a probe.
    pub open: Duration,
    /// Successes in a row that close it.
    pub successes: u32,
}

impl Default for BreakerOptions {
    fn default() -> Self {
        Self { failures: 5, share: 0.5, window: 20, open: Duration::from_secs(10), successes: 2 }
    }
}

/// Where a breaker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Requests pass.
    Closed,
    /// None passes.
    Open,
    /// One probe at a time passes.
    HalfOpen,
}

impl Phase {
    /// The name on admin pages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

/// What a request says of its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It answered as it should.
    Success,
    /// It failed.
    Failure,
    /// Nothing: the client left, was wrong, or was asked to come back later.
    Neutral,
}

/// A request's place at a breaker; its verdict is given back with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    round: u64,
    probe: bool,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Rises with each change of phase: verdicts of an earlier one say nothing of this one.
    round: u64,
    in_row: u32,
    /// Latest outcomes, the newest in bit 0; a one is a failure.
    recent: u64,
    seen: u32,
    until: Duration,
    probing: bool,
}

/// One worker's breaker.
#[derive(Debug)]
pub(crate) struct Breaker {
    options: BreakerOptions,
    /// Spares the lock while all is well.
    closed: AtomicBool,
    state: Mutex<State>,
}

impl Breaker {
    pub(crate) fn new(options: BreakerOptions) -> Self {
        let state = State {
            phase: Phase::Closed,
            round: 0,
            in_row: 0,
            recent: 0,
            seen: 0,
            until: Duration::ZERO,
            probing: false,
        };
        Self { options, closed: AtomicBool::new(true), state: Mutex::new(state) }
    }

    /// Where it stands; open becomes half-open by time alone.
    pub(crate) fn phase(&self, now: Duration) -> Phase {
        if self.closed.load(Ordering::Acquire) {
            return Phase::Closed;
        }
        let state = self.state.lock();
        match state.phase {
            Phase::Open if now >= state.until => Phase::HalfOpen,
            phase => phase,
        }
    }

    /// Whether a request would be let in now.
    pub(crate) fn admits(&self, now: Duration) -> bool {
        if self.closed.load(Ordering::Acquire) {
            return true;
        }
        let state = self.state.lock();
        match state.phase {
            Phase::Closed => true,
            Phase::Open => now >= state.until,
            Phase::HalfOpen => !state.probing,
        }
    }

    /// Share of failures among the last outcomes; `None` unless it is closed and has seen a whole window.
    pub(crate) fn failing(&self) -> Option<f64> {
        let window = self.options.window.clamp(1, 64);
        let state = self.state.lock();
        let known = state.phase == Phase::Closed && state.seen == window;
        known.then(|| f64::from(state.recent.count_ones()) / f64::from(window))
    }

    /// Closes it, as if it were new.
    pub(crate) fn reset(&self) {
        self.state.lock().turn(Phase::Closed);
        self.closed.store(true, Ordering::Release);
    }

    /// Forgets the outcomes of a closed breaker.
    pub(crate) fn forget(&self) {
        let mut state = self.state.lock();
        if state.phase == Phase::Closed {
            state.turn(Phase::Closed);
        }
    }

    /// Until a probe may pass, from now on.
    pub(crate) fn wait(&self, now: Duration) -> Duration {
        let state = self.state.lock();
        match state.phase {
            Phase::Open => state.until.saturating_sub(now),
            Phase::Closed | Phase::HalfOpen => Duration::ZERO,
        }
    }

    /// Lets a request in, as the probe if the breaker is half-open; `None` if it must go elsewhere.
    pub(crate) fn enter(&self, now: Duration) -> Option<Ticket> {
        let mut state = self.state.lock();
        match state.phase {
            Phase::Closed => Some(Ticket { round: state.round, probe: false }),
            Phase::Open if now < state.until => None,
            Phase::HalfOpen if state.probing => None,
            Phase::Open | Phase::HalfOpen => {
                if state.phase == Phase::Open {
                    state.turn(Phase::HalfOpen);
                }
                state.probing = true;
                Some(Ticket { round: state.round, probe: true })
            }
        }
    }

    /// Takes a verdict; answers the phase it led to, if that is a new one.
    pub(crate) fn settle(&self, ticket: Ticket, verdict: Verdict, now: Duration) -> Option<Phase> {
        if verdict == Verdict::Neutral && !ticket.probe {
            return None;
        }
        let mut state = self.state.lock();
        if ticket.round != state.round {
            return None;
        }
        let before = state.phase;
        match state.phase {
            Phase::Closed => self.count(&mut state, verdict, now),
            Phase::HalfOpen if ticket.probe => self.probed(&mut state, verdict, now),
            Phase::HalfOpen | Phase::Open => {}
        }
        self.closed.store(state.phase == Phase::Closed, Ordering::Release);
        (state.phase != before).then_some(state.phase)
    }

    fn count(&self, state: &mut State, verdict: Verdict, now: Duration) {
        let failed = verdict == Verdict::Failure;
        let window = self.options.window.clamp(1, 64);
        let mask = u64::MAX >> (64 - window);
        state.recent = (state.recent << 1 | u64::from(failed)) & mask;
        state.seen = (state.seen + 1).min(window);
        state.in_row = if failed { state.in_row + 1 } else { 0 };
        if !failed || self.options.failures == 0 {
            return;
        }
        let share = f64::from(state.recent.count_ones()) / f64::from(window);
        let often = state.seen == window && share >= self.options.share;
        if often || state.in_row >= self.options.failures {
            state.turn(Phase::Open);
            state.until = now + self.options.open;
        }
    }

    fn probed(&self, state: &mut State, verdict: Verdict, now: Duration) {
        state.probing = false;
        match verdict {
            Verdict::Neutral => {}
            Verdict::Success => {
                state.in_row += 1;
                if state.in_row >= self.options.successes.max(1) {
                    state.turn(Phase::Closed);
                }
            }
            Verdict::Failure => {
                state.turn(Phase::Open);
                state.until = now + self.options.open;
            }
        }
    }
}

impl State {
    fn turn(&mut self, phase: Phase) {
        self.phase = phase;
        self.round += 1;
        (self.in_row, self.recent, self.seen, self.probing) = (0, 0, 0, false);
    }
}

#[cfg(test)]
mod tests;
