//! Attention over keys and values held as 16-bit integers with a scale a token and head.
//!
//! Both products are sums of integers, exact in any order, at twice the rate of f32. Only maxima, exponentials
//! and the joining of chunks are floats, each in the one order that a query's own context gives. Bounds that
//! keep the sums inside 32 bits: head_dim * KEY_TOP * query_top and CHUNK * VALUE_TOP * WEIGHT_TOP.

use super::attention::{Attend, PITCH, Pool, QUERIES, SPLIT, Scratch as Shared, WIDEST};
use super::attention::{finish, span, visible, wide};
use super::simd::{Simd, exp2};

/// Tokens whose weighted values are summed as integers; part of the numerics.
const CHUNK: usize = 64;
const KEY_TOP: f32 = 4095.0;
const VALUE_TOP: f32 = 4095.0;
const WEIGHT_TOP: f32 = 8191.0;
const BLOCKS: usize = SPLIT / 16;

/// Largest query integer for which a score of `dim` products fits.
fn query_top(dim: usize) -> f32 {
    ((i32::MAX as usize) / (dim * KEY_TOP as usize)).min(16_383) as f32
}

/// Working memory of one thread.
pub(super) struct Scratch {
    /// Pairs of query integers, [head_dim / 2][queries][2].
    q: [i32; QUERIES * WIDEST / 2],
    /// What a query's integers are to be multiplied with for scores in powers of two.
    scales: [f32; QUERIES],
    /// Integer weights of each query, `PITCH` of them.
    weights: [i16; QUERIES * PITCH],
    /// Blocks of a split whose pages are no multiple of 16; grows at need.
    near: Vec<i32>,
}

impl Scratch {
    pub(super) fn new() -> Self {
        Self {
            q: [0; QUERIES * WIDEST / 2],
            scales: [0.0; QUERIES],
            weights: [0; QUERIES * PITCH],
            near: Vec::new(),
        }
    }
}

/// Where blocks of 16 tokens of a split are. Keys of a block: [head_dim / 2] rows of 16 pairs, `pitch` pairs
/// apart; values: [8][value_pitch] pairs; a scale a token for both.
struct Blocks {
    keys: [*const i32; BLOCKS],
    key_scales: [*const f32; BLOCKS],
    values: [*const i32; BLOCKS],
    value_scales: [*const f32; BLOCKS],
    pitch: usize,
    count: usize,
}

/// How a query goes on after a split: earlier sums times `old`, integer sums times `new`.
#[derive(Clone, Copy, Default)]
struct Step {
    old: f32,
    new: f32,
    /// Tokens of the split that it sees.
    from: usize,
    to: usize,
}

#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const M: usize>(job: &Attend<'_>, scratch: &mut Shared) {
    let dim = job.pool.head_dim;
    for m in 0..M {
        code_query::<S, M>(&mut scratch.coded, m, job.queries[m].data, dim, job.scale);
    }
    let (first, last) = span(job);
    let mut tops = [f32::NEG_INFINITY; M];
    let mut totals = [0.0f32; M];
    for split in first / SPLIT..last.div_ceil(SPLIT) {
        let start = split * SPLIT;
        let end = last.min(start + SPLIT);
        let blocks = locate(job, &mut scratch.coded.near, start, end);
        scores::<S, M>(scratch, &blocks, dim);
        let mut steps = [Step::default(); M];
        for m in 0..M {
            let (from, to) = visible(job, m, start, end);
            steps[m] = weigh::<S>(scratch, &blocks, m, (from, to), &mut tops[m], &mut totals[m]);
            rescale::<S>(scratch, m, steps[m].old, job.pool.value_pitch);
        }
        values::<S, M>(scratch, &blocks, job.pool.value_pitch, &steps);
    }
    for m in 0..M {
        finish::<S>(scratch, m, totals[m], dim, job.queries[m].out);
    }
}

/// The scale of `n` values whose largest magnitude becomes `top`, and its inverse. NaN if a value is not finite.
#[inline(always)]
unsafe fn scale_of<S: Simd>(x: *const f32, n: usize, top: f32) -> (f32, f32) {
    let (mut most, mut nothing) = (S::splat(0.0), S::splat(0.0));
    let mut i = 0;
    while i + 16 <= n {
        let v = S::load(x.add(i));
        most = S::max(most, S::abs(v));
        // 0 times a finite number is 0, times anything else NaN.
        nothing = S::fma(v, S::splat(0.0), nothing);
        i += 16;
    }
    let (mut largest, mut rest) = (S::peak(most), S::sum(nothing));
    while i < n {
        largest = largest.max((*x.add(i)).abs());
        rest += *x.add(i) * 0.0;
        i += 1;
    }
    if rest != 0.0 {
        return (f32::NAN, 0.0);
    }
    // Below the smallest normal number a quotient could overflow: such rows are taken as 0.
    if largest < 1e-30 { (0.0, 0.0) } else { (largest / top, top / largest) }
}

