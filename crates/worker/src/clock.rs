//! The fleet's clock: time since the fleet was made, on tokio's time, so that tests can advance it.

use std::time::Duration;

use tokio::time::Instant;

/// Time since the fleet was made. Cheap to copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FleetClock(Instant);

impl Default for FleetClock {
    fn default() -> Self {
        // Zero means "never" in records of health, so time begins a little later.
        Self(Instant::now().checked_sub(Duration::from_millis(1)).unwrap_or_else(Instant::now))
    }
}

impl FleetClock {
    pub(crate) fn now(self) -> Duration {
        self.0.elapsed()
    }
}
