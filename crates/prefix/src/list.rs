//! An intrusive doubly linked list over arena indices: O(1) push, insert and remove, no allocation an entry.
//!
//! The owner keeps the links in its own arena and guarantees that an index is in the list at most once.

/// "No index".
pub(crate) const NONE: u32 = u32::MAX;

/// An entry's neighbours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Links {
    pub(crate) older: u32,
    pub(crate) newer: u32,
    pub(crate) listed: bool,
}

impl Default for Links {
    fn default() -> Self {
        Self { older: NONE, newer: NONE, listed: false }
    }
}

/// Arena entries that carry [`Links`].
pub(crate) trait Linked {
    fn links(&mut self) -> &mut Links;
}

/// Oldest to newest.
#[derive(Debug)]
pub(crate) struct RecencyList {
    pub(crate) oldest: u32,
    newest: u32,
}

impl Default for RecencyList {
    fn default() -> Self {
        Self { oldest: NONE, newest: NONE }
    }
}

impl RecencyList {
    pub(crate) fn push_newest<N: Linked>(&mut self, arena: &mut [N], index: u32) {
        self.insert_after(arena, index, self.newest);
    }

    /// Inserts `index` as the next newer entry of `anchor`; at the old end if `anchor` is [`NONE`].
    pub(crate) fn insert_after<N: Linked>(&mut self, arena: &mut [N], index: u32, anchor: u32) {
        let newer = if anchor == NONE { self.oldest } else { arena[anchor as usize].links().newer };
        *arena[index as usize].links() = Links { older: anchor, newer, listed: true };
        self.join(arena, anchor, index);
        self.join(arena, index, newer);
    }

    /// Takes `index` out; nothing happens if it isn't listed.
    pub(crate) fn remove<N: Linked>(&mut self, arena: &mut [N], index: u32) {
        let Links { older, newer, listed } = std::mem::take(arena[index as usize].links());
        if listed {
            self.join(arena, older, newer);
        }
    }

    fn join<N: Linked>(&mut self, arena: &mut [N], older: u32, newer: u32) {
        if older == NONE {
            self.oldest = newer;
        } else {
            arena[older as usize].links().newer = newer;
        }
        if newer == NONE {
            self.newest = older;
        } else {
            arena[newer as usize].links().older = older;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Linked for Links {
        fn links(&mut self) -> &mut Links {
            self
        }
    }

    fn order(list: &RecencyList, arena: &[Links]) -> Vec<u32> {
        std::iter::successors((list.oldest != NONE).then_some(list.oldest), |&i| {
            let newer = arena[i as usize].newer;
            (newer != NONE).then_some(newer)
        })
        .collect()
    }

    proptest! {
        #[test]
        fn list_behaves_like_a_vector(ops in prop::collection::vec((0u8..3, 0u32..8, 0u32..8), 1..60)) {
            let mut arena = vec![Links::default(); 8];
            let (mut list, mut oracle) = (RecencyList::default(), Vec::<u32>::new());
            for (op, index, anchor) in ops {
                list.remove(&mut arena, index);
                oracle.retain(|&i| i != index);
                if op == 1 {
                    list.push_newest(&mut arena, index);
                    oracle.push(index);
                } else if op == 2 && let Some(at) = oracle.iter().position(|&i| i == anchor) {
                    list.insert_after(&mut arena, index, anchor);
                    oracle.insert(at + 1, index);
                }
                prop_assert_eq!(order(&list, &arena), oracle.clone());
            }
        }
    }
}
