//! The radix tree's nodes and walks: whole pages of tokens, keyed by namespace and tokens.
//!
//! A node is a run of pages. On a split the lower half keeps the node's number, so a handle always stands
//! for the same prefix. Unlocked nodes are ranked, every parent above its children: the first to go is
//! therefore a leaf, and eviction needs no search. Equal hashes are never trusted: children are found by
//! hash and then compared by parent and tokens.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::CacheError;
use crate::hash;
use crate::list::{Linked, Links, NONE};
use crate::rank::{Classed, Policy, Ranking};

/// The handle of the empty prefix: always valid, locking it does nothing.
pub const ROOT: u64 = 0;

#[derive(Debug, Default)]
pub(crate) struct Node {
    /// Raised whenever the node stops standing for the prefix its handles were given for.
    pub(crate) generation: u32,
    pub(crate) alive: bool,
    pub(crate) parent: u32,
    pub(crate) children: u32,
    pub(crate) locks: u32,
    /// Only the root of a namespace has one, and only it has no parent and no pages.
    pub(crate) namespace: Option<Arc<[u8]>>,
    pub(crate) tokens: Vec<u32>,
    /// Device pages, or the one host slot of a node that is on the host.
    pub(crate) pages: Vec<u32>,
    pub(crate) on_host: bool,
    /// Chained hash of each page.
    pub(crate) hashes: Vec<u64>,
    /// Requests that began on it, and the level of the highest priority that has used it.
    pub(crate) uses: u32,
    pub(crate) priority: u8,
    /// When it was last used, milliseconds by the owner's clock.
    pub(crate) used_ms: u64,
    pub(crate) class: u8,
    links: Links,
}

impl Linked for Node {
    fn links(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Classed for Node {
    fn class(&mut self) -> &mut u8 {
        &mut self.class
    }
}

impl Node {
    pub(crate) fn is_listed(&self) -> bool {
        self.links.listed
    }

    pub(crate) fn next_newer(&self) -> Option<u32> {
        (self.links.newer != NONE).then_some(self.links.newer)
    }
}

/// Where a walk ended: `node` stands for exactly the first `pages` pages ([`NONE`]: no such namespace).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Walk {
    pub(crate) node: u32,
    pub(crate) pages: usize,
}

#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) page_size: usize,
    /// Index 0 is never used, so that handle 0 can be the empty prefix.
    pub(crate) nodes: Vec<Node>,
    spare: Vec<u32>,
    pub(crate) namespaces: HashMap<Arc<[u8]>, u32>,
    /// First page's chained hash → nodes; more than one only if hashes collide.
    pub(crate) by_hash: HashMap<u64, SmallVec<[u32; 2]>>,
    pub(crate) ranking: Ranking,
    pub(crate) host_ranking: Ranking,
    policy: Policy,
    pub(crate) now_ms: u64,
    /// Pages of unlocked nodes and of locked ones.
    pub(crate) evictable: usize,
    pub(crate) protected: usize,
}

impl Tree {
    pub(crate) fn new(page_size: usize, policy: Policy) -> Self {
        Self {
            page_size,
            nodes: vec![Node::default()],
            spare: Vec::new(),
            namespaces: HashMap::new(),
            by_hash: HashMap::new(),
            ranking: Ranking::default(),
            host_ranking: Ranking::default(),
            policy,
            now_ms: 0,
            evictable: 0,
            protected: 0,
        }
    }

    /// Living nodes with pages.
    pub(crate) fn count(&self) -> usize {
        self.nodes.len() - 1 - self.spare.len() - self.namespaces.len()
    }

    pub(crate) fn handle(&self, index: u32) -> u64 {
        if index == NONE || self.nodes[index as usize].namespace.is_some() {
            return ROOT;
        }
        u64::from(self.nodes[index as usize].generation) << 32 | u64::from(index)
    }

    /// The living node of a handle; [`NONE`] for [`ROOT`].
    pub(crate) fn resolve(&self, handle: u64) -> Result<u32, CacheError> {
        if handle == ROOT {
            return Ok(NONE);
        }
        let (generation, index) = ((handle >> 32) as u32, handle as u32);
        match self.nodes.get(index as usize) {
            Some(node)
                if node.alive
                    && node.generation == generation
                    && node.namespace.is_none()
                    && !node.on_host =>
            {
                Ok(index)
            }
            _ => Err(CacheError::StaleNode(handle)),
        }
    }

    /// Follows `tokens` for at most `limit` device pages, splitting the node in which the match ends.
    pub(crate) fn walk(
        &mut self,
        namespace: &[u8],
        tokens: &[u32],
        limit: usize,
        pages: &mut Vec<u32>,
    ) -> Walk {
        let Some(&root) = self.namespaces.get(namespace) else {
            return Walk { node: NONE, pages: 0 };
        };
        let size = self.page_size;
        let mut at = Walk { node: root, pages: 0 };
        while at.pages < limit {
            let rest = &tokens[at.pages * size..limit * size];
            let Some(child) = self.child(at.node, &rest[..size]) else {
                break;
            };
            let node = &self.nodes[child as usize];
            if node.on_host {
                break;
            }
            let equal = common_pages(rest, &node.tokens, size);
            pages.extend_from_slice(&node.pages[..equal]);
            at.pages += equal;
            if equal < node.pages.len() {
                at.node = self.split(child, equal);
                break;
            }
            at.node = child;
        }
        at
    }

