//! The tree as an operator sees it: a bounded piece of its nodes at a time, without touching recency.
//!
//! O(nodes shown, their depth and the paths of leases). Runs between two steps, so the piece is consistent.

use std::collections::HashMap;

use crate::cache::PageCache;
use crate::list::NONE;

/// One node: a run of pages that no request has parted yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeView {
    /// Its number, used again when it is gone.
    pub node: u32,
    /// Its parent's; 0 if it begins a prompt.
    pub parent: u32,
    /// The root hash of its namespace.
    pub namespace_hash: u64,
    /// How many pages.
    pub pages: usize,
    /// Tokens on the path before it.
    pub depth_tokens: usize,
    /// Holders of it or of what follows it.
    pub locks: u32,
    /// Leases among them.
    pub leases: u32,
    /// Requests that began on it.
    pub uses: u32,
    /// Milliseconds since its last use.
    pub age_ms: u64,
    /// How many nodes follow it.
    pub children: u32,
    /// Whether it is on the host.
    pub on_host: bool,
    /// Its first tokens, as many as asked for.
    pub tokens: Vec<u32>,
}

/// Some nodes and how to go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeView {
    /// In the order of their numbers.
    pub nodes: Vec<NodeView>,
    /// The cursor of the next piece; 0 if nothing is left.
    pub next: u32,
    /// Nodes of the whole tree.
    pub nodes_total: usize,
    /// Namespaces in it.
    pub namespaces_total: usize,
}

impl PageCache {
    /// Up to `limit` nodes from number `cursor` on, with at most `tokens` token ids each.
    ///
    /// `leases` are the handles that leases lock, one entry a lease; those that no longer stand count nowhere.
    #[must_use]
    pub fn view(&self, cursor: u32, limit: usize, tokens: usize, leases: &[u64]) -> TreeView {
        let tree = &self.tree;
        let leases = self.lease_counts(leases);
        let mut depths = HashMap::new();
        let mut shown = TreeView {
            nodes: Vec::new(),
            next: 0,
            nodes_total: tree.count(),
            namespaces_total: tree.namespaces.len(),
        };
        let living = tree.nodes.iter().enumerate().skip((cursor as usize).max(1));
        for (index, node) in living.filter(|(_, node)| node.alive && node.namespace.is_none()) {
            let index = index as u32;
            if shown.nodes.len() == limit {
                shown.next = index;
                break;
            }
            let (namespace_hash, depth_pages) = self.place(index, &mut depths);
            let begins = tree.nodes[node.parent as usize].namespace.is_some();
            shown.nodes.push(NodeView {
                node: index,
                parent: if begins { 0 } else { node.parent },
                namespace_hash,
                pages: node.pages.len(),
                depth_tokens: depth_pages * tree.page_size,
                locks: node.locks,
                leases: leases.get(&index).copied().unwrap_or(0),
                uses: node.uses,
                age_ms: tree.now_ms.saturating_sub(node.used_ms),
                children: node.children,
                on_host: node.on_host,
                tokens: node.tokens[..node.tokens.len().min(tokens)].to_vec(),
            });
        }
        shown
    }

    fn lease_counts(&self, leases: &[u64]) -> HashMap<u32, u32> {
        let mut counts = HashMap::new();
        for &lease in leases {
            let mut at = self.tree.resolve(lease).unwrap_or(NONE);
            while at != NONE && self.tree.nodes[at as usize].namespace.is_none() {
                *counts.entry(at).or_default() += 1;
                at = self.tree.nodes[at as usize].parent;
            }
        }
        counts
    }

    /// Root hash of a node's namespace and the pages before it; `known` keeps what was found.
    fn place(&self, index: u32, known: &mut HashMap<u32, (u64, usize)>) -> (u64, usize) {
        let (mut path, mut at) = (Vec::new(), index);
        let mut place = loop {
            if let Some(&place) = known.get(&at) {
                break place;
            }
            let node = &self.tree.nodes[at as usize];
            if node.namespace.is_some() {
                break (self.tree.last_hash(at), 0);
            }
            path.push(at);
            at = node.parent;
        };
        // What is known of a node is its own place: its pages count for those after it.
        let mut before = self.tree.nodes[at as usize].pages.len();
        for &at in path.iter().rev() {
            place.1 += before;
            known.insert(at, place);
            before = self.tree.nodes[at as usize].pages.len();
        }
        place
    }
}

#[cfg(test)]
mod tests {
    use crate::{CacheOptions, PageCache, Policy, hash};

    fn cache() -> PageCache {
        let options = CacheOptions {
            num_pages: 16,
            page_size: 2,
            share: true,
            policy: Policy::default(),
            host_pages: 0,
        };
        PageCache::new(options).unwrap()
    }

    fn plant(cache: &mut PageCache, namespace: &[u8], tokens: &[u32]) -> u64 {
        let pages = cache.allocate(tokens.len() / 2).unwrap();
        let (node, present) = cache.insert(namespace, tokens, &pages, 0).unwrap();
        cache.free(&pages[..present], 0).unwrap();
        node
    }

    #[test]
    fn a_view_tells_size_place_holders_use_and_age() {
        let mut cache = cache();
        cache.tick(1000);
        let deep = plant(&mut cache, b"a", &[1, 2, 3, 4, 5, 6]);
        cache.tick(1500);
        let branch = plant(&mut cache, b"a", &[1, 2, 3, 4, 7, 8]);
        plant(&mut cache, b"b", &[1, 2]);
        cache.lock(deep).unwrap();
        cache.lock(branch).unwrap();
        cache.credit(branch, 0).unwrap();
        cache.tick(1700);
        let view = cache.view(0, 10, 1, &[deep, 1 << 40]);
        assert_eq!((view.next, view.nodes_total, view.namespaces_total), (0, 4, 2));
        let by_depth = |depth, first| {
            let of = view.nodes.iter().find(|node| node.depth_tokens == depth && node.tokens == [first]);
            let node = of.unwrap();
            (node.pages, node.locks, node.leases, node.uses, node.age_ms, node.children)
        };
        assert_eq!(by_depth(0, 1), (2, 2, 1, 1, 200, 2));
        assert_eq!(by_depth(4, 5), (1, 1, 1, 0, 700, 0));
        assert_eq!(by_depth(4, 7), (1, 1, 0, 1, 200, 0));
        let root = view.nodes.iter().find(|node| node.pages == 2).unwrap();
        for child in view.nodes.iter().filter(|node| node.depth_tokens == 4) {
            assert_eq!((child.parent, child.namespace_hash), (root.node, hash::root(b"a")));
        }
        assert_eq!(root.parent, 0);
        assert!(view.nodes.iter().any(|node| node.namespace_hash == hash::root(b"b")));
    }

    #[test]
    fn pieces_of_any_size_give_every_node_once() {
        let mut cache = cache();
        for first in 0..7 {
            plant(&mut cache, b"", &[first, 1, 2, 3]);
        }
        cache.evict(3);
        let whole = cache.view(0, 100, 0, &[]);
        for limit in 1..9 {
            let (mut seen, mut cursor) = (Vec::new(), 0);
            loop {
                let piece = cache.view(cursor, limit, 0, &[]);
                assert!(piece.nodes.len() <= limit);
                seen.extend(piece.nodes);
                cursor = piece.next;
                if cursor == 0 {
                    break;
                }
            }
            assert_eq!(seen, whole.nodes, "pieces of {limit}");
        }
        assert!(cache.view(99, 5, 0, &[]).nodes.is_empty());
    }
}
