//! The approximate index: where prompts went whose workers report nothing of their caches.
//!
//! A prompt is cut into blocks of [`BLOCK_BYTES`]; a block is named by the chained hash of all bytes up to its end.
//! Entries are kept in order of use under a byte budget, a parent always fresher than its children, so the
//! deepest blocks of the oldest prompts go first.

use std::time::Duration;

use branchline_core::WorkerId;
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::identity::HashMap;
use crate::slots::Mask;

/// Bytes of prompt text a block.
pub const BLOCK_BYTES: usize = 256;

/// Memory of a bucket of the map: a pair and its control byte.
const BUCKET_BYTES: usize = size_of::<(u64, u32)>() + 1;

/// Memory of an entry: itself, and its share of the map at its emptiest. A map fills 7/8 of its buckets; removals leave
/// marks that make it double when more than half of that is in use, so an entry may have up to 32/7 buckets.
const ENTRY_BYTES: usize = size_of::<Entry>() + (32 * BUCKET_BYTES).div_ceil(7);

/// End of the list.
const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Entry {
    hash: u64,
    fresher: u32,
    staler: u32,
    /// When it was last used, in seconds of the caller's clock.
    used: u32,
    /// One bit for each of the first 64 slots of `TextIndex::slots`; further ones are in `TextIndex::more`.
    holders: u64,
}

/// Chained block hash of prompt text → workers it was sent to.
#[derive(Debug)]
pub struct TextIndex {
    places: HashMap<u32>,
    /// Most entries the map has had room for; its own count leaves out places that removals spoilt.
    room: usize,
    entries: Vec<Entry>,
    limit: usize,
    freshest: u32,
    stalest: u32,
    /// Workers by bit; a purged worker's bit is used again.
    slots: Vec<Option<WorkerId>>,
    /// Holders beyond the first 64 slots, by place.
    more: std::collections::HashMap<u32, Mask>,
    ttl: Duration,
}

impl TextIndex {
    /// An index of at most `budget` bytes that believes a prompt to be cached for `ttl` after its last use.
    pub fn new(budget: usize, ttl: Duration) -> Self {
        let limit = (budget / ENTRY_BYTES).clamp(1, NONE as usize - 1);
        Self {
            places: HashMap::default(),
            room: 0,
            entries: Vec::new(),
            limit,
            freshest: NONE,
            stalest: NONE,
            slots: Vec::new(),
            more: std::collections::HashMap::new(),
            ttl,
        }
    }

    /// Chained hashes of the whole blocks of `text` within `namespace`.
    pub fn hashes(namespace: u64, text: &[u8]) -> Vec<u64> {
        let mut parent = namespace;
        let blocks = text.chunks_exact(BLOCK_BYTES);
        blocks
            .map(|block| {
                parent = mix(parent, xxh3_64(block));
                parent
            })
            .collect()
    }

    /// Leading blocks of `hashes` that were sent to each of `workers`, as of `now` on the caller's clock.
    pub fn matches(&self, hashes: &[u64], workers: &[WorkerId], now: Duration) -> Vec<usize> {
        let oldest = now.saturating_sub(self.ttl).as_secs();
        let mut found = vec![0; workers.len()];
        let mut live: SmallVec<[(usize, usize); 16]> = SmallVec::new();
        for (position, worker) in workers.iter().enumerate() {
            live.extend(self.slot(*worker).map(|slot| (position, slot)));
        }
        for (depth, hash) in hashes.iter().enumerate() {
            let Some(place) = self.places.get(hash) else { break };
            let entry = &self.entries[*place as usize];
            if u64::from(entry.used) < oldest {
                break;
            }
            live.retain(|(position, slot)| {
                let has = match *slot {
                    slot @ 0..64 => entry.holders >> slot & 1 == 1,
                    slot => self.more.get(place).is_some_and(|more| more.has(slot)),
                };
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

    /// Notes that the prompt was sent to `worker`. Prompts longer than the whole budget keep their beginning.
    pub fn insert(&mut self, worker: WorkerId, hashes: &[u64], now: Duration) {
        let used = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
        let slot = self.claim(worker);
        let kept = &hashes[..hashes.len().min(self.limit)];
        // Deepest first: what is touched last is freshest.
        for hash in kept.iter().rev() {
            let place = self.touch(*hash);
            let entry = &mut self.entries[place as usize];
            if entry.used < used && now.as_secs().saturating_sub(entry.used.into()) > self.ttl.as_secs() {
                // Whoever had it so long ago has it no more.
                entry.holders = 0;
                self.more.remove(&place);
            }
            entry.used = used;
            match slot {
                0..64 => entry.holders |= 1 << slot,
                _ => self.more.entry(place).or_default().insert(slot),
            }
        }
    }

    /// Forgets a worker, for example because it was restarted.
    pub fn purge(&mut self, worker: WorkerId) {
        let Some(slot) = self.slot(worker) else { return };
        self.slots[slot] = None;
        if slot < 64 {
            self.entries.iter_mut().for_each(|entry| entry.holders &= !(1 << slot));
        } else {
            self.more.values_mut().for_each(|more| more.remove(slot));
        }
    }

    /// Blocks remembered.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is remembered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes allocated.
    pub fn memory(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>() + self.room * BUCKET_BYTES * 8 / 7
    }

    fn slot(&self, worker: WorkerId) -> Option<usize> {
        self.slots.iter().position(|slot| *slot == Some(worker))
    }

    fn claim(&mut self, worker: WorkerId) -> usize {
        if let Some(slot) = self.slot(worker) {
            return slot;
        }
        if let Some(free) = self.slots.iter().position(Option::is_none) {
            self.slots[free] = Some(worker);
            return free;
        }
        self.slots.push(Some(worker));
        self.slots.len() - 1
    }

    /// Makes the block the freshest, adding it if need be in place of the stalest.
    fn touch(&mut self, hash: u64) -> u32 {
        if let Some(place) = self.places.get(&hash).copied() {
            if place != self.freshest {
                self.unlink(place);
                self.link(place);
            }
            return place;
        }
        let entry = Entry { hash, fresher: NONE, staler: NONE, used: 0, holders: 0 };
        let place = if self.entries.len() < self.limit {
            if self.entries.len() == self.entries.capacity() {
                let more = self.entries.len().max(64).min(self.limit - self.entries.len());
                self.entries.reserve_exact(more);
            }
            self.entries.push(entry);
            (self.entries.len() - 1) as u32
        } else {
            let place = self.stalest;
            self.unlink(place);
            self.places.remove(&self.entries[place as usize].hash);
            self.more.remove(&place);
            self.entries[place as usize] = entry;
            place
        };
        self.places.insert(hash, place);
        self.room = self.room.max(self.places.capacity());
        self.link(place);
        place
    }

    fn link(&mut self, place: u32) {
        let entry = &mut self.entries[place as usize];
        entry.fresher = NONE;
        entry.staler = self.freshest;
        match self.freshest {
            NONE => self.stalest = place,
            old => self.entries[old as usize].fresher = place,
        }
        self.freshest = place;
    }

    fn unlink(&mut self, place: u32) {
        let Entry { fresher, staler, .. } = self.entries[place as usize];
        match fresher {
            NONE => self.freshest = staler,
            other => self.entries[other as usize].staler = staler,
        }
        match staler {
            NONE => self.stalest = fresher,
            other => self.entries[other as usize].fresher = fresher,
        }
    }
}

/// Chains two hashes; order matters. Finaliser of splitmix64.
fn mix(parent: u64, block: u64) -> u64 {
    let mut x = parent.rotate_left(23).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ block;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests;
