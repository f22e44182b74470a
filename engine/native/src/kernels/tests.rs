//! Kernels of every instruction set here against plain double-precision arithmetic.

use proptest::prelude::*;

use super::attention::{Attend, Pool, Query, Scratch};
use super::table::{Isa, Kernels, Rows};

/// The kernels of every instruction set that this CPU has.
fn all() -> Vec<(Isa, Kernels)> {
    Isa::ALL.into_iter().filter_map(|isa| Kernels::of(isa).map(|kernels| (isa, kernels))).collect()
}

/// Repeatable numbers in -1..1.
fn noise(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        })
        .collect()
}

fn close(found: &[f32], expected: &[f64], bound: f64) {
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*a) - b).abs() <= bound * (1.0 + b.abs()), "value {i} is {a}, expected {b}");
    }
}

struct Paged {
    keys: Vec<u8>,
    values: Vec<u8>,
    pool: Pool,
    plain: Vec<(Vec<f32>, Vec<f32>)>,
}

/// A pool of one key head with `tokens` tokens in pages counted down from the last.
fn paged(kernels: &Kernels, tokens: usize, dim: usize, page_size: usize, coded: bool) -> (Paged, Vec<u32>) {
    let pages = tokens.div_ceil(page_size);
    let pitch = dim.next_multiple_of(16);
    let nowhere = std::ptr::null_mut();
    let mut pool = Pool {
        keys: nowhere,
        values: nowhere,
        coded,
        page_size,
        kv_heads: 1,
        head_dim: dim,
        value_pitch: pitch,
    };
    let (key_bytes, value_bytes) = pool.head_bytes();
    // What was never written may hold anything.
    let mut keys = vec![0xffu8; pages * key_bytes + 128];
    let mut values = vec![if coded { 0xff } else { 0 }; pages * value_bytes + 128];
    (pool.keys, pool.values) = (keys.as_mut_ptr(), values.as_mut_ptr());
    let table: Vec<u32> = (0..pages as u32).rev().collect();
    let mut plain = Vec::new();
    for token in 0..tokens {
        let (key, value) = (noise(dim, token as u32 * 2 + 1), noise(dim, token as u32 * 2 + 2));
        // SAFETY: the page and offset are inside the pool made above.
        unsafe {
            (kernels.write)(
                &pool,
                table[token / page_size] as usize,
                token % page_size,
                key.as_ptr(),
                value.as_ptr(),
            )
        };
        plain.push(if coded { (kept(&key), kept(&value)) } else { (key, value) });
    }
    (Paged { keys, values, pool, plain }, table)
}

/// What 16-bit codes keep of a row.
fn kept(x: &[f32]) -> Vec<f32> {
    let scale = x.iter().fold(0.0f32, |top, v| top.max(v.abs())) / 4095.0;
    x.iter().map(|v| (v / scale).round() * scale).collect()
}

fn naive(plain: &[(Vec<f32>, Vec<f32>)], q: &[f32], position: usize, window: usize, scale: f32) -> Vec<f64> {
    let seen = &plain[(position + 1).saturating_sub(window)..=position];
    let dot = |k: &[f32]| k.iter().zip(q).map(|(a, b)| f64::from(*a) * f64::from(b * scale)).sum::<f64>();
    let scores: Vec<f64> = seen.iter().map(|(key, _)| dot(key)).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
    let mut out = vec![0.0; q.len()];
    for (score, (_, value)) in scores.iter().zip(seen) {
        let weight = (score - top).exp() / total;
        out.iter_mut().zip(value).for_each(|(o, v)| *o += weight * f64::from(*v));
    }
    out
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    tokens: usize,
    dim: usize,
    page_size: usize,
    coded: bool,
    queries: usize,
    window: usize,
}

