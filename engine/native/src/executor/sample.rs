//! One logits row to its outcome: next token, score of a known token, logprobs.
//!
//! Same meaning as the torch sampler, without a full sort: filters look at the few best values, and noise is
//! computed only where it can still win. Logprobs are of the raw row.

use super::noise::{Keys, bound, gumbel};
use super::penalty::Counts;
use crate::kernels::Rows;

const UNUSABLE: &str = "model produced NaN or infinite logits for this sequence";
const NOTHING_LEFT: &str = "bans, logit_bias and the constraint leave no token to choose";
/// Scaled logits this far below the best are looked at only if those above do not suffice.
const NEAR: f32 = 10.0;

/// What to do with one row; see `RowPlan` of the Python package.
#[derive(Clone, Default)]
pub(super) struct Plan {
    pub(super) row: usize,
    pub(super) target: Option<i64>,
    pub(super) temperature: f32,
    pub(super) top_k: i64,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
    pub(super) seed: u64,
    pub(super) position: u64,
    pub(super) penalties: Option<Counts>,
    pub(super) bias: Vec<(usize, f32)>,
    pub(super) banned: Vec<usize>,
    pub(super) want_logprob: bool,
    pub(super) tops: usize,
    pub(super) chosen: Vec<usize>,
    /// Guessed tokens before this row, which `penalties` has not counted.
    pub(super) ahead: Vec<usize>,
    /// Bit t % 32 of word t / 32 is set where token t is allowed; ids beyond it are not.
    pub(super) mask: Option<Vec<i32>>,
}

/// The answer to one plan.
#[derive(Clone, Default)]
pub(super) struct Outcome {
    pub(super) token: i64,
    pub(super) logprob: Option<f32>,
    pub(super) tops: Option<Vec<(usize, f32)>>,
    pub(super) chosen: Option<Vec<(usize, f32)>>,
    pub(super) error: Option<String>,
}

impl Outcome {
    fn failed(plan: &Plan, error: impl Into<String>) -> Self {
        Self { token: plan.target.unwrap_or(-1), error: Some(error.into()), ..Self::default() }
    }
}

/// Answer one plan. Never fails for more than its own row.
pub(super) fn answer(rows: Rows, logits: &[f32], plan: &Plan) -> Outcome {
    if let Some(id) = outside(plan, logits.len()) {
        return Outcome::failed(plan, format!("token id {id} is outside the vocabulary of {}", logits.len()));
    }
    let (top, finite) = rows.summit(logits);
    if !finite {
        return Outcome::failed(plan, UNUSABLE);
    }
    let token = match plan.target {
        Some(target) => target as usize,
        None => match choose(rows, logits, plan, top) {
            Some(token) => token,
            None => return Outcome::failed(plan, NOTHING_LEFT),
        },
    };
    let mut outcome = Outcome { token: token as i64, ..Outcome::default() };
    if plan.want_logprob || plan.tops > 0 || !plan.chosen.is_empty() {
        let total = rows.log_sum(logits, top);
        outcome.logprob = plan.want_logprob.then(|| logits[token] - total);
        if !plan.chosen.is_empty() {
            outcome.chosen = Some(plan.chosen.iter().map(|&id| (id, logits[id] - total)).collect());
        }
        if plan.tops > 0 {
            let best = best(logits, plan.tops.min(logits.len()));
            outcome.tops =
                Some(best.into_iter().map(|id| (id as usize, logits[id as usize] - total)).collect());
        }
    }
    outcome
}

/// An id that the plan names and the vocabulary lacks.
fn outside(plan: &Plan, vocab: usize) -> Option<i64> {
    let named =
        plan.banned.iter().chain(&plan.chosen).chain(plan.bias.iter().map(|(id, _)| id)).map(|&id| id as i64);
    named.chain(plan.target).find(|&id| id < 0 || id >= vocab as i64)
}

fn first(values: &[f32], wanted: f32) -> Option<usize> {
    values.iter().position(|&value| value == wanted)
}

/// The next token; None if nothing may be chosen.
fn choose(rows: Rows, logits: &[f32], plan: &Plan, top: f32) -> Option<usize> {
    let plain = plan.penalties.is_none() && plan.bias.is_empty() && plan.banned.is_empty();
    if plain
        && plan.temperature <= 0.0
        && let Some(mask) = &plan.mask
    {
        return best_allowed(logits, mask);
    }
    let plain = plain && plan.mask.is_none();
    if plain && plan.temperature <= 0.0 {
        return first(logits, top);
    }
    let mut changed;
    let (values, top) = if plain {
        (logits, top)
    } else {
        changed = logits.to_vec();
        change(&mut changed, plan);
        let top = changed.iter().fold(f32::NEG_INFINITY, |top, &value| top.max(value));
        (changed.as_slice(), top)
    };
    if !top.is_finite() {
        return None;
    }
    if plan.temperature <= 0.0 {
        return first(values, top);
    }
    draw(rows, values, plan, top)
}