/// Integers of `n` values times `inverse`; writes up to the next multiple of 16.
#[inline(always)]
unsafe fn codes<S: Simd>(x: *const f32, n: usize, inverse: f32, out: *mut i16) {
    let full = n / 16 * 16;
    let factor = S::splat(inverse);
    for i in (0..full).step_by(16) {
        S::store_i16(out.add(i), S::round(S::mul(S::load(x.add(i)), factor)));
    }
    if full < n {
        let mut rest = [0.0f32; 16];
        rest.as_mut_ptr().copy_from_nonoverlapping(x.add(full), n - full);
        S::store_i16(out.add(full), S::round(S::mul(S::load(rest.as_ptr()), factor)));
    }
}

#[inline(always)]
unsafe fn code_query<S: Simd, const M: usize>(
    scratch: &mut Scratch,
    m: usize,
    data: *const f32,
    dim: usize,
    scale: f32,
) {
    let mut row = [0i16; WIDEST];
    let (step, inverse) = scale_of::<S>(data, dim, query_top(dim));
    codes::<S>(data, dim, inverse, row.as_mut_ptr());
    for pair in 0..dim / 2 {
        scratch.q[pair * M + m] = row.as_ptr().add(pair * 2).cast::<i32>().read_unaligned();
    }
    scratch.scales[m] = step * scale * core::f32::consts::LOG2_E;
}

/// Blocks of tokens start..end; copied together first if pages are no multiple of 16.
#[inline(always)]
unsafe fn locate(job: &Attend<'_>, near: &mut Vec<i32>, start: usize, end: usize) -> Blocks {
    let pool = &job.pool;
    let (size, half, pitch) = (pool.page_size, pool.head_dim / 2, pool.value_pitch);
    let mut blocks = Blocks {
        keys: [core::ptr::null(); BLOCKS],
        key_scales: [core::ptr::null(); BLOCKS],
        values: [core::ptr::null(); BLOCKS],
        value_scales: [core::ptr::null(); BLOCKS],
        pitch: 16,
        count: (end - start).div_ceil(16),
    };
    if size.is_multiple_of(16) {
        blocks.pitch = size;
        for b in 0..blocks.count {
            let token = start + b * 16;
            let (page, offset) = (job.pages[token / size] as usize, token % size);
            let keys = pool.key_head(page, job.head).cast::<i32>().cast_const();
            let values = pool.value_head(page, job.head).cast::<i32>().cast_const();
            blocks.keys[b] = keys.add(offset);
            blocks.key_scales[b] = keys.add(half * size + offset).cast();
            blocks.values[b] = values.add(offset / 2 * pitch);
            blocks.value_scales[b] = values.add(size / 2 * pitch + offset).cast();
        }
        return blocks;
    }
    let each = half * 16 + 8 * pitch + 32;
    near.clear();
    near.resize(each * blocks.count, 0);
    for b in 0..blocks.count {
        let base = near.as_mut_ptr().add(b * each);
        let (scales, values) = (base.add(half * 16), base.add(half * 16 + 16));
        for lane in 0..16.min(end - start - b * 16) {
            gather(job, start + b * 16 + lane, lane, (base, scales.cast(), values));
        }
        blocks.keys[b] = base;
        blocks.key_scales[b] = scales.cast();
        blocks.values[b] = values;
        blocks.value_scales[b] = values.add(8 * pitch).cast();
    }
    blocks
}

/// Copy one token to lane `lane` of a block at (keys, key scales, values).
#[inline(always)]
unsafe fn gather(job: &Attend<'_>, token: usize, lane: usize, to: (*mut i32, *mut f32, *mut i32)) {
    let pool = &job.pool;
    let (size, half, pitch) = (pool.page_size, pool.head_dim / 2, pool.value_pitch);
    let (page, offset) = (job.pages[token / size] as usize, token % size);
    let keys = pool.key_head(page, job.head).cast::<i32>();
    for pair in 0..half {
        *to.0.add(pair * 16 + lane) = keys.add(pair * size + offset).read_unaligned();
    }
    *to.1.add(lane) = keys.add(half * size + offset).cast::<f32>().read_unaligned();
    let values = pool.value_head(page, job.head).cast::<i16>();
    for d in 0..pitch {
        let value = values.add((offset / 2 * pitch + d) * 2 + offset % 2).read_unaligned();
        *to.2.add(lane / 2 * pitch + d).cast::<i16>().add(lane % 2) = value;
    }
    let scales = values.add(size.next_multiple_of(2) * pitch).cast::<f32>();
    *to.2.add(8 * pitch).cast::<f32>().add(lane) = scales.add(offset).read_unaligned();
}

