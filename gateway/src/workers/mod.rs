//! Where workers come from: options, a file, names, requests to `/workers`; and what of that survives a restart.
//!
//! The fleet knows workers that are there. This part decides which those are, and finds out what an address without
//! a scheme speaks before the fleet hears of it.

mod kubernetes;
mod names;
mod sources;
mod state;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_telemetry::Metrics;
use branchline_worker::{Fleet, Source, Transport, Worker, WorkerPatch, WorkerSpec, check_address, speaks};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Options;
use state::State;

/// How long one question about what an address speaks may take, and the longest wait between two.
const ASK: Duration = Duration::from_secs(2);
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// The sources of workers.
#[derive(Debug)]
pub struct Workers {
    state: Mutex<State>,
    /// Addresses that have not told yet what they speak, by [`key`].
    pending: Arc<Mutex<BTreeMap<String, CancellationToken>>>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

/// What became of a request for a worker.
#[derive(Debug)]
pub enum Added {
    /// It is in the fleet.
    Worker(Arc<Worker>),
    /// It will be once it has told what it speaks; its address.
    Pending(String),
}

impl Workers {
    /// Adds the workers of the options and of the state file, and watches the other sources.
    ///
    /// # Errors
    /// If a worker's address can't be used, or the state or worker file can't be read.
    pub fn start(
        options: &Options,
        fleet: &Arc<Fleet>,
        tracker: &TaskTracker,
        stop: &CancellationToken,
    ) -> Result<Arc<Self>> {
        let state = State::open(options.state_file.clone())?;
        let workers = Arc::new(Self {
            state: Mutex::new(state),
            pending: Arc::default(),
            tracker: tracker.clone(),
            stop: stop.child_token(),
        });
        let known = workers.state.lock().clone();
        let given = options
            .worker_urls
            .iter()
            .map(|url| WorkerSpec { source: Source::Options, ..WorkerSpec::new(url) });
        let given = given.filter(|spec| !known.has_removed(&spec.url) && known.find(&spec.url).is_none());
        for spec in given.chain(known.added()) {
            match workers.admit(fleet, spec) {
                // Somebody named it twice; one of them is enough.
                Err(error) if error.code == ErrorCode::Conflict => {
                    tracing::warn!(error = %error, "a worker is named twice");
                }
                admitted => drop(admitted?),
            }
        }
        sources::watch(&workers, options, fleet)?;
        Ok(workers)
    }

    /// Starts to look for workers in Kubernetes, if the options say so.
    ///
    /// # Errors
    /// If there is no API server to ask, or this build can't ask one.
    pub async fn discover(
        self: &Arc<Self>,
        options: &Options,
        fleet: &Arc<Fleet>,
        metrics: &Arc<Metrics>,
    ) -> Result<()> {
        kubernetes::watch(self, options, fleet, metrics).await
    }

    /// Looks at no source any more; the fleet stays as it is. A stop must not wait for who only watches.
    pub fn close(&self) {
        self.stop.cancel();
    }

    /// Adds a worker on request; it survives a restart if there is a state file.
    ///
    /// # Errors
    /// As [`Fleet::register`]; `Internal` if the state file can't be written, and then nothing has changed.
    pub fn add(&self, fleet: &Arc<Fleet>, spec: WorkerSpec) -> Result<Added> {
        let added = self.admit(fleet, spec.clone())?;
        if let Err(error) = self.state.lock().add(spec) {
            match &added {
                Added::Worker(worker) => fleet.forget(worker.id),
                Added::Pending(address) => self.cancel(address),
            }
            return Err(error);
        }
        Ok(added)
    }

    /// Changes what was said of a worker.
    ///
    /// # Errors
    /// As [`Fleet::patch`]; `Internal` if the state file can't be written.
    pub fn patch(&self, fleet: &Fleet, id: WorkerId, patch: &WorkerPatch) -> Result<Arc<Worker>> {
        let worker = fleet.patch(id, patch)?;
        let spec = worker.spec();
        // A pod's address is another one's tomorrow: what is written of it would outlive it.
        if !matches!(spec.source, Source::Kubernetes(..)) {
            self.state.lock().add((*spec).clone())?;
        }
        Ok(worker)
    }

