//! Plans from Python and outcomes back.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::penalty::PenaltyState;
use super::sample::{Outcome, Plan};

/// A `RowPlan`. Ids outside the vocabulary are left for the sampler to refuse.
pub(super) fn from_python(plan: &Bound<'_, PyAny>) -> PyResult<Plan> {
    let py = plan.py();
    let params = plan.getattr(intern!(py, "params"))?;
    let penalties = plan.getattr(intern!(py, "penalties"))?;
    let penalties = if penalties.is_none() {
        None
    } else {
        let state = penalties.cast::<PenaltyState>().map_err(|_| {
            PyTypeError::new_err("penalties must be a state made by penalty_state of the same executor")
        })?;
        Some(state.get().counts.clone())
    };
    let ids = |name: &Bound<'_, pyo3::types::PyString>| -> PyResult<Vec<usize>> {
        let ids: Vec<i64> = plan.getattr(name)?.extract()?;
        Ok(ids.into_iter().map(|id| usize::try_from(id).unwrap_or(usize::MAX >> 1)).collect())
    };
    let bias: Vec<(i64, f32)> = params.getattr(intern!(py, "logit_bias"))?.extract()?;
    Ok(Plan {
        row: plan.getattr(intern!(py, "row"))?.extract()?,
        target: plan.getattr(intern!(py, "target"))?.extract()?,
        temperature: params.getattr(intern!(py, "temperature"))?.extract()?,
        top_k: params.getattr(intern!(py, "top_k"))?.extract()?,
        top_p: params.getattr(intern!(py, "top_p"))?.extract()?,
        min_p: params.getattr(intern!(py, "min_p"))?.extract()?,
        seed: low_bits(&plan.getattr(intern!(py, "seed"))?)?,
        position: plan.getattr(intern!(py, "position"))?.extract()?,
        penalties,
        bias: bias
            .into_iter()
            .map(|(id, add)| (usize::try_from(id).unwrap_or(usize::MAX >> 1), add))
            .collect(),
        banned: ids(intern!(py, "banned"))?,
        want_logprob: plan.getattr(intern!(py, "want_logprob"))?.extract()?,
        tops: plan.getattr(intern!(py, "top_k"))?.extract()?,
        chosen: ids(intern!(py, "chosen_ids"))?,
        ahead: ids(intern!(py, "ahead"))?,
        mask: mask(plan)?,
    })
}

/// The words of a mask, if the plan has one.
fn mask(plan: &Bound<'_, PyAny>) -> PyResult<Option<Vec<i32>>> {
    let py = plan.py();
    let found = plan.getattr(intern!(py, "mask"))?;
    if found.is_none() { Ok(None) } else { PyBuffer::<i32>::get(&found)?.to_vec(py).map(Some) }
}

/// The low 64 bits of a Python integer of any sign and size.
fn low_bits(number: &Bound<'_, PyAny>) -> PyResult<u64> {
    match number.extract::<u64>() {
        Ok(value) => Ok(value),
        Err(_) => number.call_method1(intern!(number.py(), "__and__"), (u64::MAX,))?.extract(),
    }
}

/// (token_id, logprob, top, chosen, error), in the order of `RowResult`.
pub(super) fn to_python<'py>(py: Python<'py>, outcome: Outcome) -> PyResult<Bound<'py, PyTuple>> {
    (outcome.token, outcome.logprob, outcome.tops, outcome.chosen, outcome.error).into_pyobject(py)
}
