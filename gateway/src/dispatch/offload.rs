//! CPU work off the I/O threads: at most one job a core runs, the others wait, and small ones run in place.

use branchline_core::{Error, Result};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

/// Work on at most this many bytes takes less time than handing it over.
const INLINE_BYTES: usize = 2048;

/// The bounded pool.
#[derive(Debug)]
pub struct Offload {
    slots: Semaphore,
    tracker: TaskTracker,
}

impl Offload {
    /// A pool of as many slots as cores, whose tasks belong to `tracker`.
    pub fn new(tracker: TaskTracker) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { slots: Semaphore::new(cores), tracker }
    }

    /// Runs `work` over `bytes` of input. If the caller goes away while waiting, the work never starts.
    ///
    /// # Errors
    /// What `work` answers; `Internal` if it panicked.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if bytes <= INLINE_BYTES {
            return work();
        }
        let _slot = self.slots.acquire().await.map_err(|_| Error::internal("the work pool is closed"))?;
        match self.tracker.spawn_blocking(work).await {
            Ok(outcome) => outcome,
            Err(error) => Err(Error::internal(format!("text work failed: {error}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[tokio::test]
    async fn small_work_stays_and_large_work_leaves_the_thread() {
        let pool = Offload::new(TaskTracker::new());
        let here = thread::current().id();
        assert_eq!(pool.run(10, || Ok(thread::current().id())).await, Ok(here));
        assert_ne!(pool.run(INLINE_BYTES + 1, || Ok(thread::current().id())).await, Ok(here));
    }

    #[tokio::test]
    async fn a_panic_costs_only_its_own_request() {
        let pool = Offload::new(TaskTracker::new());
        let error = pool.run::<()>(1 << 20, || panic!("boom")).await.unwrap_err();
        assert_eq!(error.code, branchline_core::ErrorCode::Internal);
        assert_eq!(pool.run(1 << 20, || Ok(7)).await, Ok(7));
    }
}
