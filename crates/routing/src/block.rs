//! The exact index: which engine holds which block, from the engines' own events.
//!
//! A block is named by the chained hash of all tokens up to its end, so engines with different page sizes share
//! the map without meeting. Nothing is guessed: after a gap in the numbering the engine's entries are dropped
//! until its next snapshot. An engine that holds a block holds those before it, so a lookup halves the prompt
//! instead of walking it, and a purge only retires the engine's bit: the bits are swept shard by shard later.

use branchline_core::WorkerId;
use smallvec::SmallVec;

use crate::identity::HashMap;
use crate::slots::{Mask, Slots};

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

/// Parts of the map; growing or sweeping one takes a fraction of a millisecond at millions of blocks.
const SHARDS: usize = 256;

/// Memory of an entry of the first 64 slots, at the map's emptiest after growing.
const ENTRY_BYTES: usize = 2 * (size_of::<(u64, u64)>() + 1) * 8 / 7;

/// Blocks by hash: holders among the first 64 slots in one word, others beside it.
#[derive(Debug, Default)]
struct Shard {
    first: HashMap<u64>,
    more: HashMap<Mask>,
}

/// Block hash → engines that hold it, and those it is on its way to.
#[derive(Debug)]
pub struct BlockIndex {
    shards: Vec<Shard>,
    slots: Slots,
    /// The shard to be swept next.
    broom: usize,
    /// Blocks of running prompts, with how many requests bring them. Small: bounded by what is in flight.
    coming: HashMap<SmallVec<[(WorkerId, u32); 2]>>,
    engines: std::collections::HashMap<WorkerId, Engine>,
    entries: usize,
    limit: usize,
    dropped: u64,
}

impl Default for BlockIndex {
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

impl BlockIndex {
    /// An index of about `budget` bytes at most; blocks that would need more are not remembered.
    pub fn new(budget: usize) -> Self {
        Self {
            shards: std::iter::repeat_with(Shard::default).take(SHARDS).collect(),
            slots: Slots::default(),
            broom: 0,
            coming: HashMap::default(),
            engines: std::collections::HashMap::default(),
            entries: 0,
            limit: (budget / ENTRY_BYTES).max(1),
            dropped: 0,
        }
    }

