//! The choice of two workers for one request: one computes its prompt, the other one decodes. Chosen together, since
//! what one is worth depends on the other.

use rand::{Rng, RngExt};
use smallvec::SmallVec;

use crate::policy::{Candidate, RUNNING_TOKENS};

/// What it costs to move a token's pages, in tokens of prefill: little, but a prefix that is there already costs nothing.
const TRANSFER_TOKENS: f64 = 0.05;

/// Positions of the cheapest pair of those that fit each other: a random one of those whose cost is so near the least
/// that the difference is noise. `None` if none fits.
pub fn cheapest_pair(
    prefill: &[Candidate],
    decode: &[Candidate],
    fits: impl Fn(usize, usize) -> bool,
    random: &mut dyn Rng,
) -> Option<(usize, usize)> {
    let mut pairs: SmallVec<[(usize, usize, f64); 64]> = SmallVec::new();
    for (first, computes) in prefill.iter().enumerate() {
        for (second, decodes) in decode.iter().enumerate() {
            if fits(first, second) {
                pairs.push((first, second, computes.cost() + decodes.load() + transfer(decodes)));
            }
        }
    }
    let least = pairs.iter().map(|pair| pair.2).min_by(f64::total_cmp)?;
    let limit = least + (least / 50.0).max(RUNNING_TOKENS / 4.0);
    pairs.retain(|pair| pair.2 <= limit);
    let (first, second, _) = pairs[random.random_range(0..pairs.len())];
    Some((first, second))
}

fn transfer(decodes: &Candidate) -> f64 {
    decodes.uncached_tokens as f64 * TRANSFER_TOKENS / decodes.speed
}

#[cfg(test)]
mod tests {
    use super::*;
    use branchline_core::WorkerId;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    fn candidate(uncached_tokens: u64, running: u64) -> Candidate {
        let (worker, name) = (WorkerId(0), 0);
        Candidate {
            worker,
            name,
            uncached_tokens,
            copied_tokens: 0,
            queued_tokens: 0,
            surplus_tokens: 0,
            hinted_tokens: 0,
            shared_by: 1,
            running,
            usage: 0.0,
            speed: 1.0,
        }
    }

    fn chosen(prefill: &[Candidate], decode: &[Candidate]) -> (usize, usize) {
        let mut random = StdRng::seed_from_u64(1);
        cheapest_pair(prefill, decode, |_, _| true, &mut random).unwrap()
    }

    #[test]
    fn the_prompt_goes_where_it_is_cached_and_the_output_where_there_is_least_to_do() {
        let prefill = [candidate(4000, 0), candidate(100, 1)];
        assert_eq!(chosen(&prefill, &[candidate(4000, 9), candidate(4000, 1)]), (1, 1));
    }

    #[test]
    fn a_decode_worker_that_has_the_pages_already_is_worth_a_little_load() {
        let prefill = [candidate(4000, 0)];
        assert_eq!(chosen(&prefill, &[candidate(0, 1), candidate(4000, 0)]), (0, 0));
        assert_eq!(chosen(&prefill, &[candidate(0, 9), candidate(4000, 0)]), (0, 1));
    }

    #[test]
    fn what_does_not_fit_is_never_paired_however_cheap_it_is() {
        let (prefill, decode) = ([candidate(0, 0), candidate(9000, 9)], [candidate(0, 0), candidate(0, 9)]);
        let mut random = StdRng::seed_from_u64(1);
        let fits = |first: usize, second: usize| first == 1 && second == 1;
        assert_eq!(cheapest_pair(&prefill, &decode, fits, &mut random), Some((1, 1)));
        assert_eq!(cheapest_pair(&prefill, &decode, |_, _| false, &mut random), None);
        assert_eq!(cheapest_pair(&[], &decode, |_, _| true, &mut random), None);
    }

    #[test]
    fn equals_share_the_requests() {
        let mut random = StdRng::seed_from_u64(3);
        let (prefill, decode) = ([candidate(9, 0); 2], [candidate(9, 0); 2]);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..200 {
            seen.insert(cheapest_pair(&prefill, &decode, |_, _| true, &mut random).unwrap());
        }
        assert_eq!(seen.len(), 4);
    }
}