fn check_attention(isa: Isa, kernels: &Kernels, shape: Shape) {
    let (paged, pages) = paged(kernels, shape.tokens, shape.dim, shape.page_size, shape.coded);
    let count = shape.queries.min(kernels.queries);
    let data: Vec<Vec<f32>> = (0..count).map(|m| noise(shape.dim, 999 + m as u32)).collect();
    let mut outs = vec![vec![0.0f32; shape.dim]; count];
    let positions: Vec<usize> =
        (0..count).map(|m| shape.tokens - 1 - (count - 1 - m) / 2 % shape.tokens).collect();
    let queries: Vec<Query> = (0..count)
        .map(|m| Query { data: data[m].as_ptr(), out: outs[m].as_mut_ptr(), position: positions[m] })
        .collect();
    let mut scratch = Scratch::new();
    let job = Attend {
        pool: paged.pool,
        pages: &pages,
        head: 0,
        queries: &queries,
        scale: 0.7,
        window: shape.window,
    };
    // SAFETY: all positions are inside the pages, and queries and outputs hold `dim` values.
    unsafe { (kernels.attend)(&job, &mut scratch) };
    for m in 0..count {
        let expected = naive(&paged.plain, &data[m], positions[m], shape.window, 0.7);
        // Coded, queries are rounded to 13 bits and weights to a part in 8191 of the largest.
        close(&outs[m], &expected, if shape.coded { 1.5e-3 } else { 2e-5 });
        let alone = Query { out: outs[m].as_mut_ptr(), ..queries[m] };
        let together = outs[m].clone();
        let job = Attend { queries: std::slice::from_ref(&alone), ..job };
        // SAFETY: as above.
        unsafe { (kernels.attend)(&job, &mut scratch) };
        assert_eq!(outs[m], together, "query {m} of {count} alone on {isa:?}");
    }
    assert!(!paged.keys.is_empty() && !paged.values.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn attention_equals_plain_softmax_in_any_company(
        tokens in 1usize..700,
        dim in prop::sample::select(vec![8usize, 16, 32, 48, 64, 80, 128]),
        page_size in prop::sample::select(vec![1usize, 3, 8, 16, 64]),
        coded in any::<bool>(),
        queries in 1usize..=12,
        window in prop::sample::select(vec![1usize, 7, 100, 300, usize::MAX]),
    ) {
        for (isa, kernels) in all() {
            check_attention(isa, &kernels, Shape { tokens, dim, page_size, coded, queries, window });
        }
    }

    #[test]
    fn exponentials_are_near_and_keep_what_is_no_number(x in -130.0f32..0.0) {
        let (found, expected) = (exp2_of::<super::portable::Portable>(x), f64::from(x.max(-126.0)).exp2());
        prop_assert!((f64::from(found) / expected - 1.0).abs() < 4e-7, "{found} {expected}");
        prop_assert!(exp2_of::<super::portable::Portable>(f32::NAN).is_nan());
    }

    #[test]
    fn norms_equal_plain_arithmetic(n in 1usize..200, seed in any::<u32>()) {
        let (x, weight) = (noise(n, seed), noise(n, seed ^ 1));
        let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / n as f64;
        let expected: Vec<f64> =
            x.iter().zip(&weight).map(|(v, w)| f64::from(*v) / (mean + 1e-5).sqrt() * f64::from(*w)).collect();
        for (_, kernels) in all() {
            let mut out = vec![0.0; n];
            // SAFETY: all three hold `n` values.
            unsafe { (kernels.norm)(x.as_ptr(), weight.as_ptr(), n, 1e-5, out.as_mut_ptr()) };
            close(&out, &expected, 1e-5);
        }
    }

    #[test]
    fn rotation_keeps_lengths_and_equals_plain_arithmetic(half in 1usize..70, seed in any::<u32>()) {
        let x = noise(half * 2, seed);
        let angles = noise(half, seed ^ 2);
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        for (_, kernels) in all() {
            let mut out = x.clone();
            // SAFETY: `out` holds two halves, cosines and sines one.
            unsafe { (kernels.rotate)(out.as_mut_ptr(), cos.as_ptr(), sin.as_ptr(), half) };
            for i in 0..half {
                let (a, b) = (f64::from(x[i]), f64::from(x[half + i]));
                let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
                close(&[out[i], out[half + i]], &[a * c - b * s, b * c + a * s], 1e-5);
            }
        }
    }
}

#[test]
fn gates_equal_plain_arithmetic_even_far_from_zero() {
    let gate: Vec<f32> = (0..64).map(|i| (i as f32 - 32.0) * 4.0).collect();
    let up = noise(64, 5);
    let expected: Vec<f64> = gate
        .iter()
        .zip(&up)
        .map(|(g, u)| f64::from(*g) / (1.0 + (-f64::from(*g)).exp()) * f64::from(*u))
        .collect();
    for (_, kernels) in all() {
        let mut out = vec![0.0; 64];
        // SAFETY: all three hold 64 values.
        unsafe { (kernels.gate)(gate.as_ptr(), up.as_ptr(), 64, out.as_mut_ptr()) };
        close(&out, &expected, 1e-5);
    }
}

#[test]
fn rows_report_their_summit_and_what_is_not_finite() {
    for (_, kernels) in all() {
        let rows = Rows::new(kernels);
        for n in [1, 15, 16, 17, 100, 5000] {
            let mut row = noise(n, n as u32);
            row[n / 2] = 3.0;
            assert_eq!(rows.summit(&row), (3.0, true));
            let expected = row.iter().map(|v| f64::from(*v).exp()).sum::<f64>().ln();
            close(&[rows.log_sum(&row, 3.0)], &[expected], 1e-6);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                row[n - 1] = bad;
                assert!(!rows.summit(&row).1);
            }
        }
    }
}

