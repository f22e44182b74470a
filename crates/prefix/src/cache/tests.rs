//! Named cases and a state machine against an oracle that knows nothing of trees.

use std::collections::{BTreeMap, HashMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::hash;

const NS: &[u8] = b"ns";

fn cache(num_pages: usize, page_size: usize) -> PageCache {
    PageCache::new(CacheOptions {
        num_pages,
        page_size,
        share: true,
        policy: Policy::default(),
        host_pages: 0,
    })
    .unwrap()
}

fn counters(cache: &PageCache) -> [usize; 4] {
    cache.audit().unwrap();
    let c = cache.counters();
    [c.free, c.evictable, c.protected, c.private]
}

/// Inserts with fresh pages and frees the duplicates.
fn plant(cache: &mut PageCache, tokens: &[u32]) -> u64 {
    let pages = cache.allocate(tokens.len() / cache.tree.page_size).unwrap();
    let (node, present) = cache.insert(NS, tokens, &pages, 0).unwrap();
    cache.free(&pages[..present], 0).unwrap();
    node
}

fn stored(events: &[Event]) -> Vec<(u64, u64, Vec<u32>)> {
    let mut blocks = Vec::new();
    for event in events {
        let Event::Stored { parent, hashes, tokens } = event else {
            panic!("not stored: {event:?}");
        };
        let size = tokens.len() / hashes.len();
        let parents = [*parent].into_iter().chain(hashes.iter().copied());
        blocks.extend(parents.zip(hashes).zip(tokens.chunks(size)).map(|((p, &h), t)| (p, h, t.to_vec())));
    }
    blocks
}

#[test]
fn cache_conservation_page4() {
    let mut cache = cache(16, 4);
    let slots = |cache: &PageCache| counters(cache).map(|pages| pages * 4);
    // r1: ten prompt tokens and three generated ones, whose last one's KV is never computed.
    plant(&mut cache, &(1..=12).collect::<Vec<u32>>());
    assert_eq!(slots(&cache), [52, 12, 0, 0]);

    let r2 = [1, 2, 3, 4, 5, 6, 7, 8, 99, 98, 97, 96, 95];
    let found = cache.find(NS, &r2, r2.len() - 1);
    assert_eq!(found.pages.len() * 4, 8);
    cache.lock(found.node).unwrap();
    let own = cache.allocate(page_demand(8, r2.len(), 4)).unwrap();
    assert_eq!(slots(&cache), [44, 4, 8, 8]);

    let pages: Vec<u32> = found.pages.iter().chain(&own).copied().collect();
    let (_, present) = cache.insert(NS, &r2, &pages, 0).unwrap();
    assert_eq!(present, 2);
    cache.free(&pages[3..], 0).unwrap();
    cache.unlock(found.node).unwrap();
    assert_eq!(slots(&cache), [48, 16, 0, 0]);

    assert_eq!(cache.evict(1), 1);
    assert_eq!(slots(&cache), [52, 12, 0, 0]);
    let mut keys: Vec<Vec<u32>> = cache
        .snapshot()
        .into_iter()
        .map(|event| match event {
            Event::Stored { tokens, .. } => tokens,
            other => panic!("{other:?}"),
        })
        .collect();
    keys.sort();
    assert_eq!(keys, [vec![1, 2, 3, 4, 5, 6, 7, 8], vec![99, 98, 97, 96]]);
}

#[test]
fn cache_events_on_node_split() {
    let mut cache = cache(16, 4);
    plant(&mut cache, &(1..=12).collect::<Vec<u32>>());
    let hashes = hash::chain_all(NS, &(1..=12).collect::<Vec<u32>>(), 4);
    assert_eq!(
        stored(&cache.drain_events()),
        [
            (hash::root(NS), hashes[0], vec![1, 2, 3, 4]),
            (hashes[0], hashes[1], vec![5, 6, 7, 8]),
            (hashes[1], hashes[2], vec![9, 10, 11, 12]),
        ]
    );
    plant(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8, 99, 98, 97, 96]);
    let branch = hash::chain(hashes[1], &[99, 98, 97, 96]);
    assert_eq!(stored(&cache.drain_events()), [(hashes[1], branch, vec![99, 98, 97, 96])]);
    assert_eq!(cache.evict(1), 1);
    assert_eq!(cache.drain_events(), [Event::Removed(vec![hashes[2]])]);
}

#[test]
fn cache_exact_page_demand() {
    let rows = [(63, 64), (64, 65), (0, 64), (10, 200), (128, 128), (0, 1)];
    let demand: Vec<usize> = rows.iter().map(|&(prefix, length)| page_demand(prefix, length, 64)).collect();
    assert_eq!(demand, [0, 1, 1, 3, 0, 1]);
    let mut cache = cache(16, 64);
    plant(&mut cache, &(0..640).collect::<Vec<u32>>());
    assert_eq!(counters(&cache), [6, 10, 0, 0]);
    cache.allocate(demand.iter().sum()).unwrap();
    assert_eq!(counters(&cache), [0, 10, 0, 6], "nothing had to be evicted");
}

