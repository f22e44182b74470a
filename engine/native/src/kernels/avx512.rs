//! `Simd` on AVX-512 with VNNI: one register a vector.

use core::arch::x86_64::*;

use super::simd::Simd;

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

impl Simd for Avx512 {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;
    const TILE: usize = 6;
    const QUERIES: usize = 12;
    const PAIRS: bool = true;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        _mm512_storeu_ps(p, x);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()))))
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn abs(x: __m512) -> __m512 {
        _mm512_abs_ps(x)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn keep(x: __m512, bound: __m512, value: __m512) -> __m512 {
        _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, bound), value)
    }
    #[inline(always)]
    unsafe fn sum(x: __m512) -> f32 {
        _mm512_reduce_add_ps(x)
    }
    #[inline(always)]
    unsafe fn peak(x: __m512) -> f32 {
        _mm512_reduce_max_ps(x)
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> __m512i {
        _mm512_set1_epi32(x)
    }
    #[inline(always)]
    unsafe fn to_f(x: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(x)
    }
    #[inline(always)]
    unsafe fn round(x: __m512) -> __m512i {
        _mm512_cvtps_epi32(x)
    }
    #[inline(always)]
    unsafe fn power(n: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(n, _mm512_set1_epi32(127))))
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, x: __m512i) {
        _mm_storeu_si128(p.cast(), _mm512_cvtsepi32_epi8(x));
    }
    #[inline(always)]
    unsafe fn store_i16(p: *mut i16, x: __m512i) {
        _mm256_storeu_si256(p.cast(), _mm512_cvtsepi32_epi16(x));
    }
    #[inline(always)]
    unsafe fn scale(x: __m512, n: __m512i) -> __m512 {
        _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32::<23>(n)))
    }
    #[inline(always)]
    unsafe fn sum_i(x: __m512i) -> i32 {
        _mm512_reduce_add_epi32(x)
    }
    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> __m512i {
        _mm512_loadu_si512(p.cast())
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: __m512i) {
        _mm512_storeu_si512(p.cast(), x);
    }
    #[inline(always)]
    unsafe fn low(x: __m512i) -> __m512i {
        _mm512_and_si512(x, _mm512_set1_epi8(15))
    }
    #[inline(always)]
    unsafe fn high(x: __m512i) -> __m512i {
        _mm512_and_si512(_mm512_srli_epi16::<4>(x), _mm512_set1_epi8(15))
    }
    #[inline(always)]
    unsafe fn pick(x: __m512i, shift: u32, mask: i32) -> __m512i {
        let count = _mm_cvtsi32_si128(shift as i32);
        _mm512_and_si512(_mm512_srl_epi32(x, count), _mm512_set1_epi32(mask))
    }
    #[inline(always)]
    unsafe fn dot(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        _mm512_dpbusd_epi32(acc, w, x)
    }
    #[inline(always)]
    unsafe fn dot16(acc: __m512i, w: __m512i, x: __m512i) -> __m512i {
        _mm512_dpwssd_epi32(acc, w, x)
    }
}
