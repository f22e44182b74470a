//! The native executor for Python: model loading, steps and sampling.
//!
//! Converts, releases the GIL, delegates to `model`. Wrong values are `ValueError`; a fault of ours, such as
//! a panic in a kernel thread, is `RuntimeError`. Called by `branchline.engine.executor.native`.

mod noise;
mod penalty;
mod plan;
mod sample;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::buffer::PyBuffer;
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::kernels::{Isa, Kernels, Rows, Threads, bytes_of};
use crate::model::{Batch, Builder, Format, Model, Op, Options, PageMove, Scaling, Spec, Stored, WeightType};
use sample::{Outcome, Plan};

pub(crate) use penalty::PenaltyState;

enum State {
    Loading(Box<Builder>),
    Ready(Box<Model>),
    Closed,
}

/// A model on the CPU: add every tensor, then `finish`, then run steps. One thread calls it.
#[pyclass(module = "branchline._native")]
pub(crate) struct CpuModel {
    state: State,
    #[pyo3(get)]
    isa: &'static str,
    #[pyo3(get)]
    threads: usize,
}

fn refused(message: String) -> PyErr {
    PyValueError::new_err(message)
}

/// Run `work` without the GIL; a panic becomes RuntimeError.
fn guarded<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, String> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(result) => result.map_err(refused),
        Err(_) => {
            Err(PyRuntimeError::new_err("a kernel of the native executor panicked; its message is on stderr"))
        }
    }
}