    /// Takes a batch. The first of a subscription must open a snapshot, which replaces what was known.
    pub fn apply<'a>(
        &mut self,
        worker: WorkerId,
        batch: Batch,
        changes: impl IntoIterator<Item = Change<'a>>,
    ) -> Result<(), Gap> {
        self.sweep();
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

    /// Forgets all of one engine's entries, in constant time; its next batch must open a snapshot.
    pub fn purge(&mut self, worker: WorkerId) {
        // Also of an engine that holds nothing any more: its slot is wanted by others.
        self.slots.bury(worker, SHARDS);
        self.engines.remove(&worker);
    }

    /// Leading blocks of `hashes` that each of `workers` holds or is about to hold.
    pub fn matches(&self, hashes: &[u64], workers: &[WorkerId]) -> Vec<usize> {
        let mut asked = Mask::default();
        let slots: SmallVec<[Option<usize>; 64]> =
            workers.iter().map(|worker| self.slots.find(*worker)).collect();
        slots.iter().flatten().for_each(|slot| asked.insert(*slot));
        let mut depths: SmallVec<[usize; 64]> = SmallVec::from_elem(0, self.slots.len());
        if let Some(last) = hashes.last()
            && !asked.is_empty()
        {
            let whole = self.holders(*last).and(&asked);
            whole.without(&Mask::default(), |slot| depths[slot] = hashes.len());
            self.search(hashes, (0, &asked), (hashes.len(), &whole), &mut depths);
        }
        slots.iter().map(|slot| slot.map_or(0, |slot| depths[slot])).collect()
    }

    /// Finds how far those get that have the first `low` blocks and not the first `high`.
    fn search(&self, hashes: &[u64], low: (usize, &Mask), high: (usize, &Mask), depths: &mut [usize]) {
        if low.1.is_within(high.1) {
            return;
        }
        if high.0 - low.0 <= 1 {
            low.1.without(high.1, |slot| depths[slot] = low.0);
            return;
        }
        let middle = low.0 + (high.0 - low.0) / 2;
        let have = self.holders(hashes[middle - 1]).and(low.1).or(high.1);
        self.search(hashes, low, (middle, &have), depths);
        self.search(hashes, (middle, &have), high, depths);
    }

    /// Live slots that hold a block or are about to.
    fn holders(&self, hash: u64) -> Mask {
        let shard = &self.shards[shard_of(hash)];
        let mut mask = Mask::default();
        if self.slots.len() > 64
            && let Some(more) = shard.more.get(&hash)
        {
            mask = more.clone();
        }
        mask.set_word(0, shard.first.get(&hash).copied().unwrap_or(0));
        if !self.coming.is_empty()
            && let Some(coming) = self.coming.get(&hash)
        {
            coming
                .iter()
                .filter_map(|(worker, _)| self.slots.find(*worker))
                .for_each(|slot| mask.insert(slot));
        }
        mask.and(self.slots.live())
    }

    /// Blocks that an engine holds.
    pub fn blocks(&self, worker: WorkerId) -> usize {
        self.engines.get(&worker).map_or(0, |engine| engine.blocks)
    }

    /// Distinct blocks held by any engine, or by one that left and is not swept out yet.
    pub fn len(&self) -> usize {
        self.entries
    }

    /// Whether no engine holds any block.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Bytes of the entries, estimated.
    pub fn memory(&self) -> usize {
        self.entries * ENTRY_BYTES
    }

    /// Blocks that were not remembered for want of room.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Notes that a request brings these blocks to an engine. Undone by `release` with the same arguments.
    pub fn reserve(&mut self, worker: WorkerId, hashes: &[u64]) {
        self.sweep();
        self.slots.claim(worker);
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
        let slot = self.slots.claim(worker);
        let dead = self.slots.dead().clone();
        let mut added = 0;
        for hash in hashes {
            let shard = &mut self.shards[shard_of(*hash)];
            let known = shard.first.contains_key(hash);
            if !known && self.entries >= self.limit {
                self.dropped += 1;
                continue;
            }
            // Each block has a word of the first slots, be it zero, so that entries are counted once.
            let word = shard.first.entry(*hash).or_insert(0);
            self.entries += usize::from(!known);
            let new = if slot < 64 {
                let had = *word >> slot & 1 == 1;
                *word |= 1 << slot;
                !had
            } else {
                let more = shard.more.entry(*hash).or_default();
                let had = more.has(slot) && !dead.has(slot);
                more.insert(slot);
                !had
            };
            added += usize::from(new);
        }
        self.engines.entry(worker).or_default().blocks += added;
    }

    fn remove(&mut self, worker: WorkerId, hashes: &[u64]) {
        let Some(slot) = self.slots.find(worker) else { return };
        let mut gone = 0;
        for hash in hashes {
            let shard = &mut self.shards[shard_of(*hash)];
            let Some(word) = shard.first.get_mut(hash) else { continue };
            if slot < 64 {
                gone += usize::from(*word >> slot & 1 == 1);
                *word &= !(1 << slot);
            } else if let Some(more) = shard.more.get_mut(hash) {
                gone += usize::from(more.has(slot));
                more.remove(slot);
            }
            self.entries -= usize::from(shard.drop_if_empty(*hash));
        }
        self.engines.entry(worker).or_default().blocks -= gone;
    }

    fn forget_blocks(&mut self, worker: WorkerId) {
        let Some(engine) = self.engines.get_mut(&worker) else { return };
        if std::mem::take(&mut engine.blocks) > 0 {
            self.slots.bury(worker, SHARDS);
        }
    }

    /// Clears the bits of retired slots from one more shard, if there are any.
    fn sweep(&mut self) {
        if self.slots.dead().is_empty() {
            return;
        }
        let dead = self.slots.dead().clone();
        let shard = &mut self.shards[self.broom];
        let before = shard.first.len();
        shard.more.retain(|_, mask| {
            dead.without(&Mask::default(), |slot| mask.remove(slot));
            !mask.is_empty()
        });
        let more = &shard.more;
        shard.first.retain(|hash, word| {
            *word &= !dead.word(0);
            *word != 0 || more.contains_key(hash)
        });
        self.entries -= before - shard.first.len();
        self.broom = (self.broom + 1) % SHARDS;
        self.slots.swept();
    }
}

impl Shard {
    /// Drops a block that nobody holds; whether it did.
    fn drop_if_empty(&mut self, hash: u64) -> bool {
        if self.more.get(&hash).is_some_and(Mask::is_empty) {
            self.more.remove(&hash);
        }
        let empty = self.first.get(&hash) == Some(&0) && !self.more.contains_key(&hash);
        if empty {
            self.first.remove(&hash);
        }
        empty
    }
}

/// Bits in the middle: the map places an entry by the lowest ones and tells it apart by the highest.
fn shard_of(hash: u64) -> usize {
    (hash >> 40) as usize % SHARDS
}

#[cfg(test)]
mod tests;
