//! CPU work off the I/O threads: at most one job a core runs, the others wait, and small ones run in place.
//!
//! Work takes many times its input in memory, so the input of all large jobs that run is bounded, too.

use std::sync::Arc;

use branchline_core::{Error, Result};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// Work on at most this many bytes takes less time than handing it over.
const INLINE_BYTES: usize = 2048;

/// Jobs up to this size need no share of the budget, so that they never wait for a large one to get its.
const SMALL_BYTES: usize = 256 << 10;
/// Input of the larger jobs that run at once, in KiB; one that is larger still runs alone. Tokenising takes up to
/// 40 times its input.
const BUDGET_KIB: u32 = 32 << 10;

/// The bounded pool.
#[derive(Debug)]
pub struct Offload {
    slots: Arc<Semaphore>,
    budget: Arc<Semaphore>,
    tracker: TaskTracker,
}

/// What a job holds until it has ended, also if its caller has gone.
type Permits = (Option<OwnedSemaphorePermit>, OwnedSemaphorePermit);

impl Offload {
    /// A pool of as many slots as cores, whose tasks belong to `tracker`.
    pub fn new(tracker: TaskTracker) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self::with_slots(cores, tracker)
    }

    fn with_slots(slots: usize, tracker: TaskTracker) -> Self {
        let budget = Arc::new(Semaphore::new(BUDGET_KIB as usize));
        Self { slots: Arc::new(Semaphore::new(slots)), budget, tracker }
    }

    /// Runs `work` over `bytes` of input. If the caller goes away before it has started, it never starts; if
    /// later, it runs to its end and keeps its slot until then.
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
        let permits = self.admit(bytes).await.map_err(|_| Error::internal("the work pool is closed"))?;
        let handle = self.tracker.spawn_blocking(move || {
            let _permits = permits;
            work()
        });
        match AbortOnDropHandle::new(handle).await {
            Ok(outcome) => outcome,
            Err(error) => Err(Error::internal(format!("text work failed: {error}"))),
        }
    }

    /// Budget comes before a slot: who waits for it holds no core.
    async fn admit(&self, bytes: usize) -> std::result::Result<Permits, AcquireError> {
        let share = if bytes > SMALL_BYTES {
            let kib = u32::try_from(bytes / 1024).unwrap_or(u32::MAX).min(BUDGET_KIB);
            Some(Arc::clone(&self.budget).acquire_many_owned(kib).await?)
        } else {
            None
        };
        Ok((share, Arc::clone(&self.slots).acquire_owned().await?))
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
    /// A job that runs until `end` is dropped, and has begun.
    async fn held(
        pool: &Arc<Offload>,
        bytes: usize,
    ) -> (tokio::task::JoinHandle<Result<()>>, std::sync::mpsc::Sender<()>) {
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let (end, ended) = std::sync::mpsc::channel();
        let own = Arc::clone(pool);
        let job = tokio::spawn(async move {
            let work = move || {
                let _ = begun.send(());
                let _ = ended.recv();
                Ok(())
            };
            own.run(bytes, work).await
        });
        has_begun.await.unwrap();
        (job, end)
    }

    #[tokio::test]
    async fn a_job_keeps_its_slot_when_its_caller_leaves() {
        let pool = Arc::new(Offload::with_slots(1, TaskTracker::new()));
        let (job, end) = held(&pool, SMALL_BYTES).await;
        job.abort();
        assert!(job.await.unwrap_err().is_cancelled());
        assert_eq!(pool.slots.available_permits(), 0);
        drop(end);
        assert_eq!(pool.run(SMALL_BYTES, || Ok(7)).await, Ok(7));
    }

    #[test]
    fn a_job_whose_caller_left_before_it_started_never_starts() {
        // One thread for two slots: the second job waits for the thread and not for a slot.
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let pool = Arc::new(Offload::with_slots(2, TaskTracker::new()));
            let (job, end) = held(&pool, SMALL_BYTES).await;
            let started = Arc::new(std::sync::atomic::AtomicBool::new(false));
            let mark = Arc::clone(&started);
            let mut queued = Box::pin(pool.run(SMALL_BYTES, move || {
                mark.store(true, std::sync::atomic::Ordering::SeqCst);
                Ok(())
            }));
            assert!(futures_util::poll!(&mut queued).is_pending());
            assert_eq!(pool.slots.available_permits(), 0, "it is handed over");
            drop(queued);
            drop(end);
            job.await.unwrap().unwrap();
            // Comes after it on the only thread.
            assert_eq!(pool.run(SMALL_BYTES, || Ok(7)).await, Ok(7));
            assert!(!started.load(std::sync::atomic::Ordering::SeqCst));
            assert_eq!(pool.slots.available_permits(), 2);
        });
    }

    #[tokio::test]
    async fn the_input_of_large_jobs_that_run_is_bounded_and_small_ones_pass() {
        let pool = Arc::new(Offload::with_slots(4, TaskTracker::new()));
        let budget = BUDGET_KIB as usize * 1024;
        let (job, end) = held(&pool, 4 * budget).await;
        let mut large = Box::pin(pool.run(SMALL_BYTES + 1024, || Ok(8)));
        assert!(futures_util::poll!(&mut large).is_pending());
        assert_eq!(pool.slots.available_permits(), 3, "who waits for budget holds no slot");
        assert_eq!(pool.run(SMALL_BYTES, || Ok(7)).await, Ok(7));
        drop(end);
        assert_eq!(large.await, Ok(8));
        job.await.unwrap().unwrap();
        assert_eq!(pool.budget.available_permits(), BUDGET_KIB as usize);
    }
}