#[pymethods]
impl CpuModel {
    #[new]
    #[pyo3(signature = (spec, *, num_pages, page_size, threads = 0, isa = None, weight_dtype = "auto", kv_dtype = "i16"))]
    fn new(
        spec: &Bound<'_, PyDict>,
        num_pages: usize,
        page_size: usize,
        threads: usize,
        isa: Option<&str>,
        weight_dtype: &str,
        kv_dtype: &str,
    ) -> PyResult<Self> {
        let isa = match isa {
            None => Isa::best(),
            Some(name) => named(name, "isa", Isa::ALL.into_iter().map(|isa| (isa.name(), isa)))?,
        };
        let weights = named(weight_dtype, "weight_dtype", WeightType::ALL)?;
        let coded_cache = named(kv_dtype, "kv_dtype", [("i16", true), ("f32", false)])?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads.min(1024) };
        let options = Options { isa, threads, weights, coded_cache, pages: num_pages, page_size };
        let builder = Builder::new(spec_of(spec)?, options).map_err(refused)?;
        Ok(Self { state: State::Loading(Box::new(builder)), isa: isa.name(), threads })
    }

    /// Take one tensor as stored: `rows` rows of `cols` values of a GGUF type, in any buffer of bytes, which must
    /// not change meanwhile. `interleaved_heads` undoes the
    /// row order that GGUF converters give queries and keys; 0 for none.
    #[pyo3(signature = (name, type_name, rows, cols, data, interleaved_heads = 0))]
    #[allow(clippy::too_many_arguments)]
    fn add(
        &mut self,
        py: Python<'_>,
        name: &str,
        type_name: &str,
        rows: usize,
        cols: usize,
        data: PyBuffer<u8>,
        interleaved_heads: usize,
    ) -> PyResult<()> {
        let State::Loading(builder) = &mut self.state else {
            return Err(PyRuntimeError::new_err("the model is already finished"));
        };
        let format = Format::from_name(type_name)
            .ok_or_else(|| refused(format!("tensor {name} has type {type_name}, which is not supported")))?;
        let bytes = bytes_of(&data).ok_or_else(|| refused(format!("tensor {name} is not contiguous")))?;
        guarded(py, || builder.add(name, &Stored { format, rows, cols, bytes, interleaved_heads }))
    }

    /// Check that nothing is missing, reserve the cache and start the threads.
    fn finish(&mut self, py: Python<'_>) -> PyResult<()> {
        let State::Loading(builder) = std::mem::replace(&mut self.state, State::Closed) else {
            return Err(PyRuntimeError::new_err("the model is already finished"));
        };
        self.state = State::Ready(Box::new(guarded(py, || builder.finish())?));
        Ok(())
    }

    /// Measure where the time of steps goes from now on, or no more; forgets what was measured.
    fn start_profile(&mut self, on: bool) -> PyResult<()> {
        self.ready()?.profile.reset(on);
        Ok(())
    }

    /// (operation, seconds, calls) since `start_profile`.
    fn profile(&mut self) -> PyResult<Vec<(&'static str, f64, u64)>> {
        Ok(self.ready()?.profile.report())
    }

    /// Read all weights `rounds` times and compute nothing: bytes of a round and seconds of the fastest.
    fn sweep(&mut self, py: Python<'_>, rounds: usize) -> PyResult<(usize, f64)> {
        let model = self.ready()?;
        let (bytes, seconds, sum) = guarded(py, || Ok(model.sweep(rounds)))?;
        std::hint::black_box(sum);
        Ok((bytes, seconds))
    }

    /// Bytes of weights held.
    fn weight_bytes(&mut self) -> PyResult<usize> {
        Ok(self.ready()?.weight_bytes())
    }

    /// One step; see `ForwardBatch`. Returns the number of logits rows, kept until the next call.
    #[allow(clippy::too_many_arguments)]
    fn run(
        &mut self,
        py: Python<'_>,
        token_ids: PyBuffer<i32>,
        positions: PyBuffer<i32>,
        slots: PyBuffer<i64>,
        query_lens: PyBuffer<i32>,
        context_lens: PyBuffer<i32>,
        page_tables: Vec<Vec<u32>>,
        logit_rows: PyBuffer<i64>,
    ) -> PyResult<usize> {
        let model = self.ready()?;
        let (tokens, positions, slots) = (token_ids.to_vec(py)?, positions.to_vec(py)?, slots.to_vec(py)?);
        let (query_lens, context_lens) = (query_lens.to_vec(py)?, context_lens.to_vec(py)?);
        let logit_rows = logit_rows.to_vec(py)?;
        let batch = Batch {
            tokens: &tokens,
            positions: &positions,
            slots: &slots,
            query_lens: &query_lens,
            context_lens: &context_lens,
            page_tables: &page_tables,
            logit_rows: &logit_rows,
        };
        guarded(py, || model.forward(&batch))?;
        Ok(logit_rows.len())
    }

    /// Bytes that a page takes on the device and on the host.
    fn page_bytes(&mut self) -> PyResult<usize> {
        Ok(self.ready()?.page_bytes())
    }

    /// Memory for so many pages of the host tier.
    fn reserve_host(&mut self, slots: usize) -> PyResult<()> {
        self.ready()?.reserve_host(slots).map_err(refused)
    }

    /// Copy pages in this order: (True, page, slot) from page to slot, (False, page, slot) back.
    fn move_pages(&mut self, py: Python<'_>, moves: Vec<(bool, u32, u32)>) -> PyResult<()> {
        let moves = moves.into_iter().map(|(store, page, slot)| PageMove { store, page, slot });
        let moves: Vec<_> = moves.collect();
        let model = self.ready()?;
        guarded(py, || model.move_pages(&moves))
    }

    /// The bytes of these pages, one after the other.
    fn read_pages<'py>(&mut self, py: Python<'py>, pages: Vec<u32>) -> PyResult<Bound<'py, PyBytes>> {
        let model = self.ready()?;
        let size =
            pages.len().checked_mul(model.page_bytes()).ok_or_else(|| refused("too many pages".into()))?;
        PyBytes::new_with(py, size, |bytes| model.read_pages(&pages, bytes).map_err(refused))
    }

    /// Fill these pages from what `read_pages` gave.
    fn write_pages(&mut self, py: Python<'_>, pages: Vec<u32>, data: PyBuffer<u8>) -> PyResult<()> {
        let model = self.ready()?;
        let bytes =
            bytes_of(&data).ok_or_else(|| refused("the pages' bytes are not contiguous".to_owned()))?;
        guarded(py, || model.write_pages(&pages, bytes))
    }

    /// Logits of the last step as little-endian f32 bytes, row after row.
    fn logits<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let model = self.ready()?;
        let mut bytes = Vec::new();
        for row in model.rows() {
            bytes.extend(row.iter().flat_map(|value| value.to_le_bytes()));
        }
        Ok(PyBytes::new(py, &bytes))
    }

    /// Answer `RowPlan`s about the last step: tuples in the order of `RowResult`'s fields.
    fn sample<'py>(
        &mut self,
        py: Python<'py>,
        plans: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let plans: Vec<Plan> = plans.iter().map(plan::from_python).collect::<PyResult<_>>()?;
        let model = self.ready()?;
        model.profile.begin();
        let (logits, kernels, threads) = model.split();
        let outcomes = guarded(py, || answer(&logits, kernels, Some(threads), &plans))?;
        model.profile.lap(Op::Sample);
        outcomes.into_iter().map(|outcome| plan::to_python(py, outcome)).collect()
    }

    /// Release memory and threads; idempotent.
    fn close(&mut self, py: Python<'_>) {
        let state = std::mem::replace(&mut self.state, State::Closed);
        py.detach(|| drop(state));
    }
}

