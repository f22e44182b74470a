use super::*;
use branchline_prefix::hash::chain_all;
use proptest::prelude::*;
use std::collections::{HashMap as StdMap, HashSet};

const A: WorkerId = WorkerId(0);
const B: WorkerId = WorkerId(1);

fn head(epoch: u64, sequence: u64, snapshot: bool) -> Batch {
    Batch { epoch, sequence, snapshot }
}

fn opened(hashes: &[u64]) -> BlockIndex {
    let mut index = BlockIndex::default();
    index.apply(A, head(1, 0, true), [Change::Stored(hashes)]).unwrap();
    index
}

#[test]
fn a_prompt_matches_its_leading_blocks_on_each_worker() {
    let prompt: Vec<u32> = (0..40).collect();
    let hashes = chain_all(b"space", &prompt, 8);
    let mut index = opened(&hashes[..3]);
    index.apply(B, head(7, 5, true), [Change::Stored(&hashes)]).unwrap();
    assert_eq!(index.matches(&hashes, &[A, B, WorkerId(9)]), [3, 5, 0]);
    assert_eq!(index.matches(&chain_all(b"other", &prompt, 8), &[A, B]), [0, 0]);
    assert_eq!((index.blocks(A), index.blocks(B), index.len()), (3, 5, 5));
}

#[test]
fn workers_with_different_page_sizes_do_not_meet() {
    let prompt: Vec<u32> = (0..32).collect();
    let (small, large) = (chain_all(b"", &prompt, 4), chain_all(b"", &prompt, 16));
    let mut index = opened(&small);
    index.apply(B, head(1, 0, true), [Change::Stored(&large)]).unwrap();
    assert_eq!(index.matches(&small, &[A, B]), [8, 0]);
    assert_eq!(index.matches(&large, &[A, B]), [0, 2]);
}

#[test]
fn events_follow_one_another() {
    let mut index = opened(&[1, 2]);
    index.apply(A, head(1, 1, false), [Change::Stored(&[3]), Change::Removed(&[1, 99])]).unwrap();
    assert_eq!((index.blocks(A), index.len()), (2, 2));
    index.apply(A, head(1, 2, false), [Change::Cleared, Change::Stored(&[8])]).unwrap();
    assert_eq!(index.matches(&[8, 2], &[A]), [1]);
}

#[test]
fn a_gap_drops_the_workers_entries_until_its_next_snapshot() {
    for wrong in [head(1, 2, false), head(1, 0, false), head(2, 1, false)] {
        let mut index = opened(&[1, 2]);
        index.apply(B, head(1, 0, true), [Change::Stored(&[1])]).unwrap();
        let gap = index.apply(A, wrong, [Change::Stored(&[3])]).unwrap_err();
        assert_eq!((gap.worker, gap.expected, gap.got), (A, 1, wrong.sequence));
        assert_eq!((index.blocks(A), index.blocks(B)), (0, 1));
        assert!(index.apply(A, head(1, 1, false), []).is_err(), "only a snapshot may open");
        index.apply(A, head(3, 0, true), [Change::Stored(&[1])]).unwrap();
        assert_eq!(index.blocks(A), 1);
    }
}

#[test]
fn a_snapshot_in_parts_replaces_once() {
    let mut index = opened(&[1, 2]);
    index.apply(A, head(2, 0, true), [Change::Stored(&[5])]).unwrap();
    index.apply(A, head(2, 1, true), [Change::Stored(&[6])]).unwrap();
    index.apply(A, head(2, 2, false), [Change::Stored(&[7])]).unwrap();
    assert_eq!(index.matches(&[5, 6, 7], &[A]), [3]);
    assert_eq!(index.matches(&[1], &[A]), [0]);
}

#[test]
fn a_lost_part_of_a_snapshot_is_a_gap() {
    let mut index = BlockIndex::default();
    index.apply(A, head(2, 0, true), [Change::Stored(&[5])]).unwrap();
    assert!(index.apply(A, head(2, 2, true), [Change::Stored(&[6])]).is_err());
}

#[test]
fn blocks_on_their_way_count_until_every_bringer_is_done() {
    let mut index = BlockIndex::default();
    index.reserve(A, &[1, 2]);
    index.reserve(A, &[1, 2, 3]);
    assert_eq!(index.matches(&[1, 2, 3], &[A, B]), [3, 0]);
    index.release(A, &[1, 2, 3]);
    assert_eq!(index.matches(&[1, 2, 3], &[A]), [2]);
    index.release(A, &[1, 2]);
    assert_eq!((index.matches(&[1], &[A]), index.reserved()), (vec![0], 0));
}