fn exp2_of<S: super::simd::Simd>(x: f32) -> f32 {
    let mut out = [0.0f32; 16];
    // SAFETY: called with the portable set only, which runs anywhere.
    unsafe { S::store(out.as_mut_ptr(), super::simd::exp2::<S>(S::splat(x))) };
    out[3]
}

/// Result of the last query over `tokens` tokens of which one was spoilt by `spoil`.
fn spoilt(kernels: &Kernels, position: usize, spoil: impl Fn(&mut Vec<f32>, &mut Vec<f32>)) -> Vec<f32> {
    let (paged, pages) = paged(kernels, 40, 32, 16, true);
    let (mut key, mut value) = (noise(32, 5), noise(32, 6));
    spoil(&mut key, &mut value);
    // SAFETY: token 20 is inside the pool.
    unsafe { (kernels.write)(&paged.pool, pages[1] as usize, 4, key.as_ptr(), value.as_ptr()) };
    let (data, mut out) = (noise(32, 7), vec![0.0f32; 32]);
    let queries = [Query { data: data.as_ptr(), out: out.as_mut_ptr(), position }];
    let job = Attend {
        pool: paged.pool,
        pages: &pages,
        head: 0,
        queries: &queries,
        scale: 0.2,
        window: usize::MAX,
    };
    // SAFETY: the position is inside the pages, and query and output hold 32 values.
    unsafe { (kernels.attend)(&job, &mut Scratch::new()) };
    out
}

#[test]
fn a_value_that_is_no_number_reaches_those_that_see_it_and_nobody_else() {
    for (isa, kernels) in all() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let key = spoilt(&kernels, 39, |key, _| key[9] = bad);
            let value = spoilt(&kernels, 39, |_, value| value[30] = bad);
            assert!(key.iter().chain(&value).all(|x| x.is_nan()), "{bad} on {isa:?}");
            let before = spoilt(&kernels, 19, |key, _| key[9] = bad);
            assert_eq!(before, spoilt(&kernels, 19, |_, value| value[30] = bad), "{isa:?}");
            assert!(before.iter().all(|x| x.is_finite()));
        }
        let nothing = spoilt(&kernels, 39, |key, value| (key.fill(0.0), value.fill(0.0)).0);
        assert!(nothing.iter().all(|x| x.is_finite()), "a row of zeros on {isa:?}");
    }
}
