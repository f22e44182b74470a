//! CPU kernels: everything of the native executor that needs `unsafe` instructions.
//!
//! Kernels are written once over `simd::Simd` and compiled for each instruction set; `table` chooses at run
//! time. They know no model: callers hand in views that stay valid during the call. Called from `model`.

#![allow(unsafe_code)]
// Bodies of kernels are unsafe as a whole: the trait `Simd` states their one condition.
#![allow(unsafe_op_in_unsafe_fn)]
// Lanes and rows are counted: iterators would hide which registers a loop uses.
#![allow(clippy::needless_range_loop)]

pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod coded;
pub(crate) mod gemm;
pub(crate) mod half;
mod memory;
pub(crate) mod pool;
mod portable;
mod rows;
mod simd;
pub(crate) mod table;
#[cfg(test)]
mod tests;

pub(crate) use gemm::{Kind, Out, Spike, Tile, WeightView};
pub(crate) use memory::{Region, bytes_of, words_of};
pub(crate) use pool::Pool as Threads;
pub(crate) use table::{Isa, Kernels, Rows};
