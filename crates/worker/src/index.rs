//! The fleet's two cache indexes behind their locks. No lock is held across an await.

use std::sync::Arc;
use std::time::Duration;

use branchline_core::WorkerId;
use branchline_routing::{Batch, BlockIndex, Change, Gap, TextIndex, Uses};
use parking_lot::{Mutex, RwLock};

use crate::proto::{SubscribeKvEventsResponse, kv_event::Change as Event};

/// What workers have cached: exactly for engines, approximately for HTTP workers.
#[derive(Debug)]
pub(crate) struct Index {
    pub(crate) blocks: RwLock<BlockIndex>,
    pub(crate) texts: Mutex<TextIndex>,
    pub(crate) uses: Uses,
}

impl Index {
    pub(crate) fn new(text_bytes: usize, text_ttl: Duration, block_bytes: usize) -> Arc<Self> {
        let texts = Mutex::new(TextIndex::new(text_bytes, text_ttl));
        Arc::new(Self { blocks: RwLock::new(BlockIndex::new(block_bytes)), texts, uses: Uses::default() })
    }

    /// Takes a batch of an engine's events.
    pub(crate) fn apply(&self, worker: WorkerId, batch: &SubscribeKvEventsResponse) -> Result<(), Gap> {
        let head = Batch { epoch: batch.epoch, sequence: batch.sequence, snapshot: batch.snapshot };
        let changes = batch.events.iter().filter_map(|event| match event.change.as_ref()? {
            Event::Stored(stored) => Some(Change::Stored(&stored.block_hashes)),
            Event::Removed(removed) => Some(Change::Removed(&removed.block_hashes)),
            Event::Cleared(_) => Some(Change::Cleared),
        });
        self.blocks.write().apply(worker, head, changes)
    }

    /// Forgets a worker.
    pub(crate) fn purge(&self, worker: WorkerId) {
        self.blocks.write().purge(worker);
        self.texts.lock().purge(worker);
    }
}

/// Blocks on their way into an engine's cache; dropping it takes the note back.
#[derive(Debug)]
pub(crate) struct Reservation {
    index: Arc<Index>,
    worker: WorkerId,
    hashes: Arc<[u64]>,
    /// Those before it are there already.
    first: usize,
}

impl Reservation {
    pub(crate) fn new(index: &Arc<Index>, worker: WorkerId, hashes: Arc<[u64]>, first: usize) -> Self {
        index.blocks.write().reserve(worker, &hashes[first..]);
        Self { index: index.clone(), worker, hashes, first }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.index.blocks.write().release(self.worker, &self.hashes[self.first..]);
    }
}
