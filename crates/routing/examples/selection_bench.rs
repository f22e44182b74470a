//! Selection by itself: the lookup in the exact index and the policy's choice, at many workers with full caches.
//!
//! `cargo run --release -p branchline-routing --example selection_bench [workers] [blocks a worker]`. Hashing the prompt
//! is the same work for any index and is left out. Prints JSON.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark prints its result and may die")]

use std::time::{Duration, Instant};

use branchline_core::WorkerId;
use branchline_prefix::hash::chain_all;
use branchline_routing::{Ask, Batch, BlockIndex, Candidate, Change, PolicyKind, Uses};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

const PAGE: usize = 16;
const PROMPT: usize = 2048;
const COMMON: usize = 512;

/// A prompt whose first tokens all share, then a family's, then its own.
fn prompt(family: u32, own: u32) -> Vec<u64> {
    let token = |at: usize| match at {
        0..COMMON => at as u32,
        COMMON..1024 => family.wrapping_mul(7919).wrapping_add(at as u32) % 40_000,
        _ => own.wrapping_mul(104_729).wrapping_add(at as u32) % 40_000,
    };
    chain_all(b"bench", &(0..PROMPT).map(token).collect::<Vec<u32>>(), PAGE)
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter_map(|text| text.parse::<usize>().ok());
    let (workers, blocks) = (arguments.next().unwrap_or(64), arguments.next().unwrap_or(100_000));
    let mut index = BlockIndex::default();
    let mut random = StdRng::seed_from_u64(1);
    let each = PROMPT / PAGE;
    let started = Instant::now();
    for worker in 0..workers {
        let id = WorkerId(worker as u32);
        for number in 0..blocks / each {
            let hashes = prompt(random.random_range(0..1000), (worker * blocks + number) as u32);
            let head = Batch { epoch: 1, sequence: number as u64, snapshot: number == 0 };
            index.apply(id, head, [Change::Stored(&hashes)]).expect("consecutive");
        }
    }
    let filled = started.elapsed();
    let ids: Vec<WorkerId> = (0..workers as u32).map(WorkerId).collect();
    let asked: Vec<Vec<u64>> = (0..2000)
        .map(|_| prompt(random.random_range(0..1000), random.random_range(0..(workers * blocks) as u32)))
        .collect();
    let uses = Uses::default();
    asked.iter().for_each(|hashes| uses.note(hashes, PAGE));
    let policy = PolicyKind::CacheAware.build();
    let mut times: Vec<Duration> = Vec::new();
    for hashes in &asked {
        let start = Instant::now();
        let found = index.matches(hashes, &ids);
        let most = found.iter().copied().max().unwrap_or(0);
        let copies = uses.copy_cost(&hashes[..most], PAGE);
        let candidates: Vec<Candidate> = ids
            .iter()
            .zip(found)
            .map(|(worker, found)| Candidate {
                worker: *worker,
                name: u64::from(worker.0),
                uncached_tokens: (PROMPT - found * PAGE) as u64,
                copied_tokens: copies.of(found) as u64,
                queued_tokens: 0,
                running: 1,
                surplus_tokens: 0,
                hinted_tokens: 0,
                shared_by: 1,
                usage: 0.5,
                speed: 1.0,
            })
            .collect();
        std::hint::black_box(policy.choose(&candidates, &Ask::default(), &mut random));
        times.push(start.elapsed());
    }
    times.sort();
    let micros = |share: usize| times[times.len() * share / 100].as_secs_f64() * 1e6;
    let purge = Instant::now();
    index.purge(WorkerId(0));
    println!(
        "{{\"workers\": {workers}, \"blocks_a_worker\": {blocks}, \"distinct_blocks\": {}, \"index_mib\": {:.0}, \
         \"select_us_p50\": {:.2}, \"select_us_p99\": {:.2}, \"store_ns_a_block\": {:.0}, \"purge_us\": {:.2}}}",
        index.len(),
        index.memory() as f64 / f64::from(1 << 20),
        micros(50),
        micros(99),
        filled.as_secs_f64() * 1e9 / (workers * blocks) as f64,
        purge.elapsed().as_secs_f64() * 1e6,
    );
}