    /// Notes that a worker is removed on request. The caller takes it out of the fleet.
    ///
    /// # Errors
    /// `Internal` if the state file can't be written.
    pub fn forget(&self, worker: &Worker) -> Result<()> {
        match worker.spec().source {
            // Discovery itself keeps it out while its pod lives.
            Source::Kubernetes(..) => Ok(()),
            _ => self.state.lock().remove(&worker.url),
        }
    }

    /// Takes back a worker that has not told yet what it speaks; whether there was one.
    ///
    /// # Errors
    /// As [`Self::forget`].
    pub fn withdraw(&self, url: &str) -> Result<bool> {
        let mut pending = self.pending.lock();
        if !pending.contains_key(key(url)) {
            return Ok(false);
        }
        self.state.lock().remove(url)?;
        end(&mut pending, url);
        Ok(true)
    }

    /// Stops asking an address.
    fn cancel(&self, url: &str) {
        end(&mut self.pending.lock(), url);
    }

    /// Addresses that have not told yet what they speak.
    pub fn pending(&self) -> Vec<String> {
        self.pending.lock().keys().cloned().collect()
    }

    /// Puts a worker into the fleet, at once or when it has told what it speaks.
    fn admit(&self, fleet: &Arc<Fleet>, mut spec: WorkerSpec) -> Result<Added> {
        spec.check()?;
        let address = key(&spec.url).to_owned();
        if !spec.url.contains("://") {
            match &spec.connection_mode {
                Some(mode) => spec.url = format!("{mode}://{address}"),
                None => check_address(&address)?,
            }
        }
        let mut pending = self.pending.lock();
        if pending.contains_key(&address) || fleet.workers().iter().any(|worker| key(&worker.url) == address)
        {
            let text = format!("worker '{}' is in the fleet already; remove it first", spec.url);
            return Err(Error::new(ErrorCode::Conflict, text).with_field("url"));
        }
        if spec.url.contains("://") {
            return fleet.register(spec).map(Added::Worker);
        }
        let cancel = self.stop.child_token();
        pending.insert(address.clone(), cancel.clone());
        let (fleet, pending, asked) = (Arc::clone(fleet), Arc::clone(&self.pending), address.clone());
        self.tracker.spawn(async move {
            let transport = tokio::select! {
                () = cancel.cancelled() => return,
                transport = find_out(&asked) => transport,
            };
            let mut pending = pending.lock();
            if cancel.is_cancelled() {
                return;
            }
            pending.remove(&asked);
            spec.url = format!("{transport}://{asked}");
            let url = spec.url.clone();
            if let Err(error) = fleet.register(spec) {
                tracing::warn!(worker = url, error = %error, "a worker can't be added");
            }
        });
        Ok(Added::Pending(address))
    }
}

/// Ends an entry and its task. Whoever finds his token uncancelled under the lock knows that the entry is his.
fn end(pending: &mut BTreeMap<String, CancellationToken>, url: &str) {
    if let Some(token) = pending.remove(key(url)) {
        token.cancel();
    }
}

/// What tells workers apart: the URL without its scheme, which may be found out later, and without a slash at its end.
pub(crate) fn key(url: &str) -> &str {
    url.split_once("://").map_or(url, |(_, rest)| rest).trim_end_matches('/')
}

/// Asks an address what it speaks until it answers.
async fn find_out(address: &str) -> Transport {
    let mut wait = Duration::from_millis(100);
    loop {
        match speaks(address, ASK).await {
            Ok(transport) => return transport,
            Err(error) => tracing::debug!(worker = address, error = %error, "asked again soon"),
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(ASK_AGAIN);
    }
}
