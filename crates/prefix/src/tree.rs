//! The radix tree's nodes and walks: whole pages of tokens, keyed by namespace and tokens.
//!
//! A node is a run of pages. On a split the lower half keeps the node's number, so a handle always stands
//! for the same prefix. Unlocked nodes are in one recency list in which every parent is newer than its
//! children: its oldest entry is therefore a leaf, and eviction needs no search. Equal hashes are never
//! trusted: children are found by hash and then compared by parent and tokens.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::CacheError;
use crate::hash;
use crate::list::{Linked, Links, NONE, RecencyList};

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
    pub(crate) pages: Vec<u32>,
    /// Chained hash of each page.
    pub(crate) hashes: Vec<u64>,
    links: Links,
}

impl Linked for Node {
    fn links(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Node {
    pub(crate) fn is_listed(&self) -> bool {
        self.links.listed
    }

    pub(crate) fn newer(&self) -> u32 {
        self.links.newer
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
    pub(crate) recency: RecencyList,
    /// Pages of unlocked nodes and of locked ones.
    pub(crate) evictable: usize,
    pub(crate) protected: usize,
}

impl Tree {
    pub(crate) fn new(page_size: usize) -> Self {
        Self {
            page_size,
            nodes: vec![Node::default()],
            spare: Vec::new(),
            namespaces: HashMap::new(),
            by_hash: HashMap::new(),
            recency: RecencyList::default(),
            evictable: 0,
            protected: 0,
        }
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
            Some(node) if node.alive && node.generation == generation && node.namespace.is_none() => {
                Ok(index)
            }
            _ => Err(CacheError::StaleNode(handle)),
        }
    }

    /// Follows `tokens` for at most `limit` pages, splitting the node in which the match ends.
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
            let equal = rest
                .chunks_exact(size)
                .zip(node.tokens.chunks_exact(size))
                .take_while(|(a, b)| a == b)
                .count();
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
            self.recency.insert_after(&mut self.nodes, upper, lower);
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
            ..Node::default()
        });
        self.nodes[parent as usize].children += 1;
        self.by_hash.entry(first_hash).or_default().push(leaf);
        self.recency.push_newest(&mut self.nodes, leaf);
        self.evictable += pages.len();
        leaf
    }

    /// Makes a node and its ancestors the newest, parents last; locked nodes stay out of the list.
    pub(crate) fn touch(&mut self, index: u32) {
        self.for_path(index, |tree, at| {
            if tree.nodes[at as usize].is_listed() {
                tree.recency.remove(&mut tree.nodes, at);
                tree.recency.push_newest(&mut tree.nodes, at);
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
                tree.recency.remove(&mut tree.nodes, at);
            }
        });
    }

    /// The node must be locked; its ancestors then are too.
    pub(crate) fn unlock(&mut self, index: u32) {
        self.for_path(index, |tree, at| {
            let node = &mut tree.nodes[at as usize];
            node.locks -= 1;
            if node.locks == 0 {
                let pages = node.pages.len();
                tree.evictable += pages;
                tree.protected -= pages;
                tree.recency.push_newest(&mut tree.nodes, at);
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

    /// Drops the last page of the least recently used leaf: its page number and hash.
    pub(crate) fn evict_page(&mut self) -> Option<(u32, u64)> {
        let index = self.recency.oldest;
        let node = self.nodes.get_mut(index as usize)?;
        let (page, hash) = (node.pages.pop()?, node.hashes.pop()?);
        node.tokens.truncate(node.pages.len() * self.page_size);
        node.generation = node.generation.wrapping_add(1);
        self.evictable -= 1;
        if node.pages.is_empty() {
            let parent = node.parent;
            self.unindex(hash, index);
            self.recency.remove(&mut self.nodes, index);
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
