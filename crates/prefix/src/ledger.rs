//! Where each page is: free, in the tree, private to the caller, or freed but still read by a running step.
//!
//! O(1) a page, and counters that are kept, not computed. The tree decides what is evictable; the ledger
//! only knows that a page is the tree's.

use std::collections::BTreeMap;

use crate::CacheError;

/// A page's one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageState {
    Free,
    Tree,
    Private,
    /// Freed, but a step that may read it has not been retired.
    InFlight,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) states: Vec<PageState>,
    /// A stack: the page freed last is the one most likely still in a CPU cache.
    pub(crate) free: Vec<u32>,
    pub(crate) in_flight: BTreeMap<u64, Vec<u32>>,
    retired: u64,
    private: usize,
}

impl Ledger {
    pub(crate) fn new(num_pages: u32) -> Self {
        Self {
            states: vec![PageState::Free; num_pages as usize],
            free: (0..num_pages).rev().collect(),
            in_flight: BTreeMap::new(),
            retired: 0,
            private: 0,
        }
    }

    pub(crate) fn num_pages(&self) -> usize {
        self.states.len()
    }

    pub(crate) fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Private pages, those still in flight included.
    pub(crate) fn private_count(&self) -> usize {
        self.private
    }

    pub(crate) fn state(&self, page: u32) -> Result<PageState, CacheError> {
        let num_pages = self.states.len() as u32;
        self.states.get(page as usize).copied().ok_or(CacheError::NoSuchPage { page, num_pages })
    }

    /// Takes `count` free pages; the caller has made sure that there are as many.
    pub(crate) fn take(&mut self, count: usize) -> Vec<u32> {
        let rest = self.free.len().saturating_sub(count);
        let taken: Vec<u32> = self.free.drain(rest..).rev().collect();
        for &page in &taken {
            self.states[page as usize] = PageState::Private;
        }
        self.private += taken.len();
        taken
    }

    /// Private → tree. On an error nothing has changed.
    pub(crate) fn give_to_tree(&mut self, pages: &[u32]) -> Result<(), CacheError> {
        self.leave_private(pages, PageState::Tree)
    }

    /// Tree → free.
    pub(crate) fn evict(&mut self, page: u32) {
        self.states[page as usize] = PageState::Free;
        self.free.push(page);
    }

    /// Private → free, or → in flight until `epoch` is retired. On an error nothing has changed.
    pub(crate) fn release(&mut self, pages: &[u32], epoch: u64) -> Result<(), CacheError> {
        if epoch <= self.retired {
            self.leave_private(pages, PageState::Free)?;
            self.free.extend(pages.iter().rev());
            return Ok(());
        }
        self.leave_private(pages, PageState::InFlight)?;
        // Still counted as private until the step has been retired.
        self.private += pages.len();
        self.in_flight.entry(epoch).or_default().extend_from_slice(pages);
        Ok(())
    }

    /// Frees what waited for `epoch` or an earlier one: steps end in order.
    pub(crate) fn retire(&mut self, epoch: u64) {
        self.retired = self.retired.max(epoch);
        while let Some(entry) = self.in_flight.first_entry() {
            if *entry.key() > self.retired {
                break;
            }
            let pages = entry.remove();
            self.private -= pages.len();
            for &page in pages.iter().rev() {
                self.states[page as usize] = PageState::Free;
                self.free.push(page);
            }
        }
    }

    fn leave_private(&mut self, pages: &[u32], to: PageState) -> Result<(), CacheError> {
        for (done, &page) in pages.iter().enumerate() {
            let fault = match self.state(page) {
                Ok(PageState::Private) => {
                    self.states[page as usize] = to;
                    continue;
                }
                Ok(_) => CacheError::NotPrivate(page),
                Err(error) => error,
            };
            for &undone in &pages[..done] {
                self.states[undone as usize] = PageState::Private;
            }
            return Err(fault);
        }
        self.private -= pages.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_named_twice_is_refused_and_nothing_changes() {
        let mut ledger = Ledger::new(3);
        let pages = ledger.take(2);
        assert_eq!(pages, [0, 1]);
        assert_eq!(ledger.release(&[0, 1, 0], 0), Err(CacheError::NotPrivate(0)));
        assert_eq!(ledger.release(&[0, 7], 0), Err(CacheError::NoSuchPage { page: 7, num_pages: 3 }));
        assert_eq!((ledger.free_count(), ledger.private_count()), (1, 2));
        assert_eq!(ledger.states[..2], [PageState::Private; 2]);
    }

    #[test]
    fn a_freed_page_is_not_reused_before_its_step_is_retired() {
        let mut ledger = Ledger::new(2);
        let pages = ledger.take(2);
        ledger.release(&pages[..1], 3).unwrap();
        ledger.release(&pages[1..], 4).unwrap();
        assert_eq!((ledger.free_count(), ledger.private_count()), (0, 2));
        ledger.retire(3);
        assert_eq!((ledger.free_count(), ledger.private_count()), (1, 1));
        ledger.retire(9);
        assert_eq!((ledger.free_count(), ledger.private_count()), (2, 0));
        let page = ledger.take(1);
        ledger.release(&page, 5).unwrap();
        assert_eq!(ledger.free_count(), 2, "an epoch that is already retired frees at once");
    }
}
