//! How often parts of prompts were asked for lately: what tells a system prompt from one person's conversation.
//!
//! A counting sketch of fixed size, after TinyLFU (Einziger, Friedman, Manes, 2017): two cells a block, the smaller one
//! counts, all are halved after as many notes as there are cells. Too high where blocks collide, never too low.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// Cells, of one byte each.
const CELLS: usize = 1 << 18;
/// Tokens between two blocks that are counted: shorter blocks are sampled.
const SAMPLE_TOKENS: usize = 64;

/// Recent uses of prompt blocks by their chained hashes. Any thread may note and read.
#[derive(Debug)]
pub struct Uses {
    cells: Box<[AtomicU8]>,
    noted: AtomicU32,
}

/// What copying the rest of a prompt's known blocks would cost, by how many leading blocks are there already.
#[derive(Debug)]
pub struct CopyCost {
    step: usize,
    /// Cost of the sampled blocks before each.
    before: Vec<f64>,
}

impl Default for Uses {
    fn default() -> Self {
        let cells = std::iter::repeat_with(AtomicU8::default).take(CELLS).collect();
        Self { cells, noted: AtomicU32::new(0) }
    }
}

impl Uses {
    /// Counts one use of each of a prompt's blocks of `block_tokens` tokens.
    pub fn note(&self, hashes: &[u64], block_tokens: usize) {
        let sampled = sampled(hashes, step(block_tokens));
        let mut count = 0;
        for hash in sampled {
            for place in places(hash) {
                let cell = &self.cells[place];
                // A lost update between two threads costs one count.
                cell.store(cell.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
            }
            count += 1;
        }
        if self.noted.fetch_add(count, Ordering::Relaxed) as usize + count as usize >= CELLS {
            self.noted.store(0, Ordering::Relaxed);
            for cell in &self.cells {
                cell.store(cell.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
    }

    /// Uses of a block lately; at least one, as somebody brought it.
    pub fn of(&self, hash: u64) -> u8 {
        let least = places(hash).map(|place| self.cells[place].load(Ordering::Relaxed)).into_iter().min();
        least.unwrap_or(0).max(1)
    }

    /// What a second copy of `hashes`, which somebody has, costs a worker that lacks some of them: each block's tokens by
    /// the square of its uses. Who has a popular prefix twice gains by the copy; a conversation that moves only loses.
    pub fn copy_cost(&self, hashes: &[u64], block_tokens: usize) -> CopyCost {
        let step = step(block_tokens);
        let tokens = (step * block_tokens) as f64;
        let mut before = Vec::with_capacity(hashes.len() / step + 1);
        before.push(0.0);
        let mut sum = 0.0;
        for hash in sampled(hashes, step) {
            let uses = f64::from(self.of(hash));
            sum += tokens / (uses * uses);
            before.push(sum);
        }
        CopyCost { step, before }
    }
}

impl CopyCost {
    /// Tokens' worth of copies for a worker with `found` leading blocks.
    pub fn of(&self, found: usize) -> f64 {
        let last = self.before.len() - 1;
        self.before[last] - self.before[(found / self.step).min(last)]
    }
}

fn step(block_tokens: usize) -> usize {
    (SAMPLE_TOKENS / block_tokens.max(1)).max(1)
}

fn sampled(hashes: &[u64], step: usize) -> impl Iterator<Item = u64> {
    hashes.iter().skip(step - 1).step_by(step).copied()
}

fn places(hash: u64) -> [usize; 2] {
    [hash as usize % CELLS, (hash >> 32) as usize % CELLS]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Well-mixed hashes of `count` blocks.
    fn blocks(seed: u64, count: u64) -> Vec<u64> {
        (0..count).map(|at| xxhash_rust::xxh3::xxh3_64_with_seed(&at.to_le_bytes(), seed)).collect()
    }

    #[test]
    fn a_block_nobody_noted_counts_as_brought_once() {
        assert_eq!(Uses::default().of(7), 1);
    }

    #[test]
    fn blocks_are_counted_by_use_and_sampled_by_their_length() {
        let uses = Uses::default();
        let hashes = blocks(1, 8);
        (0..5).for_each(|_| uses.note(&hashes, 64));
        assert!(hashes.iter().all(|hash| uses.of(*hash) == 5));
        let pages = blocks(2, 8);
        (0..5).for_each(|_| uses.note(&pages, 16));
        let counted: Vec<u8> = pages.iter().map(|hash| uses.of(*hash)).collect();
        assert_eq!(counted, [1, 1, 1, 5, 1, 1, 1, 5]);
    }

    #[test]
    fn counts_stop_at_their_largest_and_fade() {
        let uses = Uses::default();
        let hot = blocks(3, 1);
        (0..300).for_each(|_| uses.note(&hot, 64));
        assert_eq!(uses.of(hot[0]), 255);
        let others = blocks(4, CELLS as u64);
        uses.note(&others, 64);
        assert!(uses.of(hot[0]) < 140, "halved once");
    }

    #[test]
    fn copies_of_a_conversation_cost_its_tokens_and_those_of_a_popular_prefix_next_to_nothing() {
        let uses = Uses::default();
        let (shared, own) = (blocks(5, 10), blocks(6, 10));
        (0..20).for_each(|_| uses.note(&shared, 64));
        uses.note(&own, 64);
        let prompt: Vec<u64> = shared.iter().chain(&own).copied().collect();
        let cost = uses.copy_cost(&prompt, 64);
        assert_eq!(cost.of(20), 0.0, "it has all");
        assert_eq!(cost.of(10), 640.0, "it lacks the conversation");
        assert!((641.0..650.0).contains(&cost.of(0)), "{}", cost.of(0));
        assert_eq!(cost.of(99), 0.0);
    }

    #[test]
    fn prompts_shorter_than_a_sample_cost_nothing() {
        let uses = Uses::default();
        assert_eq!(uses.copy_cost(&blocks(7, 3), 16).of(0), 0.0);
        assert_eq!(uses.copy_cost(&[], 64).of(0), 0.0);
    }
}
