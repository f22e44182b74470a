//! How one of several workers is chosen. A policy sees costs, loads and keys only; it does no I/O and keeps no clock.

mod cost;
mod keyed;

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use branchline_core::{Error, WorkerId};
use rand::{Rng, RngExt};

use cost::{CacheAware, LeastLoad};
use keyed::{ConsistentHashing, PrefixHash, Sticky};

/// A worker that could serve the request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Who.
    pub worker: WorkerId,
    /// A hash of its address, the same at every gateway.
    pub name: u64,
    /// Prompt tokens it would have to compute.
    pub uncached_tokens: u64,
    /// Tokens of the prompt that others have cached and it lacks, each by the square of how often it was asked for lately.
    pub copied_tokens: u64,
    /// Prompt tokens of its other requests not computed yet.
    pub queued_tokens: u64,
    /// Its requests from choice to last byte.
    pub running: u64,
    /// What these are expected to write more than usual requests, or less: the sum of [`hinted_tokens`].
    pub hinted_tokens: i64,
    /// Requests of the same fork among which what is computed there would be shared; 1 if the request is alone.
    pub shared_by: u64,
    /// Prompt tokens it was sent lately beyond what the least of its peers was.
    pub surplus_tokens: u64,
    /// Share of its KV pool in use, [0, 1]; 0 if unknown.
    pub usage: f64,
    /// How much it gets done beside a usual worker, above 0; less while it warms up or if it is dear.
    pub speed: f64,
}

/// What is known of the request itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ask {
    /// Hash of what the client says belongs together (a session, a user).
    pub key: Option<u64>,
    /// Hash of the prompt's beginning.
    pub prefix: Option<u64>,
    /// Now, on the caller's clock.
    pub now: Duration,
}

/// Chooses among candidates. Conformance of all implementations is one test suite.
pub trait Policy: fmt::Debug + Send + Sync {
    /// The name in options.
    fn kind(&self) -> PolicyKind;

    /// Position of the chosen candidate; `None` only if there is no candidate. May draw from `random`.
    fn choose(&self, candidates: &[Candidate], ask: &Ask, random: &mut dyn Rng) -> Option<usize>;
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
    /// The least loaded.
    LeastLoad,
    /// The one that a session's or user's key falls on.
    ConsistentHashing,
    /// The one that the prompt's beginning falls on, unless it has more than its share.
    PrefixHash,
    /// The one that had the session's last request.
    Sticky,
    /// The cheapest by uncached prompt and load.
    #[default]
    CacheAware,
}

impl PolicyKind {
    /// All, in the order of the reference page.
    pub const ALL: [Self; 8] = [
        Self::CacheAware,
        Self::LeastLoad,
        Self::RoundRobin,
        Self::PowerOfTwo,
        Self::Random,
        Self::ConsistentHashing,
        Self::PrefixHash,
        Self::Sticky,
    ];

    /// The name in options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::RoundRobin => "round_robin",
            Self::PowerOfTwo => "power_of_two",
            Self::LeastLoad => "least_load",
            Self::ConsistentHashing => "consistent_hashing",
            Self::PrefixHash => "prefix_hash",
            Self::Sticky => "sticky",
            Self::CacheAware => "cache_aware",
        }
    }

    /// Whether choices need predictions of cached tokens.
    pub fn needs_index(self) -> bool {
        self == Self::CacheAware
    }

    /// Whether choices need [`Ask::key`].
    pub fn needs_key(self) -> bool {
        matches!(self, Self::ConsistentHashing | Self::Sticky)
    }

    /// Whether choices need [`Ask::prefix`].
    pub fn needs_prefix(self) -> bool {
        self == Self::PrefixHash
    }

    /// A fresh policy of this kind.
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Random => Box::new(Random),
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::PowerOfTwo => Box::new(PowerOfTwo),
            Self::LeastLoad => Box::new(LeastLoad),
            Self::ConsistentHashing => Box::new(ConsistentHashing),
            Self::PrefixHash => Box::new(PrefixHash),
            Self::Sticky => Box::new(Sticky::default()),
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
pub(crate) const RUNNING_TOKENS: f64 = 64.0;
/// Tokens of prefill that a KV pool costs for each full pool's worth it is used over what is left.
const PRESSURE_TOKENS: f64 = 300.0;
/// What a token that must be computed a second time costs the fleet beyond its computation: its copy pushes others out
/// of a cache. Bounded, so that no conversation waits for ever for the worker that has it.
const COPY_WEIGHT: f64 = 24.0;
const COPY_MOST: f64 = 12_000.0;
/// Tokens of prefill that a token sent beyond a peer's share is worth, and the most they come to: enough to choose
/// among equals, too little to flood a newcomer.
const SURPLUS_WEIGHT: f64 = 0.02;
const SURPLUS_MOST: f64 = 500.0;

