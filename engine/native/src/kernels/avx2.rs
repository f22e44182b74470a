//! `Simd` on AVX2 with FMA and F16C: two registers a vector.

use core::arch::x86_64::*;

use super::simd::Simd;

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

type F = [__m256; 2];
type I = [__m256i; 2];

/// Eight bfloat16 as f32.
#[inline(always)]
unsafe fn widen(p: *const u16) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
}

/// Eight lanes of `dot`, the activations split into even and odd bytes.
#[inline(always)]
unsafe fn half_dot(acc: __m256i, w: __m256i, even: __m256i, odd: __m256i) -> __m256i {
    let a = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even);
    let b = _mm256_madd_epi16(_mm256_srli_epi16::<8>(w), odd);
    _mm256_add_epi32(acc, _mm256_add_epi32(a, b))
}

impl Simd for Avx2 {
    type F = F;
    type I = I;
    type B = I;
    const TILE: usize = 3;
    const QUERIES: usize = 3;
    const PAIRS: bool = false;

    #[inline(always)]
    unsafe fn splat(x: f32) -> F {
        [_mm256_set1_ps(x); 2]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> F {
        [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))]
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: F) {
        _mm256_storeu_ps(p, x[0]);
        _mm256_storeu_ps(p.add(8), x[1]);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> F {
        [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast()))]
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> F {
        [widen(p), widen(p.add(8))]
    }
    #[inline(always)]
    unsafe fn add(a: F, b: F) -> F {
        [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn sub(a: F, b: F) -> F {
        [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn mul(a: F, b: F) -> F {
        [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn div(a: F, b: F) -> F {
        [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn max(a: F, b: F) -> F {
        [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn min(a: F, b: F) -> F {
        [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])]
    }
    #[inline(always)]
    unsafe fn abs(x: F) -> F {
        let sign = _mm256_set1_ps(-0.0);
        [_mm256_andnot_ps(sign, x[0]), _mm256_andnot_ps(sign, x[1])]
    }
    #[inline(always)]
    unsafe fn fma(a: F, b: F, c: F) -> F {
        [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
    }
    #[inline(always)]
    unsafe fn keep(x: F, bound: F, value: F) -> F {
        [
            _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x[0], bound[0]), value[0]),
            _mm256_and_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x[1], bound[1]), value[1]),
        ]
    }
    #[inline(always)]
    unsafe fn sum(x: F) -> f32 {
        let y = _mm256_add_ps(x[0], x[1]);
        let z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps::<1>(y));
        let z = _mm_add_ps(z, _mm_movehl_ps(z, z));
        _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps::<1>(z, z)))
    }
    #[inline(always)]
    unsafe fn peak(x: F) -> f32 {
        let y = _mm256_max_ps(x[0], x[1]);
        let z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps::<1>(y));
        let z = _mm_max_ps(z, _mm_movehl_ps(z, z));
        _mm_cvtss_f32(_mm_max_ss(z, _mm_shuffle_ps::<1>(z, z)))
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> I {
        [_mm256_set1_epi32(x); 2]
    }
    #[inline(always)]
    unsafe fn to_f(x: I) -> F {
        [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])]
    }
    #[inline(always)]
    unsafe fn round(x: F) -> I {
        [_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1])]
    }
    #[inline(always)]
    unsafe fn power(n: I) -> F {
        let bias = _mm256_set1_epi32(127);
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n[0], bias))),
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n[1], bias))),
        ]
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: I) {
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(x[0], x[1]));
        let packed = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        _mm_storeu_si128(p.cast(), packed);
    }
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, x: I) {
        let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(x[0], x[1]));
        _mm256_storeu_si256(p.cast(), words);
    }
    #[inline(always)]
    unsafe fn scale(x: F, n: I) -> F {
        let one =
            |x, n| _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32::<23>(n)));
        [one(x[0], n[0]), one(x[1], n[1])]
    }
    #[inline(always)]
    unsafe fn sum_i(x: I) -> i32 {
        let y = _mm256_add_epi32(x[0], x[1]);
        let z = _mm_add_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256::<1>(y));
        let z = _mm_add_epi32(z, _mm_shuffle_epi32::<0b01_00_11_10>(z));
        _mm_cvtsi128_si32(_mm_add_epi32(z, _mm_shuffle_epi32::<0b00_00_00_01>(z)))
    }
    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> I {
        [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())]
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: I) {
        _mm256_storeu_si256(p.cast(), x[0]);
        _mm256_storeu_si256(p.add(32).cast(), x[1]);
    }
    #[inline(always)]
    unsafe fn low(x: I) -> I {
        let mask = _mm256_set1_epi8(15);
        [_mm256_and_si256(x[0], mask), _mm256_and_si256(x[1], mask)]
    }
    #[inline(always)]
    unsafe fn high(x: I) -> I {
        let mask = _mm256_set1_epi8(15);
        [
            _mm256_and_si256(_mm256_srli_epi16::<4>(x[0]), mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(x[1]), mask),
        ]
    }
    #[inline(always)]
    unsafe fn pick(x: I, shift: u32, mask: i32) -> I {
        let (count, mask) = (_mm_cvtsi32_si128(shift as i32), _mm256_set1_epi32(mask));
        [
            _mm256_and_si256(_mm256_srl_epi32(x[0], count), mask),
            _mm256_and_si256(_mm256_srl_epi32(x[1], count), mask),
        ]
    }
    /// Even and odd bytes are widened to 16 bits: `maddubs` would saturate on bytes above 128.
    #[inline(always)]
    unsafe fn dot(acc: I, w: I, x: I) -> I {
        let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x[0]));
        let odd = _mm256_srai_epi16::<8>(x[0]);
        [half_dot(acc[0], w[0], even, odd), half_dot(acc[1], w[1], even, odd)]
    }
    #[inline(always)]
    unsafe fn dot16(acc: I, w: I, x: I) -> I {
        [
            _mm256_add_epi32(acc[0], _mm256_madd_epi16(w[0], x[0])),
            _mm256_add_epi32(acc[1], _mm256_madd_epi16(w[1], x[1])),
        ]
    }
}
