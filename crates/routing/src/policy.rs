//! How one of several workers is chosen. A policy sees costs and loads only; it does no I/O and keeps no clock.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};

use branchline_core::{Error, WorkerId};
use rand::{Rng, RngExt};

/// A worker that could serve the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Who.
    pub worker: WorkerId,
    /// Prompt tokens it would have to compute.
    pub uncached_tokens: u64,
    /// Prompt tokens of its other requests not computed yet.
    pub queued_tokens: u64,
    /// Its requests from choice to last byte.
    pub running: u64,
}

/// Chooses among candidates. Conformance of all implementations is one test suite.
pub trait Policy: fmt::Debug + Send + Sync {
    /// The name in options.
    fn kind(&self) -> PolicyKind;

    /// Position of the chosen candidate; `None` only if there is no candidate. May draw from `random`.
    fn choose(&self, candidates: &[Candidate], random: &mut dyn Rng) -> Option<usize>;
}

/// The policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// Any.
    Random,
    /// One after the other.
    RoundRobin,
    /// The less loaded of two random ones.
    PowerOfTwo,
    /// The cheapest by uncached prompt and load.
    #[default]
    CacheAware,
}

impl PolicyKind {
    /// All, in the order of the reference page.
    pub const ALL: [Self; 4] = [Self::CacheAware, Self::RoundRobin, Self::PowerOfTwo, Self::Random];

    /// The name in options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::PowerOfTwo => "power_of_two",
            Self::CacheAware => "cache_aware",
        }
    }

    /// Whether choices need predictions of cached tokens.
    pub fn needs_index(self) -> bool {
        self == Self::CacheAware
    }

    /// A fresh policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Random => Box::new(Random),
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::PowerOfTwo => Box::new(PowerOfTwo),
            Self::CacheAware => Box::new(CacheAware),
        }
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid("policy", format!("policy '{name}' does not exist; use one of {names}"))
        })
    }
}

/// Tokens of prefill that one running request is worth: it shares each step with the newcomer.
const RUNNING_TOKENS: u64 = 64;

impl Candidate {
    /// Load in tokens, the request's own prompt left out.
    fn load(&self) -> u64 {
        self.queued_tokens.saturating_add(self.running.saturating_mul(RUNNING_TOKENS))
    }

    /// The request's own prompt and load. Queued prompts count half: computing a prefix twice costs the fleet its
    /// whole length, waiting for it costs this request some time, so twins in flight stay together.
    fn cost(&self) -> u64 {
        let running = self.running.saturating_mul(RUNNING_TOKENS);
        self.uncached_tokens.saturating_add(self.queued_tokens / 2).saturating_add(running)
    }
}

#[derive(Debug)]
struct Random;

impl Policy for Random {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Random
    }

    fn choose(&self, candidates: &[Candidate], random: &mut dyn Rng) -> Option<usize> {
        (!candidates.is_empty()).then(|| random.random_range(0..candidates.len()))
    }
}

/// Counts choices, not positions of a list: the turn stays fair while workers come and go.
#[derive(Debug, Default)]
struct RoundRobin {
    turn: AtomicUsize,
}

impl Policy for RoundRobin {
    fn kind(&self) -> PolicyKind {
        PolicyKind::RoundRobin
    }

    fn choose(&self, candidates: &[Candidate], _: &mut dyn Rng) -> Option<usize> {
        (!candidates.is_empty()).then(|| self.turn.fetch_add(1, Ordering::Relaxed) % candidates.len())
    }
}

#[derive(Debug)]
struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn kind(&self) -> PolicyKind {
        PolicyKind::PowerOfTwo
    }

    fn choose(&self, candidates: &[Candidate], random: &mut dyn Rng) -> Option<usize> {
        match candidates.len() {
            0 => None,
            1 => Some(0),
            count => {
                let first = random.random_range(0..count);
                // Drawn among the others, so that the two always differ.
                let second = (first + random.random_range(1..count)) % count;
                Some(if candidates[second].load() < candidates[first].load() { second } else { first })
            }
        }
    }
}

#[derive(Debug)]
struct CacheAware;

impl Policy for CacheAware {
    fn kind(&self) -> PolicyKind {
        PolicyKind::CacheAware
    }

    fn choose(&self, candidates: &[Candidate], random: &mut dyn Rng) -> Option<usize> {
        let least = candidates.iter().map(Candidate::cost).min()?;
        // Costs this close are noise; without the draw, ties would always fall on the first worker.
        let limit = least.saturating_add((least / 50).max(RUNNING_TOKENS / 4));
        let near = || candidates.iter().enumerate().filter(|(_, candidate)| candidate.cost() <= limit);
        near().nth(random.random_range(0..near().count())).map(|(position, _)| position)
    }
}

#[cfg(test)]
mod tests;
