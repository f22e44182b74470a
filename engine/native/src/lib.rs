//! The branchline._native module: prefix cache, page ledger and text automaton for the engine's loop.
//!
//! Functions here only convert, release the GIL for long work, call and convert back. Wrong values are
//! `ValueError`, wrong types `TypeError`, a failed audit `RuntimeError`.

mod cache;
mod convert;
mod executor;
mod kernels;
mod model;
mod text;

use pyo3::prelude::*;

/// Native parts of the branchline engine.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::cache::{PageCache, block_hashes, checksum, namespace, page_demand};
    #[pymodule_export]
    use crate::executor::{CpuModel, PenaltyState, sample_rows};
    #[pymodule_export]
    use crate::text::{TextStream, Vocabulary, push_many};
}
