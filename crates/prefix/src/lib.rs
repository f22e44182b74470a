//! Radix tree, page ledger and chained block hashes, shared by the gateway index and the engine cache.
//!
//! [`PageCache`] owns every KV page of an engine by number: it never sees the memory behind a page, never
//! blocks, and holds no lock: one thread drives it. [`hash`] and [`namespace`] are pure functions that the
//! gateway's index uses too, so both sides name a block alike.

mod audit;
mod cache;
mod event;
pub mod hash;
mod host;
mod ledger;
mod list;
pub mod namespace;
mod rank;
mod tree;
mod view;

pub use cache::{CacheOptions, Counters, Match, PageCache, page_demand};
pub use event::Event;
pub use host::{HostCounters, Move};
pub use rank::{PRIORITY_LEVELS, Policy, USE_LEVELS, priority_level, use_level};
pub use tree::ROOT;
pub use view::{NodeView, TreeView};

/// A misuse of the cache: the caller named a page, node or option that can't be right. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// A zero or oversized size.
    #[error("{field} is {value}: give a number from 1 to {max}")]
    Size {
        /// The option.
        field: &'static str,
        /// What was given.
        value: usize,
        /// The largest allowed value.
        max: usize,
    },
    /// The handle is no living node: it was evicted after it was returned, or never existed.
    #[error("node {0} does not exist: lock a node before anything that may evict it")]
    StaleNode(u64),
    /// `unlock` without a `lock`.
    #[error("node {0} is not locked: unlock a node once for each lock")]
    NotLocked(u64),
    /// A page number at or over the pool's size.
    #[error("page {page} does not exist: the pool has {num_pages} pages")]
    NoSuchPage {
        /// The number given.
        page: u32,
        /// The pool's size.
        num_pages: u32,
    },
    /// The page is in another state than private, or was named twice.
    #[error(
        "page {0} is not private to the caller: give only pages got from allocate and not yet given back"
    )]
    NotPrivate(u32),
    /// An eviction table of another size.
    #[error("the eviction policy has {entries} entries: give 16384, 64 levels of use by 256 priorities")]
    PolicySize {
        /// Entries given.
        entries: usize,
    },
    /// An eviction table by which a prefix could go before what follows it.
    #[error(
        "the eviction policy ranks use level {uses} with priority {priority} below less of either: its rank must \
         not fall with more use or higher priority"
    )]
    PolicyOrder {
        /// Level of use.
        uses: usize,
        /// Priority.
        priority: i32,
    },
    /// Fewer pages than the whole blocks of the tokens, or more than the tokens can fill.
    #[error(
        "pages has {pages} entries for {tokens} tokens: give one page for each whole block of {page_size}"
    )]
    PageCount {
        /// Pages given.
        pages: usize,
        /// Tokens given.
        tokens: usize,
        /// Tokens a page.
        page_size: usize,
    },
}
