//! The 16-lane vocabulary that every kernel is written in, once, for all instruction sets.
//!
//! Owns the trait and what can be derived from it. A kernel body is generic over `Simd`, always inlined, and
//! instantiated only inside a wrapper that enables the instruction set (see `table`): calling these methods
//! anywhere else is undefined behaviour, which is why all of them are unsafe.

/// 16 lanes of f32 or i32, and 64 bytes.
///
/// # Safety
/// For every method: the CPU must have the implementing instruction set, and pointers must be valid for the
/// whole vector (16 values, 64 bytes for `bytes`, 4 for `four`). No alignment is assumed.
pub(crate) trait Simd: Copy {
    /// 16 lanes of f32.
    type F: Copy;
    /// 16 lanes of i32.
    type I: Copy;
    /// 64 bytes.
    type B: Copy;
    /// Most activation rows of a GEMM tile.
    const TILE: usize;
    /// Most queries of an attention call.
    const QUERIES: usize;
    /// Whether registers suffice for two groups of weights at a time.
    const PAIRS: bool;

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn load_f16(p: *const u16) -> Self::F;
    unsafe fn load_bf16(p: *const u16) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// The larger; `b` if either is NaN.
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn abs(x: Self::F) -> Self::F;
    /// a * b + c, rounded once where the instruction set can.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `value` where not `x < bound`, else 0.
    unsafe fn keep(x: Self::F, bound: Self::F, value: Self::F) -> Self::F;
    /// Sum of the lanes, in one fixed order.
    unsafe fn sum(x: Self::F) -> f32;
    /// Largest lane.
    unsafe fn peak(x: Self::F) -> f32;

    unsafe fn splat_i(x: i32) -> Self::I;
    unsafe fn to_f(x: Self::I) -> Self::F;
    /// Nearest integer, ties to even.
    unsafe fn round(x: Self::F) -> Self::I;
    /// 2^n for n in -126..=127.
    unsafe fn power(n: Self::I) -> Self::F;
    /// Sixteen bytes, saturated.
    unsafe fn store_i8(p: *mut i8, x: Self::I);
    /// Sixteen 16-bit integers, saturated.
    unsafe fn store_i16(p: *mut i16, x: Self::I);
    /// x * 2^n by adding to the exponent: `x` must be near 1 and n in -126..=126.
    unsafe fn scale(x: Self::F, n: Self::I) -> Self::F;
    unsafe fn sum_i(x: Self::I) -> i32;

    unsafe fn bytes(p: *const u8) -> Self::B;
    unsafe fn store_bytes(p: *mut u8, x: Self::B);
    /// Low nibble of each byte.
    unsafe fn low(x: Self::B) -> Self::B;
    /// High nibble of each byte.
    unsafe fn high(x: Self::B) -> Self::B;
    /// Each lane's 4 bytes as one number, `shift` bits down, cut by `mask`.
    unsafe fn pick(x: Self::B, shift: u32, mask: i32) -> Self::I;
    /// Adds to each lane the dot product of its 4 unsigned bytes with the same 4 signed activations. Exact.
    unsafe fn dot(acc: Self::I, w: Self::B, x: Self::I) -> Self::I;
    /// Adds to each lane the products of its 2 signed 16-bit integers with those of `x`. Exact; wraps.
    unsafe fn dot16(acc: Self::I, w: Self::B, x: Self::I) -> Self::I;
    /// Four activations in every lane.
    #[inline(always)]
    unsafe fn four(x: *const i8) -> Self::I {
        Self::splat_i(x.cast::<i32>().read_unaligned())
    }
}

/// Below this, e^x is taken as 0: masked scores are exactly absent.
const EXP_FLOOR: f32 = -87.0;

/// e^x, relative error below 2e-7; 0 below -87, saturating at 88. NaN stays NaN.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    let floor = S::splat(EXP_FLOOR);
    let y = S::min(S::splat(88.0), S::max(floor, x));
    let n = S::round(S::mul(y, S::splat(core::f32::consts::LOG2_E)));
    let nf = S::to_f(n);
    let mut r = S::fma(nf, S::splat(-0.693_359_4), y);
    r = S::fma(nf, S::splat(2.121_944_4e-4), r);
    let mut p = S::splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = S::fma(p, r, S::splat(c));
    }
    let e = S::add(S::fma(S::mul(r, r), p, r), S::splat(1.0));
    S::keep(x, floor, S::mul(e, S::power(n)))
}

/// 2^r for r in -0.5..=0.5, highest power first (least relative error at degree 5).
const EXP2: [f32; 6] = [1.327_647e-3, 9.675_541e-3, 5.550_713e-2, 0.240_221_2, 0.693_146_94, 1.000_000_1];

/// 2^x for x <= 0, relative error below 3e-7; at least about 2^-127. NaN stays NaN.
#[inline(always)]
pub(crate) unsafe fn exp2<S: Simd>(x: S::F) -> S::F {
    let y = S::max(S::splat(-126.0), x);
    let n = S::round(y);
    let r = S::sub(y, S::to_f(n));
    let mut p = S::splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = S::fma(p, r, S::splat(*c));
    }
    S::scale(p, n)
}
