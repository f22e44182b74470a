//! The host tier: pages that gave their place on the device up and are still in the tree, below those that did not.
//!
//! A page is on the device or in a host slot, never both. Copies are only asked for here, as [`Move`]s in the
//! order in which they must be done, before any page is written again. Slots are this module's; who is stored
//! or fetched and in which order is the ranking's, as for device pages.

use crate::cache::PageCache;
use crate::list::NONE;

/// A copy of one page's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// From the device's page to the host's slot.
    Store {
        /// Device page.
        page: u32,
        /// Host slot.
        slot: u32,
    },
    /// From the host's slot to the device's page.
    Fetch {
        /// Host slot.
        slot: u32,
        /// Device page.
        page: u32,
    },
}

/// Host slots and what they did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCounters {
    /// Slots there are.
    pub total: usize,
    /// Those that hold a page.
    pub used: usize,
    /// Pages stored so far.
    pub stored: u64,
    /// Pages fetched so far.
    pub fetched: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Host {
    pub(crate) total: usize,
    pub(crate) free: Vec<u32>,
    moves: Vec<Move>,
    stored: u64,
    fetched: u64,
}

impl Host {
    pub(crate) fn new(slots: u32) -> Self {
        Self { total: slots as usize, free: (0..slots).rev().collect(), ..Self::default() }
    }

    fn fetch(&mut self, slot: u32, page: u32) {
        self.free.push(slot);
        self.moves.push(Move::Fetch { slot, page });
        self.fetched += 1;
    }
}

impl PageCache {
    /// Brings pages of a prefix that follow its device pages back from the host: how many, as many as fit.
    ///
    /// They are in the tree then, unlocked, for [`Self::find`] to find; their content is there once the moves
    /// are done. Takes free and evictable pages, never more than computing the same tokens would.
    pub fn fetch(&mut self, namespace: &[u8], tokens: &[u32], limit: usize) -> usize {
        if self.host.total == self.host.free.len() {
            return 0;
        }
        let limit = limit.min(tokens.len()) / self.tree.page_size;
        let walk = self.tree.walk(namespace, tokens, limit, &mut Vec::new());
        self.tree.lock(walk.node);
        let mut chain = self.tree.walk_host(walk, tokens, limit);
        chain.truncate(self.available());
        for &index in &chain {
            self.tree.unlist(index); // so that making room does not drop it
        }
        let pages = self.allocate(chain.len()).unwrap_or_default();
        for (&index, &page) in chain.iter().zip(&pages) {
            let slot = self.tree.settle(index, page);
            self.host.fetch(slot, page);
        }
        self.ledger.give_to_tree(&pages).expect("they were private a moment ago");
        self.tree.unlock(walk.node);
        if let Some(&deepest) = chain.last() {
            self.tree.touch(deepest);
        }
        chain.len()
    }

    /// Copies to be done, in this order, before any page is written again.
    pub fn drain_moves(&mut self) -> Vec<Move> {
        std::mem::take(&mut self.host.moves)
    }

    /// The host tier's figures.
    #[must_use]
    pub fn host_counters(&self) -> HostCounters {
        let host = &self.host;
        let used = host.total - host.free.len();
        HostCounters { total: host.total, used, stored: host.stored, fetched: host.fetched }
    }

    /// Takes pages that were computed again into the nodes that the host holds: no copy is needed.
    pub(crate) fn adopt(&mut self, chain: &[u32], pages: &[u32]) {
        for (&index, &page) in chain.iter().zip(pages) {
            self.tree.unlist(index);
            let slot = self.tree.settle(index, page);
            self.host.free.push(slot);
        }
    }

    /// Moves the tail page of the device node of least rank to the host; false if there is no slot to be had.
    ///
    /// A node that has host pages after it always finds a slot: theirs can be taken.
    pub(crate) fn store_page(&mut self) -> bool {
        if self.host.free.is_empty() && !self.drop_host_page() {
            return false;
        }
        let Some(slot) = self.host.free.pop() else {
            return false;
        };
        let page = self.tree.sink(self.tree.ranking.first(), slot);
        self.ledger.evict(page);
        self.host.moves.push(Move::Store { page, slot });
        self.host.stored += 1;
        true
    }

    /// Forgets the host page of least rank; false if none can go.
    pub(crate) fn drop_host_page(&mut self) -> bool {
        let index = self.tree.host_ranking.first();
        if index == NONE {
            return false;
        }
        let Some((slot, hash)) = self.tree.cut(index) else {
            return false;
        };
        self.host.free.push(slot);
        self.events.removed(hash);
        true
    }
}
