//! Time as an argument: policies and health take a [`Clock`], tests advance one of their own.

use std::time::{Duration, Instant};

/// A monotonic clock.
pub trait Clock: Send + Sync + 'static {
    /// Time since an arbitrary fixed point.
    fn now(&self) -> Duration;
}

/// The machine's monotonic clock, counted from its construction.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    origin: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}
