//! The one wasmtime engine of a process, the clock of its epochs, and the lanes that calls run on.
//!
//! A call starts on the caller's own thread. What has not finished within about two milliseconds goes on on the slow
//! lane: threads of low priority, so that spinning modules leave the cores to everybody else.

mod cache;
mod call;
mod code;
mod guest;
mod host;
mod smg;

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::{Duration, Instant};

use branchline_core::{Error, Result};
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;
use wasmtime::component::Linker;
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

pub(crate) use call::{Stream, describe, on_error, on_request, on_response, on_route};
pub(crate) use code::Code;
use guest::Guest;

/// Whether this build can run modules.
pub(crate) const PRESENT: bool = true;

/// Length of an epoch.
const TICK: Duration = Duration::from_millis(1);
/// Ticks without a call after which the clock stops.
const IDLE_TICKS: u32 = 100;
/// Calls at once, all modules together.
const CALLS: usize = 256;
/// Streams with an instance at once, all modules together.
const STREAMS: usize = 512;
/// Core instances, memories and tables that one component may have; one made of Python has about 40.
const PARTS: u32 = 64;

/// Everything that modules run in.
pub(crate) struct Runtime {
    engine: Engine,
    linker: Linker<Guest>,
    clock: Arc<Clock>,
    slow: tokio::runtime::Runtime,
    calls: Arc<Semaphore>,
    streams: Arc<Semaphore>,
}

/// Advances the engine's epoch while calls run.
struct Clock {
    running: AtomicUsize,
    parked: AtomicBool,
    thread: OnceLock<std::thread::Thread>,
}

/// Keeps the clock going.
struct Ticking<'a>(&'a Clock);

impl Clock {
    fn start(&self) -> Ticking<'_> {
        self.running.fetch_add(1, Ordering::SeqCst);
        if self.parked.load(Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
        Ticking(self)
    }

    fn run(&self, engine: &Engine) {
        let mut idle = 0;
        loop {
            std::thread::sleep(TICK);
            engine.increment_epoch();
            idle = if self.running.load(Ordering::SeqCst) == 0 { idle + 1 } else { 0 };
            if idle >= IDLE_TICKS {
                self.parked.store(true, Ordering::SeqCst);
                // A call that began before the flag was up has not unparked us.
                while self.running.load(Ordering::SeqCst) == 0 {
                    std::thread::park();
                }
                self.parked.store(false, Ordering::SeqCst);
                idle = 0;
            }
        }
    }
}

impl Drop for Ticking<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

fn config(pooled: bool) -> Config {
    let mut config = Config::new();
    config
        .consume_fuel(true)
        .epoch_interruption(true)
        .wasm_backtrace_max_frames(std::num::NonZeroUsize::new(16))
        .wasm_memory64(false)
        .wasm_relaxed_simd(false)
        .wasm_tail_call(false);
    if pooled {
        let mut pool = PoolingAllocationConfig::new();
        let instances = (CALLS + STREAMS) as u32;
        pool.total_component_instances(instances)
            .total_core_instances(instances * 8)
            .total_memories(instances * 2)
            .total_tables(instances * 8)
            .total_stacks(instances)
            .max_core_instances_per_component(PARTS)
            .max_memories_per_component(PARTS)
            .max_tables_per_component(PARTS)
            .max_memory_size((crate::spec::MEMORY_CAP_MIB as usize) << 20)
            // What a slot has held is given back to the system beyond this many idle slots.
            .max_unused_warm_slots(16);
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    }
    config
}

fn fault(what: &str) -> impl Fn(wasmtime::Error) -> Error + '_ {
    move |error| Error::internal(format!("{what}: {error:#}"))
}

impl Runtime {
    /// The runtime of this process, made at first use.
    ///
    /// # Errors
    /// If the system gives neither address space nor threads.
    pub(crate) fn get() -> Result<&'static Self> {
        static RUNTIME: OnceLock<Result<Runtime>> = OnceLock::new();
        RUNTIME.get_or_init(Self::start).as_ref().map_err(Error::clone)
    }

    fn start() -> Result<Self> {
        // The pool wants terabytes of address space, which a limit of the process may forbid.
        let engine = Engine::new(&config(true)).or_else(|error| {
            tracing::warn!(%error, "no instance pool; modules run with instances made one by one");
            Engine::new(&config(false)).map_err(fault("the WebAssembly engine can't start"))
        })?;
        let linker = host::linker(&engine).map_err(fault("the host functions can't be linked"))?;
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        let slow = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name("wasm-slow")
            .on_thread_start(lower_priority)
            .enable_all()
            .build()
            .map_err(|error| Error::internal(format!("no threads for modules: {error}")))?;
        let clock = Arc::new(Clock {
            running: AtomicUsize::new(0),
            parked: AtomicBool::new(false),
            thread: OnceLock::new(),
        });
        let (ticker, ticked) = (Arc::clone(&clock), engine.clone());
        let handle = std::thread::Builder::new()
            .name("wasm-clock".to_owned())
            .spawn(move || ticker.run(&ticked))
            .map_err(|error| Error::internal(format!("no thread for the modules' clock: {error}")))?;
        drop(clock.thread.set(handle.thread().clone()));
        Ok(Self {
            engine,
            linker,
            clock,
            slow,
            calls: Arc::new(Semaphore::new(CALLS)),
            streams: Arc::new(Semaphore::new(STREAMS)),
        })
    }

    /// Runs `work` for at most `limit`: a first slice here, the rest on the slow lane. `None` if time ran out.
    async fn drive<T: Send + 'static>(
        &self,
        mut work: Pin<Box<dyn Future<Output = T> + Send>>,
        limit: Duration,
    ) -> Option<std::result::Result<T, String>> {
        let started = Instant::now();
        let first = {
            let _ticking = self.clock.start();
            std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await
        };
        if let Poll::Ready(done) = first {
            return Some(Ok(done));
        }
        let _ticking = self.clock.start();
        let rest = AbortOnDropHandle::new(self.slow.spawn(work));
        match tokio::time::timeout(limit.saturating_sub(started.elapsed()), rest).await {
            Ok(Ok(done)) => Some(Ok(done)),
            Ok(Err(error)) => Some(Err(error.to_string())),
            Err(_) => None,
        }
    }
}

/// Linux keeps a nice value a thread.
pub(super) fn lower_priority() {
    if let Err(error) = rustix::process::nice(15) {
        tracing::debug!(%error, "a thread of modules keeps its priority");
    }
}
