//! Policies that keep together what has the same key: a session, a user, the beginning of a prompt.
//!
//! A key falls on the worker with the highest mix of the two hashes, so that every gateway agrees without talking,
//! and a worker that leaves moves only its own keys. Requests without a key go to the least loaded.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use rand::Rng;

use super::cost::cheapest;
use super::{Ask, Candidate, Policy, PolicyKind};
use branchline_core::WorkerId;

/// How much a worker and a key like each other. Finaliser of splitmix64.
fn affinity(key: u64, worker: u64) -> u64 {
    let mut x = key.rotate_left(29) ^ worker.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn favourite(candidates: &[Candidate], key: u64) -> Option<usize> {
    (0..candidates.len()).max_by_key(|at| affinity(key, candidates[*at].name))
}

#[derive(Debug)]
pub(super) struct ConsistentHashing;

impl Policy for ConsistentHashing {
    fn kind(&self) -> PolicyKind {
        PolicyKind::ConsistentHashing
    }

    fn choose(&self, candidates: &[Candidate], ask: &Ask, random: &mut dyn Rng) -> Option<usize> {
        match ask.key {
            Some(key) => favourite(candidates, key),
            None => cheapest(candidates, Candidate::load, random),
        }
    }
}

/// A worker that has more than this times its share of the requests passes a prefix on.
const LOAD_FACTOR: f64 = 1.25;

#[derive(Debug)]
pub(super) struct PrefixHash;

impl Policy for PrefixHash {
    fn kind(&self) -> PolicyKind {
        PolicyKind::PrefixHash
    }

    fn choose(&self, candidates: &[Candidate], ask: &Ask, random: &mut dyn Rng) -> Option<usize> {
        let Some(prefix) = ask.prefix else { return cheapest(candidates, Candidate::load, random) };
        let all: u64 = candidates.iter().map(|candidate| candidate.running).sum();
        let share = (all + 1) as f64 / candidates.len().max(1) as f64;
        let bound = (share * LOAD_FACTOR).ceil();
        let open = |at: &usize| (candidates[*at].running as f64) < bound;
        (0..candidates.len()).filter(open).max_by_key(|at| affinity(prefix, candidates[*at].name))
    }
}

/// A session that has been silent for this long is forgotten, as it is in the field's gateways.
const IDLE: Duration = Duration::from_secs(14_400);
/// Sessions remembered; the longest silent go first.
const SESSIONS: usize = 1 << 20;

#[derive(Debug, Default)]
struct Table {
    /// Key → its worker and when it was last seen.
    sessions: HashMap<u64, (WorkerId, Duration)>,
    swept: Duration,
}

/// Remembers which worker a session has, and leaves it there while it can.
#[derive(Debug, Default)]
pub(super) struct Sticky {
    table: Mutex<Table>,
}

impl Policy for Sticky {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Sticky
    }

    fn choose(&self, candidates: &[Candidate], ask: &Ask, random: &mut dyn Rng) -> Option<usize> {
        let Some(key) = ask.key else { return cheapest(candidates, Candidate::load, random) };
        let mut table = self.table.lock();
        table.sweep(ask.now);
        if let Some((worker, seen)) = table.sessions.get_mut(&key) {
            *seen = ask.now;
            // While its worker is away a session has a stand-in, always the same, and comes back afterwards.
            let at = candidates.iter().position(|candidate| candidate.worker == *worker);
            return at.or_else(|| favourite(candidates, key));
        }
        let at = cheapest(candidates, Candidate::load, random)?;
        table.sessions.insert(key, (candidates[at].worker, ask.now));
        Some(at)
    }
}

impl Table {
    /// Forgets the silent, now and then; all but the fresher half if there are too many.
    fn sweep(&mut self, now: Duration) {
        if self.sessions.len() >= SESSIONS {
            let mut seen: Vec<Duration> = self.sessions.values().map(|(_, seen)| *seen).collect();
            let middle = seen.len() / 2;
            let bound = *seen.select_nth_unstable(middle).1;
            self.sessions.retain(|_, (_, seen)| *seen > bound);
        } else if now.saturating_sub(self.swept) >= Duration::from_secs(60) {
            self.swept = now;
            self.sessions.retain(|_, (_, seen)| now.saturating_sub(*seen) < IDLE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    fn workers(numbers: &[u32]) -> Vec<Candidate> {
        let worker = |number: &u32| Candidate {
            worker: WorkerId(*number),
            name: xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes()),
            uncached_tokens: 0,
            copied_tokens: 0,
            queued_tokens: 0,
            running: 0,
            surplus_tokens: 0,
            hinted_tokens: 0,
            shared_by: 1,
            usage: 0.0,
            speed: 1.0,
        };
        numbers.iter().map(worker).collect()
    }

    fn ask(key: u64) -> Ask {
        Ask { key: Some(key), prefix: Some(key), now: Duration::from_secs(1) }
    }

    fn place(policy: &dyn Policy, candidates: &[Candidate], ask: &Ask) -> WorkerId {
        candidates[policy.choose(candidates, ask, &mut StdRng::seed_from_u64(ask.key.unwrap())).unwrap()]
            .worker
    }

    #[test]
    fn a_worker_that_is_away_moves_its_own_keys_only_and_they_come_back() {
        let (all, two) = (workers(&[0, 1, 2]), workers(&[0, 2]));
        for kind in [PolicyKind::ConsistentHashing, PolicyKind::PrefixHash, PolicyKind::Sticky] {
            let policy = kind.build();
            let before: Vec<_> = (0..300).map(|key| place(&*policy, &all, &ask(key))).collect();
            let during: Vec<_> = (0..300).map(|key| place(&*policy, &two, &ask(key))).collect();
            let again: Vec<_> = (0..300).map(|key| place(&*policy, &two, &ask(key))).collect();
            let after: Vec<_> = (0..300).map(|key| place(&*policy, &all, &ask(key))).collect();
            assert_eq!((&before, &during), (&after, &again), "{kind:?}");
            for (key, old) in before.iter().enumerate() {
                assert!(*old == WorkerId(1) || *old == during[key], "{kind:?} moved {key}");
            }
            for worker in 0..3 {
                let count = before.iter().filter(|old| **old == WorkerId(worker)).count();
                assert!((60..=140).contains(&count), "{kind:?}: {count} of 300 keys on one of three");
            }
        }
    }

    #[test]
    fn a_prefix_is_passed_on_by_a_worker_with_more_than_its_share() {
        let policy = PolicyKind::PrefixHash.build();
        let mut all = workers(&[0, 1, 2, 3]);
        let home = place(&*policy, &all, &ask(7));
        let at = all.iter().position(|candidate| candidate.worker == home).unwrap();
        all.iter_mut().for_each(|candidate| candidate.running = 10);
        assert_eq!(place(&*policy, &all, &ask(7)), home);
        all[at].running = 40;
        assert_ne!(place(&*policy, &all, &ask(7)), home);
    }

    #[test]
    fn a_silent_session_is_forgotten_after_its_time() {
        let policy = Sticky::default();
        let all = workers(&[0, 1]);
        place(&policy, &all, &ask(1));
        let late = Ask { now: IDLE * 2, ..ask(2) };
        place(&policy, &all, &late);
        assert_eq!(policy.table.lock().sessions.keys().collect::<Vec<_>>(), [&2]);
    }
}