proptest! {
    #[test]
    fn the_index_equals_a_set_a_worker(steps in prop::collection::vec((0..3_u32, 0..4_u8, prop::collection::vec(0..12_u64, 0..4)), 0..60)) {
        let mut index = BlockIndex::default();
        let mut model: StdMap<u32, HashSet<u64>> = StdMap::new();
        let mut next: StdMap<u32, u64> = StdMap::new();
        for (worker, what, hashes) in steps {
            let sequence = next.entry(worker).or_insert(0);
            let held = model.entry(worker).or_default();
            let change = match what {
                0 | 1 => { held.extend(&hashes); Change::Stored(&hashes) }
                2 => { held.retain(|hash| !hashes.contains(hash)); Change::Removed(&hashes) }
                _ => { held.clear(); Change::Cleared }
            };
            index.apply(WorkerId(worker), head(1, *sequence, *sequence == 0), [change]).unwrap();
            *sequence += 1;
        }
        (0..SHARDS).for_each(|_| index.sweep());
        for (worker, held) in &model {
            prop_assert_eq!(index.blocks(WorkerId(*worker)), held.len());
            for hash in 0..12 {
                prop_assert_eq!(index.matches(&[hash], &[WorkerId(*worker)])[0] == 1, held.contains(&hash));
            }
        }
        prop_assert_eq!(index.len(), model.values().flatten().collect::<HashSet<_>>().len());
    }
}

proptest! {
    /// Many workers, each with the beginnings of some prompts: halving finds what walking would.
    #[test]
    fn halving_finds_how_far_each_of_many_workers_gets(lengths in prop::collection::vec(0..40_usize, 1..150), brought in 0..40_usize) {
        let prompt: Vec<u32> = (0..640).collect();
        let hashes = chain_all(b"", &prompt, 16);
        let mut index = BlockIndex::default();
        for (worker, length) in lengths.iter().enumerate() {
            index.apply(WorkerId(worker as u32), head(1, 0, true), [Change::Stored(&hashes[..*length])]).unwrap();
        }
        index.reserve(A, &hashes[..brought]);
        let workers: Vec<_> = (0..lengths.len() as u32).rev().map(WorkerId).collect();
        let mut right: Vec<_> = lengths.iter().rev().copied().collect();
        let last = right.len() - 1;
        right[last] = right[last].max(brought);
        prop_assert_eq!(index.matches(&hashes, &workers), right);
    }
}

#[test]
fn a_purged_worker_is_gone_at_once_and_swept_out_by_and_by() {
    let prompt: Vec<u32> = (0..4000).collect();
    let hashes = chain_all(b"", &prompt, 4);
    let mut index = opened(&hashes);
    index.apply(B, head(1, 0, true), [Change::Stored(&hashes[..500])]).unwrap();
    index.purge(A);
    assert_eq!((index.matches(&hashes, &[A, B]), index.blocks(A)), (vec![0, 500], 0));
    index.apply(A, head(2, 0, true), [Change::Stored(&hashes[..7])]).unwrap();
    assert_eq!(index.matches(&hashes, &[A, B]), [7, 500]);
    for sequence in 1..=SHARDS as u64 {
        index.apply(B, head(1, sequence, false), []).unwrap();
    }
    assert_eq!((index.len(), index.matches(&hashes, &[A, B])), (500, vec![7, 500]));
}

#[test]
fn a_worker_that_leaves_with_nothing_gives_its_slot_back() {
    let mut index = BlockIndex::default();
    for worker in (0..1000).map(WorkerId) {
        index.apply(worker, head(1, 0, true), [Change::Stored(&[1]), Change::Removed(&[1])]).unwrap();
        index.purge(worker);
        (0..SHARDS).for_each(|_| index.sweep());
    }
    assert!(index.slots.len() <= 2, "{} slots", index.slots.len());
}

#[test]
fn a_full_index_keeps_beginnings_and_counts_what_it_leaves_out() {
    let prompt: Vec<u32> = (0..400).collect();
    let hashes = chain_all(b"", &prompt, 4);
    let mut index = BlockIndex::new(40 * ENTRY_BYTES);
    index.apply(A, head(1, 0, true), [Change::Stored(&hashes)]).unwrap();
    assert_eq!((index.matches(&hashes, &[A]), index.blocks(A), index.dropped()), (vec![40], 40, 60));
    assert!(index.memory() <= 40 * ENTRY_BYTES);
    index.apply(A, head(1, 1, false), [Change::Removed(&hashes[39..])]).unwrap();
    assert_eq!((index.blocks(A), index.len()), (39, 39));
}
