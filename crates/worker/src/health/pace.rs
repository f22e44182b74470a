//! How fast a worker computes prompts, and how long a first byte may take before the worker is in doubt.
//!
//! The rate is learnt from the worker's own first bytes, quickly downwards and slowly upwards: being wrong about a
//! slow worker costs its requests, being wrong about a fast one costs a moment. Pure: the time comes as an argument.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Prompts shorter than this say nothing of the rate: their first byte is all overhead.
const LEAST_TOKENS: u64 = 64;
/// No rate above this is relied on, in tokens a second: what looks faster was mostly cached.
const MOST_RELIED_ON: f64 = 4000.0;
/// Seconds a token below which workers count as equally fast: what is left is overhead, and noise.
const LEAST_USUAL: f64 = 2e-5;
/// Weight of a new observation that is slower, and of one that is faster, than what is known.
const SLOWER: f64 = 0.5;
const FASTER: f64 = 0.05;

/// Learnt times of one worker. All are estimates: races lose an observation, never more.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Bits of tokens a second; 0 while unknown.
    rate: AtomicU64,
    /// Bits of the usual seconds a token; 0 while unknown. What costs are weighed by.
    usual: AtomicU64,
    /// Microseconds of a first byte without prompt work to speak of.
    base: AtomicU64,
}

impl Pace {
    /// Learns from a first byte that came `took` after the choice, with `tokens` of prompt work before it.
    pub(crate) fn observe(&self, tokens: u64, took: Duration) {
        let micros = took.as_secs_f64() * 1e6;
        if tokens < LEAST_TOKENS {
            let known = self.base.load(Ordering::Relaxed) as f64;
            let weight = if micros > known { SLOWER } else { FASTER };
            self.base.store((known + weight * (micros - known)) as u64, Ordering::Relaxed);
            return;
        }
        let seen = tokens as f64 / took.as_secs_f64().max(1e-6);
        let next = match self.rate() {
            None => seen,
            Some(known) if seen < known => known + SLOWER * (seen - known),
            Some(known) => known + FASTER * (seen - known),
        };
        self.rate.store(next.to_bits(), Ordering::Relaxed);
        let known = f64::from_bits(self.usual.load(Ordering::Relaxed));
        let each = (1.0 / seen).max(LEAST_USUAL);
        let usual = if known > 0.0 { known + FASTER * (each - known) } else { each };
        self.usual.store(usual.to_bits(), Ordering::Relaxed);
    }

    /// Seconds that a prompt token usually takes, if known.
    pub(crate) fn usual(&self) -> Option<f64> {
        let usual = f64::from_bits(self.usual.load(Ordering::Relaxed));
        (usual > 0.0).then_some(usual)
    }

    /// Prompt tokens a second, if known.
    pub(crate) fn rate(&self) -> Option<f64> {
        let rate = f64::from_bits(self.rate.load(Ordering::Relaxed));
        (rate > 0.0).then_some(rate)
    }

    /// When the first byte should be there, from the choice on; `None` while nothing is known.
    pub(crate) fn predict(&self, tokens: u64) -> Option<Duration> {
        let base = Duration::from_micros(self.base.load(Ordering::Relaxed));
        match self.rate() {
            Some(rate) => {
                Some(base + Duration::from_secs_f64(tokens as f64 / rate.clamp(1e-3, MOST_RELIED_ON)))
            }
            // Short prompts have been seen only; a long one may take any time.
            None => (tokens < LEAST_TOKENS && !base.is_zero()).then_some(base),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_predicted_before_anything_was_seen() {
        let pace = Pace::default();
        assert_eq!((pace.rate(), pace.predict(1000)), (None, None));
        pace.observe(10, Duration::from_millis(20));
        assert_eq!(pace.predict(1000), None, "a long prompt may take any time");
        assert_eq!(pace.predict(10), Some(Duration::from_millis(10)));
    }

    #[test]
    fn a_slow_answer_counts_at_once_and_a_fast_one_slowly() {
        let pace = Pace::default();
        pace.observe(1000, Duration::from_secs(1));
        pace.observe(1000, Duration::from_secs(10));
        assert_eq!(pace.rate(), Some(550.0));
        pace.observe(1000, Duration::from_millis(100));
        let rate = pace.rate().unwrap();
        assert!((1000.0..1100.0).contains(&rate), "{rate}");
    }

    #[test]
    fn a_rate_that_only_a_cache_can_reach_is_not_relied_on() {
        let pace = Pace::default();
        pace.observe(100_000, Duration::from_millis(10));
        assert_eq!(pace.predict(40_000), Some(Duration::from_secs(10)));
    }
}
