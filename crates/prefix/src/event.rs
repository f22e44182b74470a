//! News of residency for mirrors: what is stored, removed or cleared. A node split is no news.
//!
//! The queue is bounded: when nobody drains it, it folds into one `Cleared` and a snapshot, which says the
//! same in no more space than the tree itself.

/// A change of what is resident. Hashes are those of [`crate::hash`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Consecutive blocks became resident after `parent` (the namespace's root hash for first blocks).
    Stored {
        /// Hash of the block before the first one.
        parent: u64,
        /// One hash a block.
        hashes: Vec<u64>,
        /// The blocks' tokens, page size times `hashes.len()` of them.
        tokens: Vec<u32>,
    },
    /// Blocks left, children before their parents.
    Removed(Vec<u64>),
    /// Nothing is resident any more.
    Cleared,
}

/// Events not yet drained, and how many blocks they speak of.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    events: Vec<Event>,
    blocks: usize,
}

impl EventQueue {
    pub(crate) fn stored(&mut self, parent: u64, hashes: &[u64], tokens: &[u32]) {
        self.blocks += hashes.len();
        self.events.push(Event::Stored { parent, hashes: hashes.to_vec(), tokens: tokens.to_vec() });
    }

    pub(crate) fn removed(&mut self, hash: u64) {
        self.blocks += 1;
        match self.events.last_mut() {
            Some(Event::Removed(hashes)) => hashes.push(hash),
            _ => self.events.push(Event::Removed(vec![hash])),
        }
    }

    /// Blocks spoken of since the last drain; the owner folds the queue when this passes its bound.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Replaces everything queued by `Cleared` and then `resident`: what was queued no longer matters.
    pub(crate) fn fold(&mut self, resident: Vec<Event>) {
        self.events.clear();
        self.events.push(Event::Cleared);
        self.events.extend(resident);
        self.blocks = 0;
    }

    pub(crate) fn drain(&mut self) -> Vec<Event> {
        self.blocks = 0;
        std::mem::take(&mut self.events)
    }
}