#[test]
fn cache_block_hash_is_chained() {
    let mut cache = cache(16, 4);
    plant(&mut cache, &[1, 2, 3, 4, 1, 2, 3, 4]);
    plant(&mut cache, &[9, 9, 9, 9, 1, 2, 3, 4]);
    let blocks = stored(&cache.drain_events());
    assert_eq!(blocks.iter().map(|b| b.1).collect::<HashSet<_>>().len(), 4);
    assert_eq!((blocks[1].0, blocks[3].0), (blocks[0].1, blocks[2].1));
}

#[test]
fn eviction_trims_the_tail_of_the_least_recent_leaf() {
    let mut cache = cache(8, 2);
    plant(&mut cache, &[1, 2, 3, 4, 5, 6]);
    plant(&mut cache, &[7, 8]);
    assert_eq!(cache.evict(1), 1);
    assert_eq!(cache.find(NS, &[1, 2, 3, 4, 5, 6], 6).pages.len(), 2);
    // That match made the first prefix the most recent: the other one goes first now.
    assert_eq!(cache.evict(1), 1);
    assert!(cache.find(NS, &[7, 8], 2).pages.is_empty());
    assert_eq!(cache.find(NS, &[1, 2, 3], 3).pages.len(), 1, "less than a page is never matched");
}

#[test]
fn duplicates_stay_with_the_caller_and_tables_are_not_remapped() {
    let mut cache = cache(8, 2);
    let (first, second) = (cache.allocate(2).unwrap(), cache.allocate(3).unwrap());
    cache.insert(NS, &[1, 2, 3, 4], &first, 0).unwrap();
    let (node, present) = cache.insert(NS, &[1, 2, 3, 4, 5, 6], &second, 0).unwrap();
    assert_eq!(present, 2);
    assert_eq!(counters(&cache), [3, 3, 0, 2]);
    assert_eq!(
        cache.find(NS, &[1, 2, 3, 4, 5, 6], 6),
        Match { node, pages: vec![first[0], first[1], second[2]] }
    );
    cache.free(&second[..2], 0).unwrap();
    assert_eq!(cache.free(&second[2..], 0), Err(CacheError::NotPrivate(second[2])));
    assert_eq!(counters(&cache), [5, 3, 0, 0]);
}

#[test]
fn a_handle_stands_for_its_prefix_through_splits_and_is_refused_after_eviction() {
    let mut cache = cache(8, 2);
    let deep = plant(&mut cache, &[1, 2, 3, 4, 5, 6]);
    cache.lock(deep).unwrap();
    let upper = cache.find(NS, &[1, 2, 9], 3).node;
    assert_eq!(counters(&cache), [5, 0, 3, 0], "the upper half is locked too");
    cache.lock(upper).unwrap();
    cache.unlock(deep).unwrap();
    assert_eq!(counters(&cache), [5, 2, 1, 0]);
    assert_eq!(cache.evict(9), 2);
    assert_eq!(cache.lock(deep), Err(CacheError::StaleNode(deep)));
    cache.unlock(upper).unwrap();
    assert_eq!(cache.unlock(upper), Err(CacheError::NotLocked(upper)));
    assert_eq!(cache.lock(u64::MAX), Err(CacheError::StaleNode(u64::MAX)));
}

#[test]
fn a_handle_is_refused_once_its_tail_was_trimmed() {
    let mut cache = cache(8, 2);
    let node = plant(&mut cache, &[1, 2, 3, 4]);
    cache.evict(1);
    assert_eq!(cache.lock(node), Err(CacheError::StaleNode(node)));
}

#[test]
fn namespaces_share_nothing_and_leave_no_trace() {
    let mut cache = cache(8, 2);
    plant(&mut cache, &[1, 2]);
    assert_eq!(cache.find(b"other", &[1, 2], 2), Match { node: ROOT, pages: vec![] });
    assert_eq!(cache.find(b"", &[1, 2], 2).pages, []);
    assert_eq!(cache.flush(), 1);
    assert!(cache.tree.namespaces.is_empty() && cache.tree.by_hash.is_empty());
    assert_eq!(cache.drain_events(), [Event::Cleared]);
    assert_eq!(cache.flush(), 0);
    assert_eq!(cache.drain_events(), []);
}

