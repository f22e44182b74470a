//! The kernels of one instruction set as a table of functions, chosen when a model is loaded.

use super::attention::{self, Attend, Pool, Scratch};
use super::gemm::{self, Out, Tile, WeightView};
use super::portable::Portable;
use super::rows;
use super::simd::Simd;

/// Instruction sets that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// Any CPU.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

impl Isa {
    /// All of them, weakest first.
    pub(crate) const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// Its name in options and in `numerics_id`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this CPU can run it.
    pub(crate) fn is_here(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Portable => true,
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => {
                Self::Avx2.is_here()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        matches!(self, Self::Portable)
    }

    /// The best one here.
    pub(crate) fn best() -> Self {
        Self::ALL.into_iter().rev().find(|isa| isa.is_here()).unwrap_or(Self::Portable)
    }
}

/// The kernels of one instruction set. See the functions of the same names for what each does.
///
/// # Safety
/// A table is only made for an instruction set that `Isa::is_here`; what remains for callers is that pointers
/// are valid as each kernel says.
#[derive(Clone, Copy)]
pub(crate) struct Kernels {
    /// Most rows of a tile.
    pub(crate) tile: usize,
    /// Most queries of an attention call.
    pub(crate) queries: usize,
    pub(crate) gemm: unsafe fn(&WeightView, usize, usize, &Tile, Out),
    pub(crate) spread: unsafe fn(&WeightView, usize, usize, *mut u8),
    pub(crate) norm: unsafe fn(*const f32, *const f32, usize, f32, *mut f32),
    pub(crate) quantise: unsafe fn(*const f32, &Tile, usize, usize, usize),
    pub(crate) gate: unsafe fn(*const f32, *const f32, usize, *mut f32),
    pub(crate) rotate: unsafe fn(*mut f32, *const f32, *const f32, usize),
    pub(crate) summit: unsafe fn(*const f32, usize) -> (f32, bool),
    pub(crate) exp_sum: unsafe fn(*const f32, usize, f32, f32) -> f64,
    pub(crate) attend: unsafe fn(&Attend<'_>, &mut Scratch),
    pub(crate) write: unsafe fn(&Pool, usize, usize, *const f32, *const f32),
}

macro_rules! kernels {
    ($module:ident, $simd:ty, $(#[$feature:meta])?) => {
        mod $module {
            use super::*;

            $(#[$feature])?
            unsafe fn gemm(w: &WeightView, first: usize, last: usize, x: &Tile, out: Out) {
                gemm::gemm::<$simd>(w, first, last, x, out);
            }
            $(#[$feature])?
            unsafe fn spread(w: &WeightView, first: usize, last: usize, out: *mut u8) {
                gemm::spread::<$simd>(w, first, last, out);
            }
            $(#[$feature])?
            unsafe fn norm(x: *const f32, weight: *const f32, n: usize, eps: f32, out: *mut f32) {
                rows::norm::<$simd>(x, weight, n, eps, out);
            }
            $(#[$feature])?
            unsafe fn quantise(x: *const f32, tile: &Tile, row: usize, block: usize, blocks: usize) {
                rows::quantise::<$simd>(x, tile, row, block, blocks);
            }
            $(#[$feature])?
            unsafe fn gate(gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
                rows::gate::<$simd>(gate, up, n, out);
            }
            $(#[$feature])?
            unsafe fn rotate(x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
                rows::rotate::<$simd>(x, cos, sin, half);
            }
            $(#[$feature])?
            unsafe fn summit(x: *const f32, n: usize) -> (f32, bool) {
                rows::summit::<$simd>(x, n)
            }
            $(#[$feature])?
            unsafe fn exp_sum(x: *const f32, n: usize, top: f32, divisor: f32) -> f64 {
                rows::exp_sum::<$simd>(x, n, top, divisor)
            }
            $(#[$feature])?
            unsafe fn attend(job: &Attend<'_>, scratch: &mut Scratch) {
                attention::attend::<$simd>(job, scratch);
            }
            $(#[$feature])?
            unsafe fn write(pool: &Pool, page: usize, offset: usize, key: *const f32, value: *const f32) {
                attention::write::<$simd>(pool, page, offset, key, value);
            }

            pub(super) const TABLE: Kernels = Kernels {
                tile: <$simd as Simd>::TILE,
                queries: <$simd as Simd>::QUERIES,
                gemm,
                spread,
                norm,
                quantise,
                gate,
                rotate,
                summit,
                exp_sum,
                attend,
                write,
            };
        }
    };
}

kernels!(portable, Portable,);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, super::super::avx2::Avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
kernels!(
    avx512,
    super::super::avx512::Avx512,
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
);

impl Kernels {
    /// The kernels of `isa`, or None if this CPU lacks it.
    pub(crate) fn of(isa: Isa) -> Option<Self> {
        if !isa.is_here() {
            return None;
        }
        match isa {
            Isa::Portable => Some(portable::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(avx2::TABLE),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Some(avx512::TABLE),
            #[cfg(not(target_arch = "x86_64"))]
            _ => None,
        }
    }
}

/// What sampling needs of a row of logits, safe to call.
#[derive(Clone, Copy)]
pub(crate) struct Rows(Kernels);

impl Rows {
    pub(crate) fn new(kernels: Kernels) -> Self {
        Self(kernels)
    }

    /// The largest value, and whether all values are finite.
    pub(crate) fn summit(self, row: &[f32]) -> (f32, bool) {
        // SAFETY: pointer and length are one slice's.
        unsafe { (self.0.summit)(row.as_ptr(), row.len()) }
    }

    /// Sum of e^((x - top) / divisor).
    pub(crate) fn exp_sum(self, row: &[f32], top: f32, divisor: f32) -> f64 {
        // SAFETY: pointer and length are one slice's.
        unsafe { (self.0.exp_sum)(row.as_ptr(), row.len(), top, divisor) }
    }

    /// Log of the sum of e^x; `top` is the largest value.
    pub(crate) fn log_sum(self, row: &[f32], top: f32) -> f32 {
        (f64::from(top) + self.exp_sum(row, top, 1.0).ln()) as f32
    }
}
