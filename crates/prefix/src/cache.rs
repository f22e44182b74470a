//! The page cache: tree, ledger and events behind one set of operations.
//!
//! Every operation either happens whole or returns an error with nothing changed. Costs: match and insert
//! O(pages of the prefix), lock and unlock O(nodes of the path), eviction O(1) a page, counters O(1).

use crate::CacheError;
use crate::event::{Event, EventQueue};
use crate::host::Host;
use crate::ledger::Ledger;
use crate::list::NONE;
use crate::rank::{Policy, priority_level};
use crate::tree::{ROOT, Tree};

/// Node and page numbers are `u32`, and the list needs one value for "none".
const MAX_PAGES: usize = 1 << 30;
const MAX_PAGE_SIZE: usize = 1 << 16;

/// What a [`PageCache`] is made of.
#[derive(Debug, Clone)]
pub struct CacheOptions {
    /// Pages in the pool.
    pub num_pages: usize,
    /// Tokens a page.
    pub page_size: usize,
    /// False: nothing is ever shared; `find` finds nothing and `insert` leaves all pages with the caller.
    pub share: bool,
    /// What goes first when pages are short.
    pub policy: Policy,
    /// Slots of the host tier; 0 for none.
    pub host_pages: usize,
}

/// The longest cached whole-page prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Handle for `lock`; stands for exactly `pages`.
    pub node: u64,
    /// The prefix's pages, in order.
    pub pages: Vec<u32>,
}

/// Pages by state; the four always sum to the pool's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Ready for `allocate`.
    pub free: usize,
    /// In the tree, unlocked.
    pub evictable: usize,
    /// In the tree, under a lock.
    pub protected: usize,
    /// The caller's, those freed but still read by a running step included.
    pub private: usize,
}

/// Owner of every KV page of an engine, by number.
#[derive(Debug)]
pub struct PageCache {
    pub(crate) tree: Tree,
    pub(crate) ledger: Ledger,
    pub(crate) events: EventQueue,
    pub(crate) host: Host,
    share: bool,
}

impl PageCache {
    /// A pool of free pages and an empty tree.
    ///
    /// # Errors
    /// [`CacheError::Size`] if a size is zero or over its limit.
    pub fn new(options: CacheOptions) -> Result<Self, CacheError> {
        let sizes =
            [("num_pages", options.num_pages, MAX_PAGES), ("page_size", options.page_size, MAX_PAGE_SIZE)];
        if options.host_pages > MAX_PAGES {
            return Err(CacheError::Size { field: "host_pages", value: options.host_pages, max: MAX_PAGES });
        }
        for (field, value, max) in sizes {
            if value == 0 || value > max {
                return Err(CacheError::Size { field, value, max });
            }
        }
        Ok(Self {
            tree: Tree::new(options.page_size, options.policy),
            ledger: Ledger::new(options.num_pages as u32),
            events: EventQueue::default(),
            host: Host::new(options.host_pages as u32),
            share: options.share,
        })
    }

    /// The longest cached prefix of at most `limit` tokens, in whole pages; makes it the most recent.
    ///
    /// The handle is only good until the next operation that evicts: lock it first.
    pub fn find(&mut self, namespace: &[u8], tokens: &[u32], limit: usize) -> Match {
        if !self.share {
            return Match { node: ROOT, pages: Vec::new() };
        }
        let limit = limit.min(tokens.len()) / self.tree.page_size;
        let mut pages = Vec::new();
        let walk = self.tree.walk(namespace, tokens, limit, &mut pages);
        self.tree.touch(walk.node);
        Match { node: self.tree.handle(walk.node), pages }
    }

    /// Keeps the prefix of `node` from eviction until the matching [`Self::unlock`]; locks count.
    ///
    /// # Errors
    /// [`CacheError::StaleNode`] if any page of the node's prefix has been evicted.
    pub fn lock(&mut self, node: u64) -> Result<(), CacheError> {
        let index = self.tree.resolve(node)?;
        self.tree.lock(index);
        Ok(())
    }

    /// Undoes one [`Self::lock`]; the prefix becomes the most recent.
    ///
    /// # Errors
    /// [`CacheError::StaleNode`] or [`CacheError::NotLocked`].
    pub fn unlock(&mut self, node: u64) -> Result<(), CacheError> {
        let index = self.tree.resolve(node)?;
        if index != NONE && self.tree.nodes[index as usize].locks == 0 {
            return Err(CacheError::NotLocked(node));
        }
        self.tree.unlock(index);
        Ok(())
    }

    /// Counts one more use of the prefix of `node`, by a request of a priority, for policies that rank by it.
    ///
    /// # Errors
    /// [`CacheError::StaleNode`].
    pub fn credit(&mut self, node: u64, priority: i32) -> Result<(), CacheError> {
        let index = self.tree.resolve(node)?;
        self.tree.credit(index, 1, priority_level(priority));
        Ok(())
    }

    /// Tells the time, milliseconds on any clock that does not go back: ages are counted from it.
    pub fn tick(&mut self, now_ms: u64) {
        self.tree.now_ms = self.tree.now_ms.max(now_ms);
    }

    /// Pages that [`Self::allocate`] could hand out now.
    #[must_use]
    pub fn available(&self) -> usize {
        self.ledger.free_count() + self.tree.evictable
    }

