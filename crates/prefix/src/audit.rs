//! The full check of what the cache otherwise only keeps count of. O(pages); for idle moments and tests.

use std::collections::HashSet;

use crate::cache::PageCache;
use crate::hash;
use crate::ledger::PageState;

impl PageCache {
    /// Checks that every page is in exactly one state and that tree, list, index and counters agree.
    ///
    /// # Errors
    /// The first contradiction, in words.
    pub fn audit(&self) -> Result<(), String> {
        let mut owner = vec![None; self.ledger.num_pages()];
        let in_flight: Vec<u32> = self.ledger.in_flight.values().flatten().copied().collect();
        claim(&mut owner, &self.ledger.free, PageState::Free)?;
        claim(&mut owner, &in_flight, PageState::InFlight)?;
        let mut slots = vec![None; self.host.total];
        claim(&mut slots, &self.host.free, PageState::Free)?;
        for node in &self.tree.nodes {
            claim(if node.on_host { &mut slots } else { &mut owner }, &node.pages, PageState::Tree)?;
        }
        if let Some(slot) = slots.iter().position(Option::is_none) {
            return Err(format!("host slot {slot} is nowhere"));
        }
        for (page, (owned, state)) in owner.iter().zip(&self.ledger.states).enumerate() {
            if owned.unwrap_or(PageState::Private) != *state {
                return Err(format!("page {page} is marked {state:?} but found as {owned:?}"));
            }
        }
        let private =
            self.ledger.states.iter().filter(|s| **s == PageState::Private).count() + in_flight.len();
        let counters = self.counters();
        if private != counters.private {
            return Err(format!("{private} pages are private but {} are counted", counters.private));
        }
        let sum = counters.free + counters.evictable + counters.protected + counters.private;
        if sum != self.ledger.num_pages() {
            return Err(format!("counters {counters:?} sum to {sum} of {} pages", self.ledger.num_pages()));
        }
        self.audit_nodes()?;
        self.audit_ranking()
    }

    fn audit_nodes(&self) -> Result<(), String> {
        let tree = &self.tree;
        let (mut children, mut locked_pages) = (vec![0u32; tree.nodes.len()], 0);
        let mut child_locks = vec![0u64; tree.nodes.len()];
        for (index, node) in tree.nodes.iter().enumerate().filter(|(_, n)| n.alive && n.namespace.is_none()) {
            children[node.parent as usize] += 1;
            child_locks[node.parent as usize] += u64::from(node.locks);
            locked_pages += if node.locks > 0 { node.pages.len() } else { 0 };
            let mut last = tree.last_hash(node.parent);
            for (block, &hash) in node.tokens.chunks_exact(tree.page_size).zip(&node.hashes) {
                last = hash::chain(last, block);
                if last != hash {
                    return Err(format!("node {index} has a hash that is not chained to its parent"));
                }
            }
            let above = &tree.nodes[node.parent as usize];
            if node.on_host && (node.locks > 0 || node.pages.len() != 1) || above.on_host && !node.on_host {
                return Err(format!("node {index} is wrongly placed in its tier"));
            }
            if node.pages.is_empty() || node.tokens.len() != node.pages.len() * tree.page_size {
                return Err(format!("node {index} has {} pages", node.pages.len()));
            }
            if !tree.by_hash.get(&node.hashes[0]).is_some_and(|found| found.contains(&(index as u32))) {
                return Err(format!("node {index} is not in the index"));
            }
        }
        for (index, node) in tree.nodes.iter().enumerate().filter(|(_, n)| n.alive) {
            if node.children != children[index] || (node.namespace.is_some() && children[index] == 0) {
                return Err(format!("node {index} counts {} children of {}", node.children, children[index]));
            }
            if node.namespace.is_none() && u64::from(node.locks) < child_locks[index] {
                return Err(format!("node {index} has fewer locks than its children"));
            }
        }
        if locked_pages != tree.protected {
            return Err(format!("{locked_pages} pages are locked but {} are counted", tree.protected));
        }
        Ok(())
    }

    fn audit_ranking(&self) -> Result<(), String> {
        let tree = &self.tree;
        let mut seen = HashSet::new();
        for oldest in tree.ranking.oldest().chain(tree.host_ranking.oldest()) {
            let mut at = Some(oldest);
            while let Some(index) = at {
                let node = &tree.nodes[index as usize];
                if !seen.insert(index)
                    || node.locks > 0
                    || (seen.contains(&node.parent)
                        && tree.nodes[node.parent as usize].on_host == node.on_host)
                {
                    return Err(format!("node {index} is wrongly placed in the ranking"));
                }
                let parent = &tree.nodes[node.parent as usize];
                if parent.is_listed() && parent.on_host == node.on_host && parent.class < node.class {
                    return Err(format!("node {index} is ranked above its parent"));
                }
                at = node.next_newer();
            }
        }
        let unlocked = tree.nodes.iter().filter(|n| n.alive && n.namespace.is_none() && n.locks == 0).count();
        if unlocked != seen.len() {
            return Err(format!("{} nodes of {unlocked} unlocked ones are listed", seen.len()));
        }
        Ok(())
    }
}

fn claim(owner: &mut [Option<PageState>], pages: &[u32], state: PageState) -> Result<(), String> {
    for &page in pages {
        if let Some(other) = owner[page as usize].replace(state) {
            return Err(format!("page {page} is both {other:?} and {state:?}"));
        }
    }
    Ok(())
}
