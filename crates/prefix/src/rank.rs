//! What goes first: nodes of like value in one recency list each, and a bit mask of the lists in use.
//!
//! A [`Policy`] maps how often a prefix was used and its priority to a class; the lowest class, oldest entry,
//! goes first. Because a policy is monotone in both and a parent has at least its children's, no parent ever
//! goes before its children, and finding the first takes four words, at any tree size.

use crate::CacheError;
use crate::list::{Linked, NONE, RecencyList};

/// Levels of use: exact up to 31, then one for each doubling.
pub const USE_LEVELS: usize = 64;
/// Levels of priority: -128 to 127, beyond them the nearest.
pub const PRIORITY_LEVELS: usize = 256;
const CLASSES: usize = 256;

/// The level of a number of uses.
#[must_use]
pub fn use_level(uses: u32) -> usize {
    match uses {
        0..32 => uses as usize,
        _ => (27 + uses.ilog2() as usize).min(USE_LEVELS - 1),
    }
}

/// The level of a priority.
#[must_use]
pub fn priority_level(priority: i32) -> u8 {
    (priority.clamp(-128, 127) + 128) as u8
}

/// A class for each level of use and of priority, higher ones to be kept longer.
#[derive(Clone)]
pub struct Policy(Vec<u8>);

impl std::fmt::Debug for Policy {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Policy").finish_non_exhaustive()
    }
}

impl Default for Policy {
    /// Recency alone.
    fn default() -> Self {
        Self(vec![0; USE_LEVELS * PRIORITY_LEVELS])
    }
}

impl Policy {
    /// From a table, row after row: one row a level of use, one entry a level of priority.
    ///
    /// # Errors
    /// [`CacheError::PolicySize`], or [`CacheError::PolicyOrder`] if a class falls with more use or priority.
    pub fn new(classes: Vec<u8>) -> Result<Self, CacheError> {
        if classes.len() != USE_LEVELS * PRIORITY_LEVELS {
            return Err(CacheError::PolicySize { entries: classes.len() });
        }
        for at in 0..classes.len() {
            let (uses, priority) = (at / PRIORITY_LEVELS, at % PRIORITY_LEVELS);
            let falls = (uses > 0 && classes[at] < classes[at - PRIORITY_LEVELS])
                || (priority > 0 && classes[at] < classes[at - 1]);
            if falls {
                return Err(CacheError::PolicyOrder { uses, priority: priority as i32 - 128 });
            }
        }
        Ok(Self(classes))
    }

    pub(crate) fn class(&self, uses: u32, priority: u8) -> u8 {
        self.0[use_level(uses) * PRIORITY_LEVELS + usize::from(priority)]
    }
}

/// Arena entries that remember the class they are listed in.
pub(crate) trait Classed: Linked {
    fn class(&mut self) -> &mut u8;
}

/// One list a class. Every operation is O(1).
#[derive(Debug)]
pub(crate) struct Ranking {
    lists: Vec<RecencyList>,
    used: [u64; CLASSES / 64],
}

impl Default for Ranking {
    fn default() -> Self {
        Self { lists: (0..CLASSES).map(|_| RecencyList::default()).collect(), used: [0; CLASSES / 64] }
    }
}

impl Ranking {
    /// The oldest entry of the lowest class, or [`NONE`].
    pub(crate) fn first(&self) -> u32 {
        let word = self.used.iter().position(|&word| word != 0);
        word.map_or(NONE, |word| self.lists[word * 64 + self.used[word].trailing_zeros() as usize].oldest)
    }

    /// The oldest entry of each class in use, lowest class first.
    pub(crate) fn oldest(&self) -> impl Iterator<Item = u32> {
        self.lists.iter().map(|list| list.oldest).filter(|&index| index != NONE)
    }

    /// Lists `index`, which must not be listed, as the newest of a class.
    pub(crate) fn push_newest<N: Classed>(&mut self, arena: &mut [N], index: u32, class: u8) {
        *arena[index as usize].class() = class;
        self.lists[usize::from(class)].push_newest(arena, index);
        self.used[usize::from(class) / 64] |= 1 << (class % 64);
    }

    /// Lists `index` in the class of `anchor`, which must be listed, as its next newer entry.
    pub(crate) fn insert_after<N: Classed>(&mut self, arena: &mut [N], index: u32, anchor: u32) {
        let class = *arena[anchor as usize].class();
        *arena[index as usize].class() = class;
        self.lists[usize::from(class)].insert_after(arena, index, anchor);
    }

    /// Takes `index` out; nothing happens if it isn't listed.
    pub(crate) fn remove<N: Classed>(&mut self, arena: &mut [N], index: u32) {
        let class = *arena[index as usize].class();
        let list = &mut self.lists[usize::from(class)];
        list.remove(arena, index);
        if list.oldest == NONE {
            self.used[usize::from(class) / 64] &= !(1 << (class % 64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_rise_with_what_they_stand_for() {
        assert_eq!([0, 1, 31, 32, 63, 64, 1 << 31, u32::MAX].map(use_level), [0, 1, 31, 32, 32, 33, 58, 58]);
        assert_eq!([i32::MIN, -128, -1, 0, 1, 127, 200].map(priority_level), [0, 0, 127, 128, 129, 255, 255]);
    }

    #[test]
    fn a_policy_that_forgets_use_or_priority_is_refused() {
        let table = |class: fn(usize, usize) -> u8| {
            (0..USE_LEVELS * PRIORITY_LEVELS)
                .map(|at| class(at / PRIORITY_LEVELS, at % PRIORITY_LEVELS))
                .collect()
        };
        assert!(Policy::new(table(|uses, _| uses as u8)).is_ok());
        assert!(Policy::new(table(|_, priority| priority as u8)).is_ok());
        let error = Policy::new(table(|uses, _| u8::from(uses < 5))).unwrap_err();
        assert_eq!(error, CacheError::PolicyOrder { uses: 5, priority: -128 });
        let error = Policy::new(table(|_, priority| u8::from(priority < 128))).unwrap_err();
        assert_eq!(error, CacheError::PolicyOrder { uses: 0, priority: 0 });
        assert_eq!(Policy::new(vec![0; 7]).unwrap_err(), CacheError::PolicySize { entries: 7 });
    }
}
