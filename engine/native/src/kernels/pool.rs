//! A small pool of threads for loops over independent pieces.
//!
//! The caller takes part; pieces are handed out one by one, so a thread that the system has put aside delays
//! nobody but the piece it holds. Threads spin for a short while between the loops of a step, and sleep
//! otherwise: an idle pool uses no CPU. Results must not depend on who runs a piece.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread looks for the next loop before it sleeps.
const SPIN: Duration = Duration::from_micros(40);

type Job = &'static (dyn Fn(usize, usize) + Sync);

struct Shared {
    /// Odd while a loop is open to joiners; counts up at each opening and closing.
    phase: AtomicU64,
    next: AtomicUsize,
    count: AtomicUsize,
    /// Workers that may be reading `job`.
    inside: AtomicUsize,
    /// Valid while `phase` is odd or `inside` is not 0.
    job: UnsafeCell<Option<Job>>,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    gate: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is written only by the one caller, while `phase` is even and `inside` is 0; workers read it
// only after they have counted themselves inside and have then seen an odd phase.
unsafe impl Sync for Shared {}

/// Threads that run loops. Dropping it ends them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool in which `threads` threads, the caller among them, share each loop.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            phase: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            count: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            gate: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut pool = Self { shared, workers: Vec::new() };
        for number in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("branchline-{number}"));
            pool.workers.push(builder.spawn(move || work(&shared, number))?);
        }
        Ok(pool)
    }

    /// Threads that share a loop.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Call `piece(index, thread)` once for each index below `count`, and return when all are done. `thread`
    /// is below `threads()` and unique among those running. Panics if a piece panics.
    pub(crate) fn run(&mut self, count: usize, piece: &(dyn Fn(usize, usize) + Sync)) {
        if count <= 1 || self.workers.is_empty() {
            (0..count).for_each(|index| piece(index, 0));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: the reference is used only until `inside` is 0 after closing, which `Closer` waits for even
        // when a piece panics here; so it does not outlive `piece`. `&mut self` keeps other callers out.
        unsafe {
            *shared.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), Job>(piece));
        }
        shared.count.store(count, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        shared.phase.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _gate = lock(&shared.gate);
            shared.wake.notify_all();
        }
        {
            let _closer = Closer(shared);
            drain(shared, piece, 0);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a kernel thread panicked");
    }
}

/// Closes the open loop and waits until no worker can touch it.
struct Closer<'a>(&'a Shared);

impl Drop for Closer<'_> {
    fn drop(&mut self) {
        self.0.next.store(usize::MAX / 2, Ordering::Relaxed);
        self.0.phase.fetch_add(1, Ordering::SeqCst);
        let mut rounds = 0u32;
        while self.0.inside.load(Ordering::SeqCst) != 0 {
            rounds += 1;
            if rounds.is_multiple_of(4096) {
                std::thread::yield_now();
            }
            spin_loop();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _gate = lock(&self.shared.gate);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn lock(gate: &Mutex<()>) -> MutexGuard<'_, ()> {
    gate.lock().unwrap_or_else(PoisonError::into_inner)
}

fn drain(shared: &Shared, piece: &(dyn Fn(usize, usize) + Sync), thread: usize) {
    let count = shared.count.load(Ordering::Relaxed);
    loop {
        let index = shared.next.fetch_add(1, Ordering::Relaxed);
        if index >= count {
            return;
        }
        piece(index, thread);
    }
}

fn work(shared: &Shared, thread: usize) {
    let mut seen = 0;
    while let Some(phase) = await_loop(shared, seen) {
        seen = phase;
        shared.inside.fetch_add(1, Ordering::SeqCst);
        // The loop may have closed, or another have opened, since: what counts is that one is open now.
        let now = shared.phase.load(Ordering::SeqCst);
        if now % 2 == 1 {
            seen = now;
            // SAFETY: inside is counted and the phase is odd after that, so the caller keeps the job alive.
            if let Some(job) = unsafe { *shared.job.get() } {
                let result =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drain(shared, job, thread)));
                if result.is_err() {
                    shared.panicked.store(true, Ordering::Relaxed);
                }
            }
        }
        shared.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The phase of an open loop other than `seen`; None when the pool stops. Spins, then sleeps.
fn await_loop(shared: &Shared, seen: u64) -> Option<u64> {
    let open = || {
        let phase = shared.phase.load(Ordering::SeqCst);
        (phase % 2 == 1 && phase != seen).then_some(phase)
    };
    let start = Instant::now();
    loop {
        for _ in 0..64 {
            if let Some(phase) = open() {
                return Some(phase);
            }
            spin_loop();
        }
        if start.elapsed() > SPIN {
            break;
        }
    }
    let mut gate = lock(&shared.gate);
    shared.sleepers.fetch_add(1, Ordering::SeqCst);
    let found = loop {
        if shared.stop.load(Ordering::SeqCst) {
            break None;
        }
        if let Some(phase) = open() {
            break Some(phase);
        }
        gate = shared.wake.wait(gate).unwrap_or_else(PoisonError::into_inner);
    };
    shared.sleepers.fetch_sub(1, Ordering::SeqCst);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_runs_once_over_many_loops() {
        let mut pool = Pool::new(3).expect("threads start");
        for round in 0..2000 {
            let count = round % 17;
            let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            pool.run(count, &|index, thread| {
                assert!(thread < 3);
                hits[index].fetch_add(1, Ordering::Relaxed);
            });
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn a_panicking_piece_fails_its_loop_and_spares_the_pool() {
        let mut pool = Pool::new(2).expect("threads start");
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(64, &|index, _| assert!(index != 5, "piece 5 fails"));
        }));
        assert!(result.is_err());
        let done = AtomicUsize::new(0);
        pool.run(64, &|_, _| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 64);
    }
}