fn change(values: &mut [f32], plan: &Plan) {
    if let Some(counts) = &plan.penalties {
        counts.apply(values, &plan.ahead);
    }
    for &(id, add) in &plan.bias {
        values[id] += add;
    }
    for &id in &plan.banned {
        values[id] = f32::NEG_INFINITY;
    }
    if let Some(mask) = &plan.mask {
        let (known, beyond) = values.split_at_mut(values.len().min(mask.len() * 32));
        for (values, &word) in known.chunks_mut(32).zip(mask) {
            if word == -1 {
                continue;
            }
            for (bit, value) in values.iter_mut().enumerate() {
                if (word >> bit) & 1 == 0 {
                    *value = f32::NEG_INFINITY;
                }
            }
        }
        beyond.fill(f32::NEG_INFINITY);
    }
}

/// The likeliest allowed id, of equals the lowest.
fn best_allowed(logits: &[f32], mask: &[i32]) -> Option<usize> {
    let mut best: Option<(f32, usize)> = None;
    for (at, &word) in mask.iter().enumerate() {
        let mut left = word.cast_unsigned();
        while left != 0 {
            let id = at * 32 + left.trailing_zeros() as usize;
            left &= left - 1;
            let Some(&value) = logits.get(id) else { break };
            if best.is_none_or(|(top, _)| value > top) {
                best = Some((value, id));
            }
        }
    }
    best.map(|(_, id)| id)
}

/// Sample by the largest of filtered scaled logits plus noise.
fn draw(rows: Rows, values: &[f32], plan: &Plan, top: f32) -> Option<usize> {
    let vocab = values.len();
    let limit = if plan.top_k > 0 && (plan.top_k as usize) < vocab { plan.top_k as usize } else { vocab };
    // Shifted before scaling: a tiny temperature then sends all but the best to minus infinity.
    let scaled = |id: usize| (values[id] - top) / plan.temperature;
    let floor = if plan.min_p > 0.0 { plan.min_p.ln() } else { f32::NEG_INFINITY };
    let keys = Keys::new(plan.seed, plan.position);
    let mut best = Best { score: f32::NEG_INFINITY, token: None };
    if limit == vocab && plan.top_p >= 1.0 {
        for id in 0..vocab {
            best.offer(id, scaled(id), floor, keys);
        }
        return best.token;
    }
    let kept = keep(rows, values, plan, top, limit);
    let mut ids: Vec<usize> = kept.into_iter().map(|(_, id)| id as usize).collect();
    ids.sort_unstable();
    for id in ids {
        best.offer(id, scaled(id), floor, keys);
    }
    best.token
}

/// The best so far; of equals the first offered.
struct Best {
    score: f32,
    token: Option<usize>,
}

impl Best {
    #[inline(always)]
    fn offer(&mut self, id: usize, value: f32, floor: f32, keys: Keys) {
        if value < floor || value == f32::NEG_INFINITY {
            return;
        }
        // No noise exceeds 23, which spares most of a vocabulary even the hash.
        if value + 23.0 <= self.score {
            return;
        }
        let uniform = keys.uniform(id as u32);
        if value + bound(uniform) <= self.score {
            return;
        }
        let score = value + gumbel(uniform);
        if score > self.score || self.token.is_none() {
            (self.score, self.token) = (score, Some(id));
        }
    }
}

fn by_rank(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// What top_k and then top_p leave, as (scaled, id), best first.
fn keep(rows: Rows, values: &[f32], plan: &Plan, top: f32, limit: usize) -> Vec<(f32, u32)> {
    let vocab = values.len();
    // With top_k, shares are of what it leaves; without, of the whole row.
    let whole = (limit == vocab).then(|| rows.exp_sum(values, top, plan.temperature));
    let mut reach = NEAR;
    loop {
        let bar = if reach > 1e4 { f32::NEG_INFINITY } else { top - reach * plan.temperature };
        let mut near: Vec<(f32, u32)> = Vec::new();
        for (id, &value) in values.iter().enumerate() {
            if value >= bar {
                near.push(((value - top) / plan.temperature, id as u32));
            }
        }
        let complete = near.len() == vocab || bar == f32::NEG_INFINITY;
        if near.len() < limit && limit < vocab && !complete {
            reach *= 4.0;
            continue;
        }
        if near.len() > limit {
            near.select_nth_unstable_by(limit - 1, by_rank);
            near.truncate(limit);
        }
        if plan.top_p >= 1.0 {
            return near;
        }
        near.sort_unstable_by(by_rank);
        let total = whole.unwrap_or_else(|| near.iter().map(|one| f64::from(one.0).exp()).sum());
        let mut mass = 0.0;
        for count in 1..=near.len() {
            mass += f64::from(near[count - 1].0).exp() / total;
            if mass >= f64::from(plan.top_p) {
                near.truncate(count);
                return near;
            }
        }
        if complete || limit < vocab {
            return near;
        }
        reach *= 4.0;
    }
}

/// The `count` best ids, best first, equal values by lowest id.
fn best(logits: &[f32], count: usize) -> Vec<u32> {
    let mut all: Vec<(f32, u32)> = logits.iter().enumerate().map(|(id, &value)| (value, id as u32)).collect();
    if count < all.len() {
        all.select_nth_unstable_by(count - 1, by_rank);
        all.truncate(count);
    }
    all.sort_unstable_by(by_rank);
    all.into_iter().map(|one| one.1).collect()
}
