//! The approximate index: where prompts went whose workers report nothing of their caches.
//!
//! A prompt is cut into blocks of [`BLOCK_BYTES`]; a block is named by the chained hash of all bytes up to its end.
//! Entries are kept in order of use under a byte budget, a parent always fresher than its children, so the
//! deepest blocks of the oldest prompts go first.

use branchline_core::WorkerId;
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::identity::HashMap;

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
    /// One bit a slot of `TextIndex::slots`.
    holders: SmallVec<[u64; 1]>,
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
}

impl TextIndex {
    /// An index of at most `budget` bytes.
    pub fn new(budget: usize) -> Self {
        let limit = (budget / ENTRY_BYTES).clamp(1, NONE as usize - 1);
        Self {
            places: HashMap::default(),
            room: 0,
            entries: Vec::new(),
            limit,
            freshest: NONE,
            stalest: NONE,
            slots: Vec::new(),
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

    /// Leading blocks of `hashes` that were sent to each of `workers`.
    pub fn matches(&self, hashes: &[u64], workers: &[WorkerId]) -> Vec<usize> {
        let mut found = vec![0; workers.len()];
        let mut live: SmallVec<[(usize, usize); 16]> = SmallVec::new();
        for (position, worker) in workers.iter().enumerate() {
            live.extend(self.slot(*worker).map(|slot| (position, slot)));
        }
        for (depth, hash) in hashes.iter().enumerate() {
            let Some(place) = self.places.get(hash) else { break };
            let holders = &self.entries[*place as usize].holders;
            live.retain(|(position, slot)| {
                let has = holders.get(*slot / 64).is_some_and(|word| word >> (*slot % 64) & 1 == 1);
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
    pub fn insert(&mut self, worker: WorkerId, hashes: &[u64]) {
        let slot = self.claim(worker);
        let kept = &hashes[..hashes.len().min(self.limit)];
        // Deepest first: what is touched last is freshest.
        for hash in kept.iter().rev() {
            let place = self.touch(*hash);
            let holders = &mut self.entries[place as usize].holders;
            if holders.len() <= slot / 64 {
                holders.resize(slot / 64 + 1, 0);
            }
            holders[slot / 64] |= 1 << (slot % 64);
        }
    }

    /// Forgets a worker, for example because it was restarted.
    pub fn purge(&mut self, worker: WorkerId) {
        let Some(slot) = self.slot(worker) else { return };
        self.slots[slot] = None;
        for entry in &mut self.entries {
            if let Some(word) = entry.holders.get_mut(slot / 64) {
                *word &= !(1 << (slot % 64));
            }
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
        let entry = Entry { hash, fresher: NONE, staler: NONE, holders: SmallVec::new() };
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