/// Scores of every query with every block, up to the query's own scale.
#[inline(always)]
unsafe fn scores<S: Simd, const M: usize>(scratch: &mut Shared, blocks: &Blocks, dim: usize) {
    let wide = wide::<S, M>();
    let mut b = 0;
    while b < blocks.count {
        let taken = if blocks.count - b >= wide { wide } else { 1 };
        match taken {
            4 => products::<S, M, 4>(scratch, blocks, b, dim),
            2 => products::<S, M, 2>(scratch, blocks, b, dim),
            _ => products::<S, M, 1>(scratch, blocks, b, dim),
        }
        b += taken;
    }
}

#[inline(always)]
unsafe fn products<S: Simd, const M: usize, const W: usize>(
    scratch: &mut Shared,
    blocks: &Blocks,
    b: usize,
    dim: usize,
) {
    if W > wide::<S, M>() {
        return;
    }
    let q = scratch.coded.q.as_ptr();
    let mut acc = [[S::splat_i(0); M]; W];
    for pair in 0..dim / 2 {
        let mut key = [S::bytes(blocks.keys[b].add(pair * blocks.pitch).cast()); W];
        for w in 1..W {
            key[w] = S::bytes(blocks.keys[b + w].add(pair * blocks.pitch).cast());
        }
        for m in 0..M {
            let factor = S::splat_i(*q.add(pair * M + m));
            for w in 0..W {
                acc[w][m] = S::dot16(acc[w][m], key[w], factor);
            }
        }
    }
    for w in 0..W {
        let scale = S::load(blocks.key_scales[b + w]);
        for m in 0..M {
            let to = scratch.scores.as_mut_ptr().add(m * PITCH + (b + w) * 16);
            S::store(to, S::mul(S::to_f(acc[w][m]), scale));
        }
    }
}

/// Turn scores of query `m` into integer weights of values; updates its maximum and sum.
#[inline(always)]
unsafe fn weigh<S: Simd>(
    scratch: &mut Shared,
    blocks: &Blocks,
    m: usize,
    (from, to): (usize, usize),
    top: &mut f32,
    sum: &mut f32,
) -> Step {
    let weights = scratch.coded.weights.as_mut_ptr().add(m * PITCH);
    if from >= to {
        // Nothing of this split is visible: what was accumulated so far stays as it is.
        weights.write_bytes(0, blocks.count * 16);
        return Step { old: if *sum == 0.0 { 0.0 } else { 1.0 }, new: 0.0, from: 0, to: 0 };
    }
    let scores = scratch.scores.as_mut_ptr().add(m * PITCH);
    let (first, last) = (from / 16, to.div_ceil(16));
    weights.write_bytes(0, first * 16);
    weights.add(last * 16).write_bytes(0, (blocks.count - last) * 16);
    for i in (first * 16..from).chain(to..last * 16) {
        *scores.add(i) = f32::NEG_INFINITY;
    }
    let mut most = S::splat(f32::NEG_INFINITY);
    for b in first..last {
        most = S::max(most, S::load(scores.add(b * 16)));
    }
    let scale = scratch.coded.scales[m];
    let here = S::peak(most) * scale;
    let (factor, shift, zero) = (S::splat(scale), S::splat(-here), S::splat(0.0));
    let (mut total, mut largest) = (zero, zero);
    for b in first..last {
        let x = S::load(scores.add(b * 16));
        let mut weight = exp2::<S>(S::fma(x, factor, shift));
        let mut value = S::mul(weight, S::load(blocks.value_scales[b]));
        if b * 16 < from || (b + 1) * 16 > to {
            // Masked lanes may stand beside anything: they are exactly absent. NaN is kept.
            let masked = S::splat(f32::MIN);
            (weight, value) = (S::keep(x, masked, weight), S::keep(x, masked, value));
        }
        // A value that is not finite makes the sum NaN.
        total = S::fma(value, zero, S::add(total, weight));
        largest = S::max(largest, value);
        S::store(scores.add(b * 16), value);
    }
    let (total, largest) = (S::sum(total), S::peak(largest));
    let inverse = S::splat(if largest > 1e-30 { WEIGHT_TOP / largest } else { 0.0 });
    for b in first..last {
        S::store_i16(weights.add(b * 16), S::round(S::mul(S::load(scores.add(b * 16)), inverse)));
    }
    let part = largest / WEIGHT_TOP;
    if *sum == 0.0 {
        (*top, *sum) = (here, total);
        return Step { old: 0.0, new: part, from, to };
    }
    let new = if here > *top { here } else { *top };
    let (old, factor) = ((*top - new).exp2(), (here - new).exp2());
    *sum = *sum * old + total * factor;
    *top = new;
    Step { old, new: part * factor, from, to }
}