#[test]
fn locked_prefixes_survive_flush_and_allocation() {
    let mut cache = cache(4, 2);
    let kept = plant(&mut cache, &[1, 2, 3, 4]);
    cache.lock(kept).unwrap();
    plant(&mut cache, &[5, 6]);
    cache.drain_events();
    assert_eq!(cache.available(), 2);
    assert_eq!(cache.allocate(3), None);
    assert_eq!(counters(&cache), [1, 1, 2, 0], "a refused allocation evicts nothing");
    assert_eq!(cache.flush(), 1);
    assert_eq!(cache.drain_events(), [Event::Removed(hash::chain_all(NS, &[5, 6], 2))]);
    assert_eq!(cache.allocate(0), Some(vec![]));
}

#[test]
fn without_sharing_all_pages_stay_private() {
    let mut cache = PageCache::new(CacheOptions {
        num_pages: 4,
        page_size: 2,
        share: false,
        policy: Policy::default(),
        host_pages: 0,
    })
    .unwrap();
    let pages = cache.allocate(2).unwrap();
    assert_eq!(cache.insert(NS, &[1, 2, 3, 4], &pages, 0), Ok((ROOT, 2)));
    assert_eq!(cache.find(NS, &[1, 2, 3, 4], 4), Match { node: ROOT, pages: vec![] });
    cache.lock(ROOT).unwrap();
    cache.unlock(ROOT).unwrap();
    cache.free(&pages, 0).unwrap();
    assert_eq!(counters(&cache), [4, 0, 0, 0]);
    assert_eq!(cache.drain_events(), []);
}

#[test]
fn wrong_arguments_are_refused_and_change_nothing() {
    for (num_pages, page_size, field) in [(0, 4, "num_pages"), (4, 0, "page_size"), (1 << 31, 4, "num_pages")]
    {
        let error = PageCache::new(CacheOptions {
            num_pages,
            page_size,
            share: true,
            policy: Policy::default(),
            host_pages: 0,
        })
        .unwrap_err();
        assert!(error.to_string().starts_with(field), "{error}");
    }
    let mut cache = cache(4, 2);
    let pages = cache.allocate(2).unwrap();
    for wrong in [&pages[..1], &[pages[0], pages[1], 0, 0]] {
        assert!(matches!(cache.insert(NS, &[1, 2, 3, 4], wrong, 0), Err(CacheError::PageCount { .. })));
    }
    assert_eq!(
        cache.insert(NS, &[1, 2, 3, 4], &[pages[0], pages[0]], 0),
        Err(CacheError::NotPrivate(pages[0]))
    );
    assert_eq!(cache.insert(NS, &[1, 2], &[3], 0), Err(CacheError::NotPrivate(3)));
    assert_eq!(counters(&cache), [2, 0, 0, 2]);
    assert!(cache.tree.namespaces.is_empty());
}

#[test]
fn events_nobody_drains_fold_into_a_snapshot() {
    let mut cache = cache(4, 1);
    for token in 0..3000 {
        plant(&mut cache, &[token, 7]);
    }
    let events = cache.drain_events();
    assert!(events.len() < 1500, "{}", events.len());
    assert_eq!(replay(HashSet::new(), &events), resident(&cache));
}

/// What a mirror holds after these events; panics if they make no sense for it.
fn replay(mut mirror: HashSet<u64>, events: &[Event]) -> HashSet<u64> {
    for event in events {
        match event {
            Event::Stored { parent, hashes, .. } => {
                assert!(*parent == hash::root(NS) || *parent == hash::root(b"2") || mirror.contains(parent));
                for hash in hashes {
                    assert!(mirror.insert(*hash), "stored twice");
                }
            }
            Event::Removed(hashes) => hashes.iter().for_each(|hash| assert!(mirror.remove(hash))),
            Event::Cleared => mirror.clear(),
        }
    }
    mirror
}

fn resident(cache: &PageCache) -> HashSet<u64> {
    replay(HashSet::new(), &cache.snapshot())
}

#[derive(Debug, Clone)]
enum Op {
    Insert { namespace: bool, tokens: Vec<u32> },
    Find { namespace: bool, tokens: Vec<u32>, limit: usize },
    Unlock(usize),
    Allocate(usize),
    Free { at: usize, epoch: u64 },
    Retire(u64),
    Evict(usize),
    Flush,
}

fn op() -> impl Strategy<Value = Op> {
    let tokens = || prop::collection::vec(0u32..3, 0..14);
    prop_oneof![
        5 => (any::<bool>(), tokens()).prop_map(|(namespace, tokens)| Op::Insert { namespace, tokens }),
        5 => (any::<bool>(), tokens(), 0usize..16)
            .prop_map(|(namespace, tokens, limit)| Op::Find { namespace, tokens, limit }),
        3 => (0usize..8).prop_map(Op::Unlock),
        2 => (0usize..6).prop_map(Op::Allocate),
        2 => (0usize..8, 0u64..6).prop_map(|(at, epoch)| Op::Free { at, epoch }),
        1 => (0u64..6).prop_map(Op::Retire),
        2 => (0usize..6).prop_map(Op::Evict),
        1 => Just(Op::Flush),
    ]
}