    /// The host nodes, one page each, that follow where a walk ended, up to `limit` pages from the start.
    pub(crate) fn walk_host(&self, walk: Walk, tokens: &[u32], limit: usize) -> Vec<u32> {
        let (size, mut at, mut chain) = (self.page_size, walk.node, Vec::new());
        if at == NONE {
            return chain;
        }
        for block in tokens[walk.pages * size..limit * size].chunks_exact(size) {
            match self.child(at, block) {
                Some(child) if self.nodes[child as usize].on_host => at = child,
                _ => break,
            }
            chain.push(at);
        }
        chain
    }

    fn child(&self, parent: u32, first_page: &[u32]) -> Option<u32> {
        let hash = hash::chain(self.last_hash(parent), first_page);
        self.by_hash.get(&hash)?.iter().copied().find(|&index| {
            let node = &self.nodes[index as usize];
            node.parent == parent && node.tokens[..self.page_size] == *first_page
        })
    }

    /// The hash that the first page after `index` is chained to.
    pub(crate) fn last_hash(&self, index: u32) -> u64 {
        let node = &self.nodes[index as usize];
        match (&node.namespace, node.hashes.last()) {
            (Some(namespace), _) => hash::root(namespace),
            (None, Some(&last)) => last,
            (None, None) => 0,
        }
    }

    /// Splits after `keep` pages and returns the new upper node; locks and recency are those of the old one.
    fn split(&mut self, lower: u32, keep: usize) -> u32 {
        let size = self.page_size;
        let node = &mut self.nodes[lower as usize];
        // Most splits are at a prompt's last page: only the tail is copied.
        let (tokens, pages, hashes) =
            (node.tokens.split_off(keep * size), node.pages.split_off(keep), node.hashes.split_off(keep));
        let upper_node = Node {
            parent: node.parent,
            children: 1,
            locks: node.locks,
            uses: node.uses,
            priority: node.priority,
            used_ms: node.used_ms,
            tokens: std::mem::replace(&mut node.tokens, tokens),
            pages: std::mem::replace(&mut node.pages, pages),
            hashes: std::mem::replace(&mut node.hashes, hashes),
            ..Node::default()
        };
        let (listed, first_hash, lower_hash) = (node.is_listed(), upper_node.hashes[0], node.hashes[0]);
        let upper = self.add(upper_node);
        self.nodes[lower as usize].parent = upper;
        self.unindex(first_hash, lower);
        self.by_hash.entry(first_hash).or_default().push(upper);
        self.by_hash.entry(lower_hash).or_default().push(lower);
        if listed {
            self.ranking.insert_after(&mut self.nodes, upper, lower);
        }
        upper
    }

    /// The root of a namespace, made if need be. A childless root must get a child at once.
    pub(crate) fn namespace_root(&mut self, namespace: &[u8]) -> u32 {
        if let Some(&root) = self.namespaces.get(namespace) {
            return root;
        }
        let key: Arc<[u8]> = namespace.into();
        let root = self.add(Node { parent: NONE, namespace: Some(key.clone()), ..Node::default() });
        self.namespaces.insert(key, root);
        root
    }

    /// Hangs an unlocked leaf of whole pages under `parent`.
    pub(crate) fn add_leaf(&mut self, parent: u32, tokens: &[u32], pages: &[u32]) -> u32 {
        let mut last = self.last_hash(parent);
        let hashes: Vec<u64> = tokens
            .chunks_exact(self.page_size)
            .map(|block| {
                last = hash::chain(last, block);
                last
            })
            .collect();
        let first_hash = hashes[0];
        let leaf = self.add(Node {
            parent,
            tokens: tokens.to_vec(),
            pages: pages.to_vec(),
            hashes,
            used_ms: self.now_ms,
            ..Node::default()
        });
        self.nodes[parent as usize].children += 1;
        self.by_hash.entry(first_hash).or_default().push(leaf);
        self.list(leaf);
        self.evictable += pages.len();
        leaf
    }

    /// Ranks an unlocked node, which is not listed, as the newest of its class in its tier.
    fn list(&mut self, index: u32) {
        let node = &self.nodes[index as usize];
        let class = self.policy.class(node.uses, node.priority);
        let ranking = if node.on_host { &mut self.host_ranking } else { &mut self.ranking };
        ranking.push_newest(&mut self.nodes, index, class);
    }

    /// Takes a node out of its tier's ranking.
    pub(crate) fn unlist(&mut self, index: u32) {
        let on_host = self.nodes[index as usize].on_host;
        let ranking = if on_host { &mut self.host_ranking } else { &mut self.ranking };
        ranking.remove(&mut self.nodes, index);
    }

