//! How fast a worker computes prompts, and how long a first byte may take before the worker is in doubt.
//!
//! The rate is learnt from the worker's own first bytes, quickly downwards and slowly upwards: being wrong about a
//! slow worker costs its requests, being wrong about a fast one costs a moment. Pure: the time comes as an argument.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
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
/// Share of what was seen before that an observation leaves in the usual pace, and how many it takes to trust that: equal
/// workers must not look a third apart because one had the short prompts.
const KEPT: f32 = 0.98;
const COMPARED_FROM: u32 = 32;

/// Learnt times of one worker. All are estimates: races lose an observation, never more.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// Bits of tokens a second; 0 while unknown.
    rate: AtomicU64,
    /// Prompt tokens and the seconds they took, both fading: two `f32`. What costs are weighed by.
    work: AtomicU64,
    /// First bytes that `work` was made of.
    seen: AtomicU32,
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
        let grown = |packed| {
            let (before, spent) = unpacked(packed);
            Some(packed_of(before * KEPT + tokens as f32, spent * KEPT + took.as_secs_f32()))
        };
        // The closure never declines.
        let _ = self.work.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown);
        self.seen.fetch_add(1, Ordering::Relaxed);
    }

    /// Seconds that a prompt token usually takes, once enough were seen to compare workers by.
    pub(crate) fn usual(&self) -> Option<f64> {
        if self.seen.load(Ordering::Relaxed) < COMPARED_FROM {
            return None;
        }
        let (tokens, seconds) = unpacked(self.work.load(Ordering::Relaxed));
        Some((f64::from(seconds) / f64::from(tokens)).max(LEAST_USUAL))
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

fn packed_of(tokens: f32, seconds: f32) -> u64 {
    u64::from(tokens.to_bits()) << 32 | u64::from(seconds.to_bits())
}

fn unpacked(packed: u64) -> (f32, f32) {
    (f32::from_bits((packed >> 32) as u32), f32::from_bits(packed as u32))
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
    fn the_usual_pace_is_that_of_all_tokens_and_is_told_once_enough_were_seen() {
        let pace = Pace::default();
        for number in 0..COMPARED_FROM {
            assert_eq!(pace.usual(), None, "after {number}");
            // Short prompts pay the same overhead as long ones.
            let tokens = if number % 2 == 0 { 100 } else { 1900 };
            pace.observe(tokens, Duration::from_secs_f64(tokens as f64 / 1000.0 + 0.1));
        }
        let usual = pace.usual().unwrap();
        assert!((0.00105..0.00115).contains(&usual), "{usual}");
    }

    #[test]
    fn a_rate_that_only_a_cache_can_reach_is_not_relied_on() {
        let pace = Pace::default();
        pace.observe(100_000, Duration::from_millis(10));
        assert_eq!(pace.predict(40_000), Some(Duration::from_secs(10)));
    }
}
