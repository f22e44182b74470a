//! Puts a worker aside that fails far more often than its peers, though not often enough to break.
//!
//! Looked at only after a failure. Never more than a share of the fleet is aside by this.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Health;

/// When a worker is an outlier.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutlierOptions {
    /// Share of failures among its last outcomes that makes it one, if its peers fail a quarter of that at most; 0
    /// for never.
    pub share: f64,
    /// How long it is put aside.
    pub time: Duration,
    /// Largest share of the workers that may be aside at once.
    pub ceiling: f64,
}

impl Default for OutlierOptions {
    fn default() -> Self {
        Self { share: 0.25, time: Duration::from_secs(30), ceiling: 0.34 }
    }
}

/// Ejects what is an outlier among `workers`, which serve the same; answers the positions.
pub(crate) fn review(workers: &[&Health], now: Duration) -> Vec<usize> {
    let mut ejected = Vec::new();
    let shares: Vec<Option<f64>> = workers.iter().map(|health| health.breaker.failing()).collect();
    let at = super::micros(now);
    let mut aside = workers.iter().filter(|health| at < health.ejected_until.load(Ordering::Relaxed)).count();
    for (position, health) in workers.iter().enumerate() {
        // Looked at again until enough of it is known.
        let Some(own) = shares[position] else { continue };
        if !health.failed.swap(false, Ordering::AcqRel) {
            continue;
        }
        let options = health.options.outlier;
        let mut peers: Vec<f64> =
            (0..shares.len()).filter(|other| *other != position).filter_map(|other| shares[other]).collect();
        peers.sort_by(f64::total_cmp);
        let Some(middle) = peers.get(peers.len() / 2) else { continue };
        let room = (options.ceiling * workers.len() as f64).floor() as usize;
        let is_outlier = options.share > 0.0 && own >= options.share && *middle <= own / 4.0;
        if is_outlier && aside < room && at >= health.ejected_until.load(Ordering::Relaxed) {
            health.ejected_until.store(super::micros(now + options.time), Ordering::Relaxed);
            // What it did before counts no more when it comes back.
            health.breaker.forget();
            aside += 1;
            ejected.push(position);
        }
    }
    ejected
}

#[cfg(test)]
mod tests {
    use super::super::{HealthOptions, Stand, Verdict};
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    /// A worker of whose last twenty outcomes every `every`th failed.
    fn worker(every: usize) -> Health {
        let health = Health::new(HealthOptions::default());
        for number in 1..=40 {
            let entry = health.enter(NOW).unwrap();
            let verdict = if number % every == 0 { Verdict::Failure } else { Verdict::Success };
            health.settle(entry, verdict, NOW);
        }
        health
    }

    fn reviewed(every: &[usize]) -> Vec<usize> {
        let workers: Vec<_> = every.iter().map(|every| worker(*every)).collect();
        let ejected = review(&workers.iter().collect::<Vec<_>>(), NOW);
        for (position, health) in workers.iter().enumerate() {
            let right = if ejected.contains(&position) { Stand::Aside } else { Stand::Well };
            assert_eq!((health.stand(NOW), health.stand(2 * NOW)), (right, Stand::Well));
        }
        ejected
    }

    #[test]
    fn the_one_that_fails_among_the_well_is_put_aside_for_a_time() {
        assert_eq!(reviewed(&[100, 4, 100]), [1]);
    }

    #[test]
    fn failing_like_the_others_puts_nobody_aside() {
        assert!(reviewed(&[4, 4, 4]).is_empty());
        assert!(reviewed(&[100, 10, 100]).is_empty(), "too few failures");
    }

    #[test]
    fn no_more_than_the_ceiling_is_aside() {
        assert!(reviewed(&[100, 4]).is_empty(), "a third of two is none");
        assert_eq!(reviewed(&[100, 4, 100, 100, 4, 4, 100]).len(), 2);
    }
}
