//! Which requests are alive and where they run, by the exact id. Aborts look here.
//!
//! An entry lives as long as its [`LiveGuard`], so the table can't outgrow what is being served.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use branchline_core::{Error, ErrorCode, RequestId, Result};
use branchline_worker::Worker;
use parking_lot::Mutex;

/// A worker that has a part of a request, and the id by which it knows it.
pub type Part = (Arc<Worker>, String);

#[derive(Debug, Default)]
struct Place {
    /// Where it runs: several if it is raced, or its sequences were continued. None while it is being prepared.
    parts: Mutex<Vec<Part>>,
    /// An abort came.
    aborted: AtomicBool,
}

/// The table of live requests.
#[derive(Debug, Default)]
pub struct LiveRequests {
    table: Mutex<HashMap<RequestId, Arc<Place>>>,
}

/// Keeps one request in the table.
#[derive(Debug)]
pub struct LiveGuard {
    requests: Arc<LiveRequests>,
    id: RequestId,
    place: Arc<Place>,
}

impl LiveRequests {
    /// Takes an id into the table.
    ///
    /// # Errors
    /// `Conflict` if a live request has the same id.
    pub fn register(self: &Arc<Self>, id: RequestId) -> Result<LiveGuard> {
        let place = Arc::new(Place::default());
        match self.table.lock().entry(id.clone()) {
            Entry::Vacant(slot) => slot.insert(Arc::clone(&place)),
            Entry::Occupied(_) => {
                return Err(Error::new(
                    ErrorCode::Conflict,
                    format!("`rid` {:?} is the id of a running request; choose another", id.as_str()),
                )
                .with_field("rid"));
            }
        };
        Ok(LiveGuard { requests: Arc::clone(self), id, place })
    }

    /// Marks a request as aborted and answers where it runs. `None` if no request has exactly this id; nowhere if it
    /// has not reached a worker, and then never will.
    pub fn abort(&self, id: &str) -> Option<Vec<Part>> {
        let place = self.table.lock().get(&RequestId::new(id)).cloned()?;
        place.aborted.store(true, Ordering::Release);
        let parts = place.parts.lock().clone();
        Some(parts)
    }

    /// Marks every request as aborted; those on workers still have to be ended there.
    pub fn abort_all(&self) -> usize {
        let table = self.table.lock();
        table.values().for_each(|place| place.aborted.store(true, Ordering::Release));
        table.len()
    }

    /// How many are alive.
    pub fn len(&self) -> usize {
        self.table.lock().len()
    }

    /// Whether none is alive.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl LiveGuard {
    /// The id.
    pub fn id(&self) -> &RequestId {
        &self.id
    }

    /// Whether it was aborted through this table.
    pub fn is_aborted(&self) -> bool {
        self.place.aborted.load(Ordering::Acquire)
    }

    /// Says that a worker is about to have a part of it. Whoever asks [`Self::is_aborted`] afterwards misses no abort.
    pub(super) fn runs_at(&self, worker: &Arc<Worker>, id: &str) {
        self.place.parts.lock().push((Arc::clone(worker), id.to_owned()));
    }

    /// Says that a worker has this part of it no longer.
    pub(super) fn left(&self, worker: &Worker, id: &str) {
        self.place.parts.lock().retain(|(at, part)| at.id != worker.id || part != id);
    }

    /// Says that nobody else has it.
    pub(super) fn only_at(&self, worker: &Worker) {
        self.place.parts.lock().retain(|(at, _)| at.id == worker.id);
    }
}

impl Drop for LiveGuard {
    fn drop(&mut self) {
        self.requests.table.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_unique_while_it_lives_and_free_afterwards() {
        let requests = Arc::new(LiveRequests::default());
        let first = requests.register(RequestId::new("job-1")).unwrap();
        let error = requests.register(RequestId::new("job-1")).unwrap_err();
        assert_eq!((error.code, error.field.as_deref()), (ErrorCode::Conflict, Some("rid")));
        drop(first);
        assert!(requests.register(RequestId::new("job-1")).is_ok());
        assert!(requests.is_empty());
    }

    #[test]
    fn an_abort_matches_the_exact_id_only() {
        let requests = Arc::new(LiveRequests::default());
        let ids = ["job-1", "job-12", "xjob-1"];
        let guards: Vec<_> = ids.iter().map(|id| requests.register(RequestId::new(*id)).unwrap()).collect();
        assert!(requests.abort("job-1").is_some_and(|parts| parts.is_empty()));
        assert_eq!(guards.iter().map(LiveGuard::is_aborted).collect::<Vec<_>>(), [true, false, false]);
        assert!(requests.abort("job").is_none());
        assert_eq!(requests.abort_all(), 3);
        assert!(guards.iter().all(LiveGuard::is_aborted));
    }
}
