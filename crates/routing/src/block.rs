//! The exact index: which engine holds which block, from the engines' own events.
//!
//! A block is named by the chained hash of all tokens up to its end, so engines with different page sizes share
//! the map without meeting. Nothing is guessed: after a gap in the numbering the engine's entries are dropped
//! until its next snapshot.

use branchline_core::WorkerId;
use smallvec::SmallVec;

use crate::identity::HashMap;

/// Head of a batch of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Changes when numbering starts anew.
    pub epoch: u64,
    /// Consecutive within an epoch.
    pub sequence: u64,
    /// Part of the opening snapshot.
    pub snapshot: bool,
}

/// A change of what one engine holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// Blocks came.
    Stored(&'a [u64]),
    /// Blocks went.
    Removed(&'a [u64]),
    /// All went.
    Cleared,
}

/// The numbering was broken: subscribe again. The engine's entries are gone already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "cache events of {worker} have a gap: expected epoch {epoch} sequence {expected}, got epoch {got_epoch} sequence {got}"
)]
pub struct Gap {
    /// Whose events.
    pub worker: WorkerId,
    /// Epoch so far.
    pub epoch: u64,
    /// Sequence that had to come.
    pub expected: u64,
    /// Epoch that came.
    pub got_epoch: u64,
    /// Sequence that came.
    pub got: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cursor {
    epoch: u64,
    next: u64,
    in_snapshot: bool,
}

#[derive(Debug, Default)]
struct Engine {
    /// `None` before the first batch and after a gap.
    cursor: Option<Cursor>,
    blocks: usize,
}

/// Block hash → engines that hold it, and those it is on its way to.
#[derive(Debug, Default)]
pub struct BlockIndex {
    holders: HashMap<SmallVec<[WorkerId; 4]>>,
    /// Blocks of running prompts, with how many requests bring them. Small: bounded by what is in flight.
    coming: HashMap<SmallVec<[(WorkerId, u32); 2]>>,
    engines: std::collections::HashMap<WorkerId, Engine>,
}

impl BlockIndex {
    /// Takes a batch. The first of a subscription must open a snapshot, which replaces what was known.
    pub fn apply<'a>(
        &mut self,
        worker: WorkerId,
        batch: Batch,
        changes: impl IntoIterator<Item = Change<'a>>,
    ) -> Result<(), Gap> {
        let cursor = self.engines.entry(worker).or_default().cursor;
        let opens =
            batch.snapshot && cursor.is_none_or(|cursor| cursor.epoch != batch.epoch || !cursor.in_snapshot);
        if opens {
            self.purge(worker);
        } else if cursor.is_none_or(|cursor| (cursor.epoch, cursor.next) != (batch.epoch, batch.sequence)) {
            self.purge(worker);
            let (epoch, expected) = cursor.map_or((0, 0), |cursor| (cursor.epoch, cursor.next));
            return Err(Gap { worker, epoch, expected, got_epoch: batch.epoch, got: batch.sequence });
        }
        for change in changes {
            match change {
                Change::Stored(hashes) => self.store(worker, hashes),
                Change::Removed(hashes) => self.remove(worker, hashes),
                Change::Cleared => self.forget_blocks(worker),
            }
        }
        let next =
            Cursor { epoch: batch.epoch, next: batch.sequence.wrapping_add(1), in_snapshot: batch.snapshot };
        self.engines.entry(worker).or_default().cursor = Some(next);
        Ok(())
    }

    /// Forgets all of one engine's entries; its next batch must open a snapshot.
    pub fn purge(&mut self, worker: WorkerId) {
        self.forget_blocks(worker);
        self.engines.remove(&worker);
    }

    /// Leading blocks of `hashes` that each of `workers` holds or is about to hold.
    pub fn matches(&self, hashes: &[u64], workers: &[WorkerId]) -> Vec<usize> {
        let mut found = vec![0; workers.len()];
        let mut live: SmallVec<[usize; 16]> = (0..workers.len()).collect();
        for (depth, hash) in hashes.iter().enumerate() {
            let holders = self.holders.get(hash);
            let coming = self.coming.get(hash);
            live.retain(|position| {
                let worker = workers[*position];
                let has = holders.is_some_and(|holders| holders.contains(&worker))
                    || coming.is_some_and(|coming| coming.iter().any(|(who, _)| *who == worker));
                if has {
                    found[*position] = depth + 1;
                }
                has
            });
            if live.is_empty() {
                break;
            }
        }
        found
    }

    /// Blocks that an engine holds.
    pub fn blocks(&self, worker: WorkerId) -> usize {
        self.engines.get(&worker).map_or(0, |engine| engine.blocks)
    }

    /// Distinct blocks held by any engine.
    pub fn len(&self) -> usize {
        self.holders.len()
    }

    /// Whether no engine holds any block.
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// Notes that a request brings these blocks to an engine. Undone by `release` with the same arguments.
    pub fn reserve(&mut self, worker: WorkerId, hashes: &[u64]) {
        for hash in hashes {
            let coming = self.coming.entry(*hash).or_default();
            match coming.iter_mut().find(|(who, _)| *who == worker) {
                Some((_, count)) => *count += 1,
                None => coming.push((worker, 1)),
            }
        }
    }

    /// The request has its first token, or is over.
    pub fn release(&mut self, worker: WorkerId, hashes: &[u64]) {
        for hash in hashes {
            let Some(coming) = self.coming.get_mut(hash) else { continue };
            if let Some((_, count)) = coming.iter_mut().find(|(who, _)| *who == worker) {
                *count -= 1;
            }
            coming.retain(|(_, count)| *count > 0);
            if coming.is_empty() {
                self.coming.remove(hash);
            }
        }
    }

    /// Blocks on their way to any engine.
    pub fn reserved(&self) -> usize {
        self.coming.len()
    }

    fn store(&mut self, worker: WorkerId, hashes: &[u64]) {
        let mut added = 0;
        for hash in hashes {
            let holders = self.holders.entry(*hash).or_default();
            if !holders.contains(&worker) {
                holders.push(worker);
                added += 1;
            }
        }
        self.engines.entry(worker).or_default().blocks += added;
    }

    fn remove(&mut self, worker: WorkerId, hashes: &[u64]) {
        let mut gone = 0;
        for hash in hashes {
            let Some(holders) = self.holders.get_mut(hash) else { continue };
            if let Some(position) = holders.iter().position(|who| *who == worker) {
                holders.swap_remove(position);
                gone += 1;
            }
            if holders.is_empty() {
                self.holders.remove(hash);
            }
        }
        self.engines.entry(worker).or_default().blocks -= gone;
    }

    fn forget_blocks(&mut self, worker: WorkerId) {
        if self.blocks(worker) == 0 {
            return;
        }
        self.holders.retain(|_, holders| {
            holders.retain(|who| *who != worker);
            !holders.is_empty()
        });
        self.engines.entry(worker).or_default().blocks = 0;
    }
}

#[cfg(test)]
mod tests;