    /// Puts an unlisted host node on a device page; the slot it had.
    pub(crate) fn settle(&mut self, index: u32, page: u32) -> u32 {
        let node = &mut self.nodes[index as usize];
        node.on_host = false;
        let slot = std::mem::replace(&mut node.pages[0], page);
        self.evictable += 1;
        self.list(index);
        slot
    }

    /// Puts the last page of an unlocked device node, as a node of its own, on a host slot; the page it had.
    ///
    /// The node keeps its number and what follows it; what it had before that page becomes its new parent.
    pub(crate) fn sink(&mut self, index: u32, slot: u32) -> u32 {
        let pages = self.nodes[index as usize].pages.len();
        if pages > 1 {
            self.split(index, pages - 1);
        }
        self.unlist(index);
        let node = &mut self.nodes[index as usize];
        node.on_host = true;
        node.generation = node.generation.wrapping_add(1);
        let page = std::mem::replace(&mut node.pages[0], slot);
        self.evictable -= 1;
        self.list(index);
        page
    }

    /// Makes a node and its ancestors the newest, parents last; locked nodes stay unlisted.
    pub(crate) fn touch(&mut self, index: u32) {
        self.credit(index, 0, 0);
    }

    /// [`Self::touch`], with so many uses more and at least a level of priority for the whole path.
    pub(crate) fn credit(&mut self, index: u32, uses: u32, priority: u8) {
        self.for_path(index, |tree, at| {
            let node = &mut tree.nodes[at as usize];
            node.uses = node.uses.saturating_add(uses);
            node.priority = node.priority.max(priority);
            node.used_ms = tree.now_ms;
            if node.is_listed() {
                tree.unlist(at);
                tree.list(at);
            }
        });
    }

    pub(crate) fn lock(&mut self, index: u32) {
        self.for_path(index, |tree, at| {
            let node = &mut tree.nodes[at as usize];
            node.locks += 1;
            if node.locks == 1 {
                let pages = node.pages.len();
                tree.evictable -= pages;
                tree.protected += pages;
                tree.ranking.remove(&mut tree.nodes, at);
            }
        });
    }

    /// The node must be locked; its ancestors then are too.
    pub(crate) fn unlock(&mut self, index: u32) {
        self.for_path(index, |tree, at| {
            let node = &mut tree.nodes[at as usize];
            node.locks -= 1;
            node.used_ms = tree.now_ms;
            if node.locks == 0 {
                let pages = node.pages.len();
                tree.evictable += pages;
                tree.protected -= pages;
                tree.list(at);
            }
        });
    }

    fn for_path(&mut self, index: u32, mut visit: impl FnMut(&mut Self, u32)) {
        let mut at = index;
        while at != NONE && self.nodes[at as usize].namespace.is_none() {
            let parent = self.nodes[at as usize].parent;
            visit(self, at);
            at = parent;
        }
    }

    /// Drops the last page of the leaf of least rank: its page number and hash.
    pub(crate) fn evict_page(&mut self) -> Option<(u32, u64)> {
        let cut = self.cut(self.ranking.first())?;
        self.evictable -= 1;
        Some(cut)
    }

    /// Drops the last page of a leaf of either tier: its page or slot and its hash.
    pub(crate) fn cut(&mut self, index: u32) -> Option<(u32, u64)> {
        let node = self.nodes.get_mut(index as usize)?;
        let (page, hash) = (node.pages.pop()?, node.hashes.pop()?);
        node.tokens.truncate(node.pages.len() * self.page_size);
        node.generation = node.generation.wrapping_add(1);
        if node.pages.is_empty() {
            let parent = node.parent;
            self.unindex(hash, index);
            self.unlist(index);
            self.drop_node(index);
            self.nodes[parent as usize].children -= 1;
            self.drop_empty_root(parent);
        }
        Some((page, hash))
    }

    fn drop_empty_root(&mut self, index: u32) {
        let node = &self.nodes[index as usize];
        if node.children == 0
            && let Some(namespace) = node.namespace.clone()
        {
            self.namespaces.remove(&namespace);
            self.drop_node(index);
        }
    }

    fn add(&mut self, node: Node) -> u32 {
        let node = Node { alive: true, ..node };
        if let Some(index) = self.spare.pop() {
            let generation = self.nodes[index as usize].generation;
            self.nodes[index as usize] = Node { generation, ..node };
            return index;
        }
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    fn drop_node(&mut self, index: u32) {
        let node = &mut self.nodes[index as usize];
        *node = Node { generation: node.generation.wrapping_add(1), ..Node::default() };
        self.spare.push(index);
    }

    fn unindex(&mut self, hash: u64, index: u32) {
        if let Some(nodes) = self.by_hash.get_mut(&hash) {
            nodes.retain(|&mut node| node != index);
            if nodes.is_empty() {
                self.by_hash.remove(&hash);
            }
        }
    }
}

/// Whole pages that both begin with. One comparison if one of them goes on where the other ends.
fn common_pages(a: &[u32], b: &[u32], size: usize) -> usize {
    let whole = a.len().min(b.len()) / size * size;
    if a[..whole] == b[..whole] {
        return whole / size;
    }
    a.chunks_exact(size).zip(b.chunks_exact(size)).take_while(|(a, b)| a == b).count()
}
