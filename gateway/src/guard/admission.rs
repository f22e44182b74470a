//! How many requests run at once: a place is held until the last byte of the answer, and a bounded queue waits for one.
//!
//! Whoever leaves the queue, by its time or with its client, frees his place in it. Refusals say when to come back, by
//! the pace at which places have become free.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use branchline_core::{Error, ErrorCode, Result};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::config::Options;

/// Bounds of what a client is told to wait.
const WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Weight of the latest gap between two free places.
const WEIGHT: f64 = 0.2;

/// The places of a gateway.
#[derive(Debug)]
pub struct Admission {
    places: Arc<Semaphore>,
    waiting: AtomicUsize,
    queue: usize,
    patience: Duration,
    pace: Mutex<Pace>,
}

/// Seconds between two places that become free, on average, and when the last one did.
#[derive(Debug, Default)]
struct Pace {
    gap: Option<f64>,
    last: Option<Instant>,
}

/// A place; free again when dropped.
#[derive(Debug)]
pub struct Permit {
    _place: OwnedSemaphorePermit,
    admission: Arc<Admission>,
}

/// A place in the queue.
struct Waiter<'a>(&'a AtomicUsize);

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Admission {
    /// What the options ask for; `None` if they set no limit.
    pub fn of(options: &Options) -> Option<Arc<Self>> {
        let places = options.max_concurrent_requests.min(Semaphore::MAX_PERMITS);
        (places > 0).then(|| Self::new(places, options.queue_size, options.queue_timeout))
    }

    fn new(places: usize, queue: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self {
            places: Arc::new(Semaphore::new(places)),
            waiting: AtomicUsize::new(0),
            queue,
            patience,
            pace: Mutex::default(),
        })
    }

    /// A place, at once or after a wait in the order of arrival.
    ///
    /// # Errors
    /// `ResourceExhausted`, with the time to wait, if the queue is full or the wait too long.
    pub async fn enter(self: &Arc<Self>) -> Result<Permit> {
        // A free place is for those who wait.
        if self.waiting() == 0
            && let Ok(place) = Arc::clone(&self.places).try_acquire_owned()
        {
            return Ok(self.permit(place));
        }
        let joined = self.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, |waiting| {
            (waiting < self.queue).then_some(waiting + 1)
        });
        if joined.is_err() {
            return Err(
                self.refusal(format!("all places are taken and {} requests wait for one", self.queue))
            );
        }
        let _waiter = Waiter(&self.waiting);
        match timeout(self.patience, Arc::clone(&self.places).acquire_owned()).await {
            Ok(Ok(place)) => Ok(self.permit(place)),
            Ok(Err(_)) | Err(_) => {
                Err(self
                    .refusal(format!("no place became free within --queue-timeout of {:?}", self.patience)))
            }
        }
    }

    /// Requests in the queue.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    fn permit(self: &Arc<Self>, place: OwnedSemaphorePermit) -> Permit {
        Permit { _place: place, admission: Arc::clone(self) }
    }

    fn refusal(&self, why: String) -> Error {
        let gap = self.pace.lock().gap.unwrap_or(0.0);
        let wait = Duration::try_from_secs_f64(gap * (self.waiting() + 1) as f64).unwrap_or(WAIT.1);
        Error::new(ErrorCode::ResourceExhausted, format!("{why}; try again later"))
            .with_retry_after(wait.clamp(WAIT.0, WAIT.1))
    }

    fn freed(&self, now: Instant) {
        let mut pace = self.pace.lock();
        if let Some(last) = pace.last.replace(now) {
            let gap = now.duration_since(last).as_secs_f64();
            pace.gap = Some(pace.gap.map_or(gap, |old| old + WEIGHT * (gap - old)));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.freed(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn places_are_bounded_and_free_again_in_the_order_of_arrival() {
        let admission = Admission::new(1, 2, 60 * SECOND);
        let held = admission.enter().await.expect("a place");
        let next = |name: &'static str| {
            let admission = Arc::clone(&admission);
            tokio::spawn(async move { (name, admission.enter().await.expect("a place")) })
        };
        let first = next("first");
        while admission.waiting() < 1 {
            tokio::task::yield_now().await;
        }
        let second = next("second");
        while admission.waiting() < 2 {
            tokio::task::yield_now().await;
        }
        let refused = admission.enter().await.expect_err("the queue is full");
        assert_eq!(refused.code, ErrorCode::ResourceExhausted);
        assert!(refused.retry_after >= Some(SECOND), "{refused:?}");
        drop(held);
        let (name, place) = first.await.expect("no panic");
        assert_eq!((name, second.is_finished()), ("first", false));
        drop(place);
        assert_eq!(second.await.expect("no panic").0, "second");
    }

    #[tokio::test]
    async fn who_leaves_the_queue_frees_his_place_in_it() {
        let admission = Admission::new(1, 1, SECOND / 20);
        let _held = admission.enter().await.expect("a place");
        assert!(admission.enter().await.is_err(), "its time is over");
        assert_eq!(admission.waiting(), 0);
        let left = tokio::time::timeout(SECOND / 100, admission.enter()).await;
        assert!(left.is_err(), "its client left");
        assert_eq!(admission.waiting(), 0);
    }

    #[test]
    fn the_wait_that_is_told_follows_the_pace() {
        let admission = Admission::new(1, 0, SECOND);
        let start = Instant::now();
        for at in 0..20 {
            admission.freed(start + 7 * SECOND * at);
        }
        let told = admission.refusal(String::new()).retry_after.expect("a wait");
        assert!((6.5..7.5).contains(&told.as_secs_f64()), "{told:?}");
    }
}
