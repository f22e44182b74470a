//! The fleet's clock. Tests bring one that they move themselves.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Clock, SystemClock};

/// Zero means "never" in records of health, so time begins a little later.
const BEGIN: Duration = Duration::from_millis(1);

/// Time since the fleet was made. Cheap to clone.
#[derive(Clone)]
pub struct FleetClock(Arc<dyn Clock>);

impl FleetClock {
    /// A fleet's time by another clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self(clock)
    }

    pub(crate) fn now(&self) -> Duration {
        BEGIN + self.0.now()
    }
}

impl Default for FleetClock {
    fn default() -> Self {
        Self(Arc::new(SystemClock::default()))
    }
}

impl fmt::Debug for FleetClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FleetClock").field(&self.now()).finish()
    }
}