/// Output tokens that weigh as much as one token of prefill, and the least and most that a running request comes to: a
/// client's word must not move a fleet.
const WRITTEN_A_TOKEN: f64 = 4.0;
const RUNNING_BOUNDS: (f64, f64) = (RUNNING_TOKENS / 4.0, RUNNING_TOKENS * 4.0);
/// Sequences of one fork that a worker takes in one step; what our engines run at once unless told otherwise.
const FORK_ROOM: u64 = 64;

/// Tokens of prefill that a running request is worth beyond a usual one (less, if negative) if it is expected to write so
/// many tokens.
pub fn hinted_tokens(expected: u32) -> i64 {
    let own = (f64::from(expected) / WRITTEN_A_TOKEN).clamp(RUNNING_BOUNDS.0, RUNNING_BOUNDS.1);
    (own - RUNNING_TOKENS) as i64
}

/// Requests of a fork `width` wide that would be together on one worker; 1 for a fork that one worker takes whole, which
/// is better kept together as any others.
pub fn fork_part(width: u32) -> u64 {
    match u64::from(width) {
        width if width > FORK_ROOM => width / width.div_ceil(FORK_ROOM),
        _ => 1,
    }
}

impl Candidate {
    /// Load in tokens of a usual worker, the request's own prompt left out.
    pub(crate) fn load(&self) -> f64 {
        (self.queued_tokens as f64 + self.standing()) / self.speed
    }

    /// The request's own prompt, what a copy of it costs the fleet, and load. Queued prompts count half: computing a
    /// prefix twice costs the fleet its whole length, waiting for it costs this request some time, so twins in flight
    /// stay together. Branches of a fork that is too wide for one worker bear what a second one computes together.
    pub fn cost(&self) -> f64 {
        let copies = (self.copied_tokens as f64 * COPY_WEIGHT).min(COPY_MOST);
        let surplus = (self.surplus_tokens as f64 * SURPLUS_WEIGHT).min(SURPLUS_MOST);
        let computed = (self.uncached_tokens as f64 + copies) / self.shared_by.max(1) as f64;
        let waits = computed + self.queued_tokens as f64 / 2.0;
        (waits + surplus + self.standing()) / self.speed
    }

    /// What its running requests and its full pool cost a newcomer.
    fn standing(&self) -> f64 {
        let usage = self.usage.clamp(0.0, 0.99);
        let running = (self.running as f64 * RUNNING_TOKENS + self.hinted_tokens as f64).max(0.0);
        running + PRESSURE_TOKENS * usage / (1.0 - usage)
    }
}

/// Whether a candidate that was drawn without regard to its speed takes the request.
fn takes(candidate: &Candidate, random: &mut dyn Rng) -> bool {
    candidate.speed >= 1.0 || random.random::<f64>() < candidate.speed
}

#[derive(Debug)]
struct Random;

impl Policy for Random {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Random
    }

    fn choose(&self, candidates: &[Candidate], _: &Ask, random: &mut dyn Rng) -> Option<usize> {
        let draw = |random: &mut dyn Rng| random.random_range(0..candidates.len());
        if candidates.is_empty() {
            return None;
        }
        // A fleet of slow ones only must not draw for ever.
        let drawn = (0..4).map(|_| draw(random)).collect::<smallvec::SmallVec<[usize; 4]>>();
        drawn.iter().copied().find(|at| takes(&candidates[*at], random)).or(drawn.first().copied())
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

    fn choose(&self, candidates: &[Candidate], _: &Ask, random: &mut dyn Rng) -> Option<usize> {
        let next = || self.turn.fetch_add(1, Ordering::Relaxed) % candidates.len();
        if candidates.is_empty() {
            return None;
        }
        let first = next();
        if takes(&candidates[first], random) {
            return Some(first);
        }
        Some(next())
    }
}

#[derive(Debug)]
struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn kind(&self) -> PolicyKind {
        PolicyKind::PowerOfTwo
    }

    fn choose(&self, candidates: &[Candidate], _: &Ask, random: &mut dyn Rng) -> Option<usize> {
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

#[cfg(test)]
mod tests;