    /// `count` private pages, evicting as needed; `None`, and nothing changed, if there aren't as many.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<u32>> {
        if count > self.available() {
            return None;
        }
        self.evict(count.saturating_sub(self.ledger.free_count()));
        Some(self.ledger.take(count))
    }

    /// Puts a prefix into the tree: the deepest node, and how many whole pages were there before.
    ///
    /// `pages[present..]` must be private and become the tree's. `pages[..present]` are looked at only by
    /// number: those that are not the tree's own stay private to the caller, whose tables are never
    /// remapped. The prefix's priority becomes at least `priority`. Tokens after the last whole page are ignored. Without sharing all pages count as present.
    ///
    /// # Errors
    /// [`CacheError::PageCount`], [`CacheError::NotPrivate`] or [`CacheError::NoSuchPage`].
    pub fn insert(
        &mut self,
        namespace: &[u8],
        tokens: &[u32],
        pages: &[u32],
        priority: i32,
    ) -> Result<(u64, usize), CacheError> {
        let size = self.tree.page_size;
        let whole = tokens.len() / size;
        // One page more may be given: the table's partial tail.
        if pages.len() < whole || pages.len() > tokens.len().div_ceil(size) {
            return Err(CacheError::PageCount { pages: pages.len(), tokens: tokens.len(), page_size: size });
        }
        if !self.share || whole == 0 {
            return Ok((ROOT, whole));
        }
        let mut present_pages = Vec::new();
        let walk = self.tree.walk(namespace, tokens, whole, &mut present_pages);
        let fresh = &pages[walk.pages..whole];
        self.ledger.give_to_tree(fresh)?;
        let chain = self.tree.walk_host(walk, tokens, whole);
        self.adopt(&chain, fresh);
        let mut deepest = chain.last().copied().unwrap_or(walk.node);
        let fresh = &fresh[chain.len()..];
        if !fresh.is_empty() {
            let parent = if deepest == NONE { self.tree.namespace_root(namespace) } else { deepest };
            let new_tokens = &tokens[(whole - fresh.len()) * size..whole * size];
            deepest = self.tree.add_leaf(parent, new_tokens, fresh);
            let parent_hash = self.tree.last_hash(parent);
            self.events.stored(parent_hash, &self.tree.nodes[deepest as usize].hashes, new_tokens);
            self.bound_events();
        }
        self.tree.credit(deepest, 0, priority_level(priority));
        Ok((self.tree.handle(deepest), walk.pages))
    }

    /// Gives private pages back: at once for an `epoch` that is retired (0 always is), else when it is.
    ///
    /// # Errors
    /// [`CacheError::NotPrivate`] or [`CacheError::NoSuchPage`]; then no page was freed.
    pub fn free(&mut self, pages: &[u32], epoch: u64) -> Result<(), CacheError> {
        self.ledger.release(pages, epoch)
    }

    /// Says that the step `epoch` and all before it no longer read any page.
    pub fn retire(&mut self, epoch: u64) {
        self.ledger.retire(epoch);
    }

    /// Evicts up to `pages` pages, tail pages of the leaves of least rank first: how many it were.
    ///
    /// With a host tier they move there, and those of least rank there are dropped.
    pub fn evict(&mut self, pages: usize) -> usize {
        let mut evicted = 0;
        while evicted < pages && self.tree.evictable > 0 {
            if !self.store_page() {
                self.drop_page();
            }
            evicted += 1;
        }
        self.bound_events();
        evicted
    }

    fn drop_page(&mut self) {
        if let Some((page, hash)) = self.tree.evict_page() {
            self.ledger.evict(page);
            self.events.removed(hash);
        }
    }

    /// Drops all that is unlocked, in both tiers: how many pages.
    pub fn flush(&mut self) -> usize {
        let mut evicted = self.tree.evictable;
        while self.drop_host_page() {
            evicted += 1;
        }
        while self.tree.evictable > 0 {
            self.drop_page();
        }
        self.bound_events();
        if evicted > 0 && self.tree.protected == 0 {
            self.events.fold(Vec::new());
        }
        evicted
    }

    /// Pages by state.
    #[must_use]
    pub fn counters(&self) -> Counters {
        Counters {
            free: self.ledger.free_count(),
            evictable: self.tree.evictable,
            protected: self.tree.protected,
            private: self.ledger.private_count(),
        }
    }

    /// Events since the last drain, in order.
    pub fn drain_events(&mut self) -> Vec<Event> {
        self.events.drain()
    }

    /// Everything resident as [`Event::Stored`], parents before children.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Event> {
        let mut children: Vec<Vec<u32>> = vec![Vec::new(); self.tree.nodes.len()];
        for (index, node) in self.tree.nodes.iter().enumerate().skip(1) {
            if node.alive && node.namespace.is_none() {
                children[node.parent as usize].push(index as u32);
            }
        }
        let mut stack: Vec<u32> = self.tree.namespaces.values().copied().collect();
        let mut stored = Vec::new();
        while let Some(index) = stack.pop() {
            let node = &self.tree.nodes[index as usize];
            if node.namespace.is_none() {
                stored.push(Event::Stored {
                    parent: self.tree.last_hash(node.parent),
                    hashes: node.hashes.clone(),
                    tokens: node.tokens.clone(),
                });
            }
            stack.extend(&children[index as usize]);
        }
        stored
    }

    /// A queue that nobody drains is replaced by what it amounts to.
    fn bound_events(&mut self) {
        if self.events.blocks() > 1024 + 4 * (self.ledger.num_pages() + self.host.total) {
            let resident = self.snapshot();
            self.events.fold(resident);
        }
    }
}

/// Pages to allocate so that a sequence grows from `prefix` to `length` tokens: a partial tail page is used first.
#[must_use]
pub fn page_demand(prefix: usize, length: usize, page_size: usize) -> usize {
    length.div_ceil(page_size).saturating_sub(prefix.div_ceil(page_size))
}

#[cfg(test)]
mod tests;
