//! Kernels over one row: normalise, quantise, gate, rotate, and what sampling needs of a logits row.
//!
//! All results depend on the row alone.

use super::gemm::{Spike, Tile};
use super::simd::{Simd, exp};

/// out = x / rms(x) * weight. `out` may be `x`.
#[inline(always)]
pub(crate) unsafe fn norm<S: Simd>(x: *const f32, weight: *const f32, n: usize, eps: f32, out: *mut f32) {
    let full = n / 16 * 16;
    let mut acc = S::splat(0.0);
    for i in (0..full).step_by(16) {
        let v = S::load(x.add(i));
        acc = S::fma(v, v, acc);
    }
    let mut total = S::sum(acc);
    for i in full..n {
        total += *x.add(i) * *x.add(i);
    }
    let scale = 1.0 / (total / n as f32 + eps).sqrt();
    let factor = S::splat(scale);
    for i in (0..full).step_by(16) {
        S::store(out.add(i), S::mul(S::mul(S::load(x.add(i)), factor), S::load(weight.add(i))));
    }
    for i in full..n {
        *out.add(i) = *x.add(i) * scale * *weight.add(i);
    }
}

/// How many times the root mean square of a block's other values its largest may be before it stands apart.
/// Part of the numerics.
const SPIKE: f32 = 12.0;

/// Quantise 32 values of row `row` of a tile as its block `block`: scale = largest magnitude / 127. A largest
/// far above the rest would take their precision: it goes to the row's spikes at `block`, coded as 0 here.
#[inline(always)]
pub(crate) unsafe fn quantise<S: Simd>(x: *const f32, tile: &Tile, row: usize, block: usize, blocks: usize) {
    let (mut a, mut b) = (S::load(x), S::load(x.add(16)));
    let mut top = S::peak(S::max(S::abs(a), S::abs(b)));
    let energy = S::sum(S::fma(a, a, S::mul(b, b)));
    let mut spike = Spike::default();
    // False of what is not a number.
    if top * top * (31.0 / (SPIKE * SPIKE)) > energy - top * top && top > 1e-15 && top < 1e15 {
        let mut rest = [0.0f32; 32];
        rest.as_mut_ptr().copy_from_nonoverlapping(x, 32);
        let place = rest.iter().position(|v| v.abs() == top).unwrap_or(0);
        spike = Spike { column: (block * 32 + place) as u32, value: rest[place] };
        rest[place] = 0.0;
        (a, b) = (S::load(rest.as_ptr()), S::load(rest.as_ptr().add(16)));
        top = S::peak(S::max(S::abs(a), S::abs(b)));
    }
    *tile.spikes.cast_mut().add(row * blocks + block) = spike;
    let inverse = S::splat(if top > 0.0 { 127.0 / top } else { 0.0 });
    let (p, q) = (S::round(S::mul(a, inverse)), S::round(S::mul(b, inverse)));
    let mut packed = [0i8; 32];
    S::store_i8(packed.as_mut_ptr(), p);
    S::store_i8(packed.as_mut_ptr().add(16), q);
    let rows = tile.rows;
    let to = tile.q.cast_mut().add((block * 8 * rows + row) * 4);
    for four in 0..8 {
        to.add(four * rows * 4)
            .cast::<[i8; 4]>()
            .write(packed.as_ptr().add(four * 4).cast::<[i8; 4]>().read());
    }
    let (first, second) = (S::sum_i(p), S::sum_i(q));
    let i = block * rows + row;
    let scale = top / 127.0;
    *tile.scale.cast_mut().add(i) = scale;
    *tile.sums.cast_mut().add(i) = scale * (first + second) as f32;
    *tile.wide.cast_mut().add(i) = -128 * (first + second);
    *tile.half.cast_mut().add(block * 2 * rows + row) = -32 * first;
    *tile.half.cast_mut().add((block * 2 + 1) * rows + row) = -32 * second;
}

/// out = gate * sigmoid(gate) * up over `n` values, a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn gate<S: Simd>(gate: *const f32, up: *const f32, n: usize, out: *mut f32) {
    for i in (0..n).step_by(16) {
        let g = S::load(gate.add(i));
        let below = S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), g)));
        S::store(out.add(i), S::mul(S::div(g, below), S::load(up.add(i))));
    }
}

/// Rotate one head in place; halves form the pairs. `cos` and `sin` hold `half` values.
#[inline(always)]
pub(crate) unsafe fn rotate<S: Simd>(x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
    let full = half / 16 * 16;
    for i in (0..full).step_by(16) {
        let (a, b) = (S::load(x.add(i)), S::load(x.add(half + i)));
        let (c, s) = (S::load(cos.add(i)), S::load(sin.add(i)));
        S::store(x.add(i), S::sub(S::mul(a, c), S::mul(b, s)));
        S::store(x.add(half + i), S::add(S::mul(b, c), S::mul(a, s)));
    }
    for i in full..half {
        let (a, b) = (*x.add(i), *x.add(half + i));
        *x.add(i) = a * *cos.add(i) - b * *sin.add(i);
        *x.add(half + i) = b * *cos.add(i) + a * *sin.add(i);
    }
}

/// Largest of `n` values, and whether all of them are finite.
#[inline(always)]
pub(crate) unsafe fn summit<S: Simd>(x: *const f32, n: usize) -> (f32, bool) {
    let full = n / 16 * 16;
    let zero = S::splat(0.0);
    let (mut most, mut nothing) = (S::splat(f32::NEG_INFINITY), zero);
    for i in (0..full).step_by(16) {
        let v = S::load(x.add(i));
        most = S::max(most, v);
        // 0 times a finite number is 0, times anything else NaN.
        nothing = S::fma(v, zero, nothing);
    }
    let (mut top, mut rest) = (S::peak(most), S::sum(nothing));
    for i in full..n {
        top = top.max(*x.add(i));
        rest += *x.add(i) * 0.0;
    }
    (top, rest == 0.0)
}

/// Sum of e^((x - top) / divisor) over `n` values.
#[inline(always)]
pub(crate) unsafe fn exp_sum<S: Simd>(x: *const f32, n: usize, top: f32, divisor: f32) -> f64 {
    let full = n / 16 * 16;
    let (shift, scale) = (S::splat(top), S::splat(divisor));
    let mut total = 0.0f64;
    // Partial sums keep f32 lanes accurate over large vocabularies.
    let mut at = 0;
    while at < full {
        let end = (at + 4096).min(full);
        let mut acc = S::splat(0.0);
        for i in (at..end).step_by(16) {
            acc = S::add(acc, exp::<S>(S::div(S::sub(S::load(x.add(i)), shift), scale)));
        }
        total += f64::from(S::sum(acc));
        at = end;
    }
    for i in full..n {
        total += f64::from((*x.add(i) - top) / divisor).exp();
    }
    total
}
