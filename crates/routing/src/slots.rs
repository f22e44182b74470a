//! Workers as bits: a worker has a slot while it is known, and sets of workers are words of slots.

use branchline_core::WorkerId;
use smallvec::SmallVec;

/// A set of slots; short ones need no memory of their own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Mask(SmallVec<[u64; 4]>);

impl Mask {
    pub(crate) fn word(&self, at: usize) -> u64 {
        self.0.get(at).copied().unwrap_or(0)
    }

    pub(crate) fn has(&self, slot: usize) -> bool {
        self.word(slot / 64) >> (slot % 64) & 1 == 1
    }

    pub(crate) fn set_word(&mut self, at: usize, word: u64) {
        if self.0.len() <= at {
            if word == 0 {
                return;
            }
            self.0.resize(at + 1, 0);
        }
        self.0[at] = word;
    }

    pub(crate) fn insert(&mut self, slot: usize) {
        self.set_word(slot / 64, self.word(slot / 64) | 1 << (slot % 64));
    }

    pub(crate) fn remove(&mut self, slot: usize) {
        self.set_word(slot / 64, self.word(slot / 64) & !(1 << (slot % 64)));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// What is in both.
    pub(crate) fn and(mut self, other: &Self) -> Self {
        for (at, word) in self.0.iter_mut().enumerate() {
            *word &= other.word(at);
        }
        self
    }

    /// What is in either.
    pub(crate) fn or(mut self, other: &Self) -> Self {
        for (at, word) in other.0.iter().enumerate() {
            self.set_word(at, self.word(at) | word);
        }
        self
    }

    /// What is here and not there, slot by slot.
    pub(crate) fn without(&self, other: &Self, mut visit: impl FnMut(usize)) {
        for (at, word) in self.0.iter().enumerate() {
            let mut rest = word & !other.word(at);
            while rest != 0 {
                visit(at * 64 + rest.trailing_zeros() as usize);
                rest &= rest - 1;
            }
        }
    }

    /// Whether all of it is there.
    pub(crate) fn is_within(&self, other: &Self) -> bool {
        self.0.iter().enumerate().all(|(at, word)| word & !other.word(at) == 0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    Used(WorkerId),
    /// Its bits may still stand in this many shards.
    Dead(usize),
}

/// Which worker has which slot. A slot is used again once its bits are gone.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    table: Vec<Slot>,
    /// Slots whose bits count.
    live: Mask,
    dead: Mask,
}

impl Slots {
    pub(crate) fn find(&self, worker: WorkerId) -> Option<usize> {
        self.table.iter().position(|slot| *slot == Slot::Used(worker))
    }

    pub(crate) fn claim(&mut self, worker: WorkerId) -> usize {
        if let Some(slot) = self.find(worker) {
            return slot;
        }
        let slot = self.table.iter().position(|slot| *slot == Slot::Free).unwrap_or_else(|| {
            self.table.push(Slot::Free);
            self.table.len() - 1
        });
        self.table[slot] = Slot::Used(worker);
        self.live.insert(slot);
        slot
    }

    /// The worker is gone; its bits stay in `shards` shards until they are swept.
    pub(crate) fn bury(&mut self, worker: WorkerId, shards: usize) {
        let Some(slot) = self.find(worker) else { return };
        self.live.remove(slot);
        self.dead.insert(slot);
        self.table[slot] = Slot::Dead(shards);
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn live(&self) -> &Mask {
        &self.live
    }

    /// Slots whose bits are to be cleared wherever they are met.
    pub(crate) fn dead(&self) -> &Mask {
        &self.dead
    }

    /// One more shard has no bits of dead slots.
    pub(crate) fn swept(&mut self) {
        for (position, slot) in self.table.iter_mut().enumerate() {
            if let Slot::Dead(left) = slot {
                *left -= 1;
                if *left == 0 {
                    *slot = Slot::Free;
                    self.dead.remove(position);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn mask(slots: &BTreeSet<usize>) -> Mask {
        let mut mask = Mask::default();
        slots.iter().for_each(|slot| mask.insert(*slot));
        mask
    }

    fn slots(mask: &Mask) -> BTreeSet<usize> {
        let mut all = BTreeSet::new();
        mask.without(&Mask::default(), |slot| _ = all.insert(slot));
        all
    }

    proptest! {
        #[test]
        fn masks_are_sets(left in prop::collection::btree_set(0usize..300, 0..20), right in prop::collection::btree_set(0usize..300, 0..20)) {
            let (a, b) = (mask(&left), mask(&right));
            prop_assert_eq!(slots(&a.clone().and(&b)), &left & &right);
            prop_assert_eq!(slots(&a.clone().or(&b)), &left | &right);
            let mut rest = BTreeSet::new();
            a.without(&b, |slot| _ = rest.insert(slot));
            prop_assert_eq!(&rest, &(&left - &right));
            prop_assert_eq!(a.is_within(&b), left.is_subset(&right));
            prop_assert_eq!(a.is_empty(), left.is_empty());
            prop_assert!(left.iter().all(|slot| a.has(*slot)));
        }
    }

    #[test]
    fn a_slot_is_given_again_only_when_its_bits_are_gone() {
        let mut slots = Slots::default();
        assert_eq!([1, 2, 1].map(|id| slots.claim(WorkerId(id))), [0, 1, 0]);
        slots.bury(WorkerId(1), 2);
        assert_eq!((slots.find(WorkerId(1)), slots.live().has(0), slots.dead().has(0)), (None, false, true));
        assert_eq!(slots.claim(WorkerId(3)), 2);
        slots.swept();
        assert_eq!(slots.claim(WorkerId(4)), 3);
        slots.swept();
        assert_eq!((slots.claim(WorkerId(1)), slots.dead().is_empty(), slots.len()), (0, true, 4));
    }
}
