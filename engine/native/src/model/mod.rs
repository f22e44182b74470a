//! The model: packed weights, key and value pool, and the forward pass over a step's rows.
//!
//! Owns numerics and memory of the native executor; knows nothing of Python, files or scheduling. `unsafe`
//! here hands disjoint pieces of buffers to threads and kernels; each use says why they are disjoint.

#![allow(unsafe_code)]

pub(crate) mod acts;
pub(crate) mod batch;
pub(crate) mod build;
pub(crate) mod forward;
pub(crate) mod ggml;
pub(crate) mod host;
pub(crate) mod kv;
pub(crate) mod linear;
pub(crate) mod profile;
pub(crate) mod spec;
#[cfg(test)]
mod tests;
pub(crate) mod weight;

pub(crate) use batch::Batch;
pub(crate) use build::{Builder, Options};
pub(crate) use forward::Model;
pub(crate) use ggml::Format;
pub(crate) use host::PageMove;
pub(crate) use profile::Op;
pub(crate) use spec::{Scaling, Spec};
pub(crate) use weight::{Stored, WeightType};
