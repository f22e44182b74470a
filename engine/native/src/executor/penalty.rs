//! A sequence's token counts and what they do to its logits; the same meaning as the torch sampler's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

/// Distinct ids with their output counts. Clones share one state.
#[derive(Clone)]
pub(super) struct Counts {
    repetition: f32,
    frequency: f32,
    presence: f32,
    seen: Arc<Mutex<HashMap<u32, f32>>>,
}

impl Counts {
    /// Repetition scales ids of prompt and output; frequency and presence subtract for output ids only.
    /// `ahead` are ids to count as generated, as `observe` would.
    pub(super) fn apply(&self, values: &mut [f32], ahead: &[usize]) {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let more = |id: usize| ahead.iter().filter(|&&one| one == id).count() as f32;
        for (&id, &count) in seen.iter() {
            self.change(values, id as usize, count + more(id as usize));
        }
        for (place, &id) in ahead.iter().enumerate() {
            let known = u32::try_from(id).is_ok_and(|id| seen.contains_key(&id));
            if !known && !ahead[..place].contains(&id) {
                self.change(values, id, more(id));
            }
        }
    }

    fn change(&self, values: &mut [f32], id: usize, count: f32) {
        if let Some(value) = values.get_mut(id) {
            let scaled = if *value > 0.0 { *value / self.repetition } else { *value * self.repetition };
            let present = if count > 0.0 { self.presence } else { 0.0 };
            *value = scaled - self.frequency * count - present;
        }
    }
}

/// Penalty state of one sequence. Mutated by `observe` only.
#[pyclass(module = "branchline._native", frozen)]
pub(crate) struct PenaltyState {
    pub(super) counts: Counts,
}

#[pymethods]
impl PenaltyState {
    #[new]
    fn new(prompt: Vec<u32>, repetition: f32, frequency: f32, presence: f32) -> Self {
        let known = if repetition == 1.0 { Vec::new() } else { prompt };
        let seen = known.into_iter().map(|id| (id, 0.0)).collect();
        Self { counts: Counts { repetition, frequency, presence, seen: Arc::new(Mutex::new(seen)) } }
    }

    /// Count one generated token.
    fn observe(&self, token_id: u32) {
        *self.counts.seen.lock().unwrap_or_else(PoisonError::into_inner).entry(token_id).or_insert(0.0) +=
            1.0;
    }
}