/// Multiply what query `m` has accumulated by `old`; 0 clears it, whatever it was.
#[inline(always)]
unsafe fn rescale<S: Simd>(scratch: &mut Shared, m: usize, old: f32, pitch: usize) {
    if old == 1.0 {
        return;
    }
    let acc = scratch.acc.as_mut_ptr().add(m * WIDEST);
    for d in (0..pitch).step_by(16) {
        let kept = S::mul(S::load(acc.add(d)), S::splat(old));
        S::store(acc.add(d), if old == 0.0 { S::splat(0.0) } else { kept });
    }
}

/// Add the weighted values of a split, chunk by chunk.
#[inline(always)]
unsafe fn values<S: Simd, const M: usize>(
    scratch: &mut Shared,
    blocks: &Blocks,
    pitch: usize,
    steps: &[Step; M],
) {
    let wide = wide::<S, M>();
    for chunk in 0..(blocks.count * 16).div_ceil(CHUNK) {
        let mut d = 0;
        while d < pitch {
            let taken = if (pitch - d) / 16 >= wide { wide } else { 1 };
            match taken {
                4 => sums::<S, M, 4>(scratch, blocks, chunk, pitch, d, steps),
                2 => sums::<S, M, 2>(scratch, blocks, chunk, pitch, d, steps),
                _ => sums::<S, M, 1>(scratch, blocks, chunk, pitch, d, steps),
            }
            d += taken * 16;
        }
    }
}

/// Weighted sums of one chunk for `W` vectors of a value, from element `d` on.
#[inline(always)]
unsafe fn sums<S: Simd, const M: usize, const W: usize>(
    scratch: &mut Shared,
    blocks: &Blocks,
    chunk: usize,
    pitch: usize,
    d: usize,
    steps: &[Step; M],
) {
    if W > wide::<S, M>() {
        return;
    }
    let (first, last) = (chunk * CHUNK / 16, ((chunk + 1) * CHUNK / 16).min(blocks.count));
    let weights = scratch.coded.weights.as_ptr();
    let mut acc = [[S::splat_i(0); M]; W];
    for b in first..last {
        let base = blocks.values[b].add(d);
        for pair in 0..8 {
            let mut value = [S::bytes(base.add(pair * pitch).cast()); W];
            for w in 1..W {
                value[w] = S::bytes(base.add(pair * pitch + w * 16).cast());
            }
            for m in 0..M {
                let at = weights.add(m * PITCH + b * 16 + pair * 2);
                let factor = S::splat_i(at.cast::<i32>().read_unaligned());
                for w in 0..W {
                    acc[w][m] = S::dot16(acc[w][m], value[w], factor);
                }
            }
        }
    }
    for m in 0..M {
        let step = &steps[m];
        // A chunk of which it sees nothing must not even change the sign of a zero.
        if step.from >= last * 16 || step.to <= first * 16 {
            continue;
        }
        for w in 0..W {
            let to = scratch.acc.as_mut_ptr().add(m * WIDEST + d + w * 16);
            S::store(to, S::fma(S::to_f(acc[w][m]), S::splat(step.new), S::load(to)));
        }
    }
}

/// Code and write one token of every head; see `attention::write`.
#[inline(always)]
pub(super) unsafe fn write<S: Simd>(
    pool: &Pool,
    page: usize,
    offset: usize,
    key: *const f32,
    value: *const f32,
) {
    let (dim, size, pitch) = (pool.head_dim, pool.page_size, pool.value_pitch);
    let mut row = [0i16; WIDEST];
    for head in 0..pool.kv_heads {
        let (key, value) = (key.add(head * dim), value.add(head * dim));
        let (scale, inverse) = scale_of::<S>(key, dim, KEY_TOP);
        codes::<S>(key, dim, inverse, row.as_mut_ptr());
        let to = pool.key_head(page, head).cast::<i32>();
        for pair in 0..dim / 2 {
            let two = row.as_ptr().add(pair * 2).cast::<i32>().read_unaligned();
            to.add(pair * size + offset).write_unaligned(two);
        }
        to.add(dim / 2 * size + offset).cast::<f32>().write_unaligned(scale);
        let (scale, inverse) = scale_of::<S>(value, dim, VALUE_TOP);
        codes::<S>(value, dim, inverse, row.as_mut_ptr());
        let to = pool.value_head(page, head).cast::<i16>();
        for d in 0..dim {
            to.add((offset / 2 * pitch + d) * 2 + offset % 2).write_unaligned(row[d]);
        }
        let scales = to.add(size.next_multiple_of(2) * pitch).cast::<f32>();
        scales.add(offset).write_unaligned(scale);
    }
}