impl CpuModel {
    fn ready(&mut self) -> PyResult<&mut Model> {
        match &mut self.state {
            State::Ready(model) => Ok(model),
            State::Loading(_) => Err(PyRuntimeError::new_err("the model is not finished: call finish first")),
            State::Closed => Err(PyRuntimeError::new_err("the executor is closed")),
        }
    }
}

/// Answer all plans, shared among `threads` if there are any.
fn answer(
    logits: &[&[f32]],
    kernels: Kernels,
    threads: Option<&mut Threads>,
    plans: &[Plan],
) -> Result<Vec<Outcome>, String> {
    if let Some(plan) = plans.iter().find(|plan| plan.row >= logits.len()) {
        return Err(format!("plan names row {} of {} logits rows", plan.row, logits.len()));
    }
    let rows = Rows::new(kernels);
    let one = |plan: &Plan| sample::answer(rows, logits[plan.row], plan);
    let Some(threads) = threads.filter(|_| plans.len() > 1) else {
        return Ok(plans.iter().map(one).collect());
    };
    let outcomes: Vec<_> = plans.iter().map(|_| std::sync::OnceLock::new()).collect();
    threads.run(plans.len(), &|index, _| {
        let _ = outcomes[index].set(one(&plans[index]));
    });
    Ok(outcomes.into_iter().map(|cell| cell.into_inner().unwrap_or_default()).collect())
}

fn named<T>(name: &str, option: &str, known: impl IntoIterator<Item = (&'static str, T)>) -> PyResult<T> {
    let mut names = Vec::new();
    for (one, value) in known {
        if one == name {
            return Ok(value);
        }
        names.push(one);
    }
    Err(refused(format!("{option} {name:?} is unknown; use {}", names.join(", "))))
}

fn field<'py, T: FromPyObjectOwned<'py>>(spec: &Bound<'py, PyDict>, name: &str) -> PyResult<T> {
    let value = spec.get_item(name)?.ok_or_else(|| refused(format!("spec lacks {name}")))?;
    value.extract().map_err(Into::into)
}

/// A `Spec` from the fields of `ModelSpec`; `rope_scaling` is a dict of `RopeScaling`'s fields or None.
fn spec_of(spec: &Bound<'_, PyDict>) -> PyResult<Spec> {
    let window: Option<usize> = field(spec, "sliding_window")?;
    Ok(Spec {
        hidden: field(spec, "hidden")?,
        layers: field(spec, "layers")?,
        heads: field(spec, "heads")?,
        kv_heads: field(spec, "kv_heads")?,
        head_dim: field(spec, "head_dim")?,
        intermediate: field(spec, "intermediate")?,
        vocab: field(spec, "vocab_size")?,
        eps: field(spec, "norm_eps")?,
        theta: field(spec, "rope_theta")?,
        scaling: scaling_of(spec)?,
        qk_norm: field(spec, "qk_norm")?,
        window: window.unwrap_or(usize::MAX),
    })
}

fn scaling_of(spec: &Bound<'_, PyDict>) -> PyResult<Scaling> {
    let Some(scaling) = spec.get_item("rope_scaling")?.filter(|value| !value.is_none()) else {
        return Ok(Scaling::None);
    };
    let scaling = scaling.cast_into::<PyDict>()?;
    let kind: String = field(&scaling, "kind")?;
    Ok(match kind.as_str() {
        "linear" => Scaling::Linear { factor: field(&scaling, "factor")? },
        "factors" => Scaling::Factors(field(&scaling, "factors")?),
        "llama3" => Scaling::Llama3 {
            factor: field(&scaling, "factor")?,
            low: field(&scaling, "low_freq_factor")?,
            high: field(&scaling, "high_freq_factor")?,
            context: field(&scaling, "original_context")?,
        },
        _ => return Err(refused(format!("rope_scaling kind {kind:?} is not implemented"))),
    })
}

/// Answer `RowPlan`s about rows given as a buffer of f32, `vocab` values each, as `CpuModel.sample` does.
#[pyfunction]
pub(crate) fn sample_rows<'py>(
    py: Python<'py>,
    logits: PyBuffer<f32>,
    vocab: usize,
    plans: Vec<Bound<'py, PyAny>>,
) -> PyResult<Vec<Bound<'py, PyTuple>>> {
    let plans: Vec<Plan> = plans.iter().map(plan::from_python).collect::<PyResult<_>>()?;
    let logits = logits.to_vec(py)?;
    let kernels = Kernels::of(Isa::best()).ok_or_else(|| refused("no kernels for this cpu".to_owned()))?;
    let rows: Vec<&[f32]> = if vocab == 0 { Vec::new() } else { logits.chunks_exact(vocab).collect() };
    let outcomes = guarded(py, || answer(&rows, kernels, None, &plans))?;
    outcomes.into_iter().map(|outcome| plan::to_python(py, outcome)).collect()
}
