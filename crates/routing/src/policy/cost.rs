//! Policies that weigh every candidate and draw among those that are as good as the best.

use rand::{Rng, RngExt};

use super::{Ask, Candidate, Policy, PolicyKind, RUNNING_TOKENS};

/// The request's own uncached prompt, what waits before it, what runs beside it and how full the pool is: one cost.
#[derive(Debug)]
pub(super) struct CacheAware;

impl Policy for CacheAware {
    fn kind(&self) -> PolicyKind {
        PolicyKind::CacheAware
    }

    fn choose(&self, candidates: &[Candidate], _: &Ask, random: &mut dyn Rng) -> Option<usize> {
        cheapest(candidates, Candidate::cost, random)
    }
}

/// As `CacheAware`, blind to caches.
#[derive(Debug)]
pub(super) struct LeastLoad;

impl Policy for LeastLoad {
    fn kind(&self) -> PolicyKind {
        PolicyKind::LeastLoad
    }

    fn choose(&self, candidates: &[Candidate], _: &Ask, random: &mut dyn Rng) -> Option<usize> {
        cheapest(candidates, Candidate::load, random)
    }
}

/// A random one of those whose cost is the least, or so near it that the difference is noise; without the draw, ties
/// would always fall on the first worker.
pub(super) fn cheapest(
    candidates: &[Candidate],
    cost: impl Fn(&Candidate) -> f64,
    random: &mut dyn Rng,
) -> Option<usize> {
    let costs: smallvec::SmallVec<[f64; 64]> = candidates.iter().map(cost).collect();
    let least = costs.iter().copied().min_by(f64::total_cmp)?;
    let limit = least + (least / 50.0).max(RUNNING_TOKENS / 4.0);
    let count = costs.iter().filter(|cost| **cost <= limit).count();
    let drawn = random.random_range(0..count.max(1));
    costs.iter().enumerate().filter(|(_, cost)| **cost <= limit).nth(drawn).map(|(position, _)| position)
}
