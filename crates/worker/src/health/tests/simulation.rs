//! Seeded runs of one worker's record on virtual time: whatever the order of choices, verdicts and bytes, these hold.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::super::*;

/// Seeds in one run of the tests.
const SEEDS: u64 = 2000;
/// What happens in one run.
const STEPS: usize = 200;

/// A record with the requests that are in it.
struct Run {
    seed: u64,
    random: StdRng,
    health: Health,
    now: Duration,
    live: Vec<Entry>,
    /// Entries let in while the breaker was half-open.
    probes: Vec<Entry>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let breaker = BreakerOptions {
            failures: random.random_range(1..8),
            share: random.random_range(0.1..1.0),
            window: random.random_range(1..64),
            open: Duration::from_millis(random.random_range(0..20_000)),
            successes: random.random_range(0..4),
        };
        let health = Health::new(HealthOptions { breaker, ..HealthOptions::default() });
        Self { seed, random, health, now: Duration::from_secs(1), live: Vec::new(), probes: Vec::new() }
    }

    fn verdict(&mut self) -> Verdict {
        match self.random.random_range(0..3) {
            0 => Verdict::Success,
            1 => Verdict::Failure,
            _ => Verdict::Neutral,
        }
    }

    fn step(&mut self) {
        match self.random.random_range(0..8) {
            0..3 => self.enter(),
            3..5 => self.settle(),
            5 => self.now += Duration::from_millis(self.random.random_range(0..5_000)),
            6 => self.talk(),
            _ => self.doubt(),
        }
        self.check();
    }

    fn enter(&mut self) {
        let (stand, phase) = (self.health.stand(self.now), self.health.breaker.phase(self.now));
        let entered = self.health.enter(self.now);
        assert_eq!(entered.is_some(), stand != Stand::Shut, "seed {}: {stand:?}", self.seed);
        let Some(entry) = entered else { return };
        if phase == Phase::HalfOpen {
            self.probes.push(entry);
        }
        self.live.push(entry);
    }

    fn settle(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.random.random_range(0..self.live.len());
        let (entry, verdict) = (self.live.swap_remove(at), self.verdict());
        let before = self.health.breaker.phase(self.now);
        let turned = self.health.settle(entry, verdict, self.now);
        self.probes.retain(|probe| *probe != entry);
        if verdict == Verdict::Neutral {
            assert_eq!(turned, None, "seed {}: a neutral verdict turned a breaker", self.seed);
        }
        if turned == Some(Phase::Closed) {
            assert_eq!((before, verdict), (Phase::HalfOpen, Verdict::Success), "seed {}", self.seed);
        }
        if turned == Some(Phase::Open) {
            assert_eq!(verdict, Verdict::Failure, "seed {}", self.seed);
        }
    }

    fn talk(&mut self) {
        match self.random.random_range(0..3) {
            0 => self.health.heard(self.now),
            1 => {
                let took = Duration::from_millis(self.random.random_range(0..2_000));
                self.health.begun(self.now, self.random.random_range(0..5_000), took);
                assert!(!self.health.is_in_doubt(), "seed {}: a first byte ends a doubt", self.seed);
            }
            _ => self.health.rest(Duration::from_millis(self.random.random_range(0..90_000)), self.now),
        }
    }

    fn doubt(&mut self) {
        let patience = Duration::from_millis(self.random.random_range(1..3_000));
        let chosen = self.now.saturating_sub(patience * 2);
        let left = self.health.patience_left(chosen, patience, self.now);
        assert!(left <= patience * HOPELESS, "seed {}: {left:?} of {patience:?}", self.seed);
        if left.is_zero() {
            self.health.suspect(patience, self.now);
            assert!(self.health.is_in_doubt(), "seed {}", self.seed);
        }
    }

    fn check(&self) {
        let share = self.health.share(self.now);
        assert!((COLD_SHARE..=1.0).contains(&share), "seed {}: {share}", self.seed);
        if self.health.breaker.phase(self.now) == Phase::HalfOpen {
            assert!(self.probes.len() <= 1 || self.live.len() > 1, "seed {}", self.seed);
        }
        if let Some(rate) = self.health.pace.rate() {
            assert!(rate.is_finite() && rate > 0.0, "seed {}: {rate}", self.seed);
            assert!(self.health.pace.predict(1_000_000).is_some(), "seed {}", self.seed);
        }
        assert!(!self.health.word(self.now).is_empty());
    }

    /// Once all requests are over and time has passed, the worker can be chosen and, doing well, is closed again.
    fn recovers(mut self) {
        for entry in std::mem::take(&mut self.live) {
            self.health.settle(entry, Verdict::Neutral, self.now);
        }
        self.now += Duration::from_secs(3600);
        for _ in 0..5 {
            assert_ne!(self.health.stand(self.now), Stand::Shut, "seed {}: shut for ever", self.seed);
            let entry = self.health.enter(self.now).expect("it is not shut");
            self.health.begun(self.now, 100, Duration::from_millis(50));
            self.health.settle(entry, Verdict::Success, self.now);
        }
        assert_eq!(self.health.breaker.phase(self.now), Phase::Closed, "seed {}", self.seed);
        assert_eq!(self.health.stand(self.now), Stand::Well, "seed {}", self.seed);
    }
}

#[test]
fn no_order_of_events_leaks_a_probe_or_shuts_a_worker_for_ever() {
    for seed in 0..SEEDS {
        let mut run = Run::new(seed);
        (0..STEPS).for_each(|_| run.step());
        run.recovers();
    }
}

#[test]
fn no_order_of_requests_and_retries_overdraws_the_budget() {
    for seed in 0..SEEDS {
        let mut random = StdRng::seed_from_u64(seed);
        let options =
            BudgetOptions { share: random.random_range(0.0..1.0), least: random.random_range(0.0..5.0) };
        let budget = RetryBudget::new(options);
        let (mut now, mut requests, mut retries) = (Duration::ZERO, 0.0, 0.0);
        for _ in 0..STEPS {
            match random.random_range(0..4) {
                0 => now += Duration::from_millis(random.random_range(0..500)),
                1 => {
                    budget.earn();
                    requests += 1.0;
                }
                _ => retries += f64::from(u8::from(budget.spend(now))),
            }
        }
        let most = 10.0 + requests * options.share + now.as_secs_f64() * options.least + 1e-6;
        assert!(retries <= most, "seed {seed}: {retries} retries of {most}");
    }
}