/// Prefix of whole pages → its last page; and what the test itself holds.
#[derive(Default)]
struct Oracle {
    pages: HashMap<(bool, Vec<u32>), u32>,
    locks: Vec<(u64, Vec<u32>)>,
    private: Vec<u32>,
    in_flight: BTreeMap<u64, usize>,
    retired: u64,
}

impl Oracle {
    fn longest(&self, namespace: bool, tokens: &[u32], limit: usize) -> Vec<u32> {
        (1..=limit.min(tokens.len()) / 2)
            .map_while(|n| self.pages.get(&(namespace, tokens[..2 * n].to_vec())).copied())
            .collect()
    }

    fn protected(&self) -> HashSet<u32> {
        self.locks.iter().flat_map(|(_, pages)| pages.iter().copied()).collect()
    }

    /// Forgets what the cache no longer has; every kept prefix must keep all its parents.
    fn forget_evicted(&mut self, cache: &PageCache) {
        let here = resident(cache);
        self.pages.retain(|(namespace, tokens), _| {
            here.contains(hash::chain_all(name(*namespace), tokens, 2).last().unwrap())
        });
        assert_eq!(self.pages.len(), here.len());
        let tree: HashSet<u32> = self.pages.values().copied().collect();
        assert!(self.protected().is_subset(&tree), "a locked page was evicted");
    }
}

fn name(namespace: bool) -> &'static [u8] {
    if namespace { NS } else { b"2" }
}

fn apply(cache: &mut PageCache, oracle: &mut Oracle, op: Op) {
    match op {
        Op::Insert { namespace, tokens } => {
            let whole = tokens.len() / 2;
            let Some(pages) = cache.allocate(whole) else {
                return;
            };
            oracle.forget_evicted(cache);
            let before = oracle.longest(namespace, &tokens, tokens.len());
            let (_, present) = cache.insert(name(namespace), &tokens, &pages, 0).unwrap();
            assert_eq!(present, before.len());
            for n in present..whole {
                oracle.pages.insert((namespace, tokens[..2 * n + 2].to_vec()), pages[n]);
            }
            oracle.private.extend(&pages[..present]);
        }
        Op::Find { namespace, tokens, limit } => {
            let found = cache.find(name(namespace), &tokens, limit);
            assert_eq!(found.pages, oracle.longest(namespace, &tokens, limit));
            cache.lock(found.node).unwrap();
            oracle.locks.push((found.node, found.pages));
        }
        Op::Unlock(at) if at < oracle.locks.len() => {
            let (node, _) = oracle.locks.swap_remove(at);
            cache.unlock(node).unwrap();
        }
        Op::Allocate(count) => {
            let available = cache.available();
            match cache.allocate(count) {
                Some(pages) => oracle.private.extend(pages),
                None => assert!(count > available),
            }
        }
        Op::Free { at, epoch } if at < oracle.private.len() => {
            let page = oracle.private.swap_remove(at);
            cache.free(&[page], epoch).unwrap();
            if epoch > oracle.retired {
                *oracle.in_flight.entry(epoch).or_default() += 1;
            }
        }
        Op::Retire(epoch) => {
            cache.retire(epoch);
            oracle.retired = oracle.retired.max(epoch);
            oracle.in_flight.retain(|&at, _| at > oracle.retired);
        }
        Op::Evict(pages) => assert_eq!(cache.counters().evictable.min(pages), cache.evict(pages)),
        Op::Flush => assert_eq!(cache.counters().evictable, cache.flush()),
        Op::Unlock(_) | Op::Free { .. } => {}
    }
    oracle.forget_evicted(cache);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn any_operations_agree_with_the_oracle(ops in prop::collection::vec(op(), 1..60)) {
        let mut cache = cache(12, 2);
        let (mut oracle, mut mirror) = (Oracle::default(), HashSet::new());
        for op in ops {
            apply(&mut cache, &mut oracle, op);
            cache.audit().unwrap();
            mirror = replay(mirror, &cache.drain_events());
            prop_assert_eq!(&mirror, &resident(&cache));
            let counters = cache.counters();
            let protected = oracle.protected().len();
            let private = oracle.private.len() + oracle.in_flight.values().sum::<usize>();
            prop_assert_eq!(counters.protected, protected);
            prop_assert_eq!(counters.evictable, oracle.pages.len() - protected);
            prop_assert_eq!(counters.private, private);
            prop_assert_eq!(counters.free, 12 - oracle.pages.len() - private);
        }
    }
}
