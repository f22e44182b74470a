//! `Simd` in plain Rust: runs anywhere, and is the oracle of the other two.

use super::half;
use super::simd::Simd;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

type F = [f32; 16];
type I = [i32; 16];

macro_rules! lanes {
    ($i:ident => $value:expr) => {{
        let mut out = [Default::default(); 16];
        for $i in 0..16 {
            out[$i] = $value;
        }
        out
    }};
}

impl Simd for Portable {
    type F = F;
    type I = I;
    type B = [u8; 64];
    const TILE: usize = 2;
    const QUERIES: usize = 2;
    const PAIRS: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> F {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        p.cast::<F>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: F) {
        p.cast::<F>().write_unaligned(x);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        lanes!(i => half::from_f16(p.add(i).read_unaligned()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        lanes!(i => half::from_bf16(p.add(i).read_unaligned()))
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        lanes!(i => a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        lanes!(i => a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        lanes!(i => a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        lanes!(i => a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        lanes!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: F, b: F) -> F {
        lanes!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn abs(x: F) -> F {
        lanes!(i => x[i].abs())
    }
    /// Two roundings: a fused one would be a library call on CPUs without the instruction.
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        lanes!(i => a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn keep(x: F, bound: F, value: F) -> F {
        lanes!(i => if x[i] < bound[i] { 0.0 } else { value[i] })
    }
    #[inline(always)]
    unsafe fn sum(x: F) -> f32 {
        let mut y = x;
        let mut n = 8;
        while n > 0 {
            for i in 0..n {
                y[i] += y[i + n];
            }
            n /= 2;
        }
        y[0]
    }
    #[inline(always)]
    unsafe fn peak(x: F) -> f32 {
        let mut top = x[0];
        for lane in x {
            top = if top > lane { top } else { lane };
        }
        top
    }
    #[inline(always)]
    unsafe fn four(x: *const i8) -> I {
        [i32::from_le_bytes(x.cast::<[u8; 4]>().read()); 16]
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> I {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn to_f(x: I) -> F {
        lanes!(i => x[i] as f32)
    }
    #[inline(always)]
    unsafe fn round(x: F) -> I {
        // Adding and taking away 1.5 * 2^23 rounds to nearest even what fits; larger values saturate.
        const MAGIC: f32 = 12_582_912.0;
        lanes!(i => if x[i].abs() < 4_194_304.0 { ((x[i] + MAGIC) - MAGIC) as i32 } else { x[i] as i32 })
    }
    #[inline(always)]
    unsafe fn power(n: I) -> F {
        lanes!(i => f32::from_bits((n[i].wrapping_add(127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: I) {
        for i in 0..16 {
            p.add(i).write(x[i].clamp(-128, 127) as i8);
        }
    }
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, x: I) {
        for i in 0..16 {
            p.add(i).write(x[i].clamp(-32_768, 32_767) as i16);
        }
    }
    #[inline(always)]
    unsafe fn scale(x: F, n: I) -> F {
        lanes!(i => f32::from_bits(x[i].to_bits().wrapping_add((n[i] as u32) << 23)))
    }
    #[inline(always)]
    unsafe fn sum_i(x: I) -> i32 {
        x.iter().sum()
    }
    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> [u8; 64] {
        p.cast::<[u8; 64]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: [u8; 64]) {
        p.cast::<[u8; 64]>().write_unaligned(x);
    }
    #[inline(always)]
    unsafe fn low(x: [u8; 64]) -> [u8; 64] {
        let mut out = x;
        for byte in &mut out {
            *byte &= 15;
        }
        out
    }
    #[inline(always)]
    unsafe fn high(x: [u8; 64]) -> [u8; 64] {
        let mut out = x;
        for byte in &mut out {
            *byte >>= 4;
        }
        out
    }
    #[inline(always)]
    unsafe fn pick(x: [u8; 64], shift: u32, mask: i32) -> I {
        let lane = |i: usize| u32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]);
        lanes!(i => (lane(i) >> shift) as i32 & mask)
    }
    #[inline(always)]
    unsafe fn dot(acc: I, w: [u8; 64], x: I) -> I {
        let x = x[0].to_le_bytes();
        let mut out = acc;
        for i in 0..16 {
            for j in 0..4 {
                out[i] += i32::from(w[4 * i + j]) * i32::from(x[j] as i8);
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn dot16(acc: I, w: [u8; 64], x: I) -> I {
        let (low, high) = (i32::from(x[0] as i16), x[0] >> 16);
        let mut out = acc;
        for i in 0..16 {
            let at = |j: usize| i32::from(i16::from_le_bytes([w[4 * i + j], w[4 * i + j + 1]]));
            out[i] = out[i].wrapping_add(at(0).wrapping_mul(low)).wrapping_add(at(2).wrapping_mul(high));
        }
        out
    }
}
