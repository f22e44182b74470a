//! Paged attention of a few query heads that share a key and value head.
//!
//! Context is cut at fixed absolute positions into splits of `SPLIT` tokens. Inside a split: all scores, their
//! maximum, exponentials and sum, then values in token order. Splits are merged in order. So the result of a
//! query depends on its own context only, whatever else is in the tile, the step or the pool. This file holds
//! the pool, the work on f32 pools and the parts that both have; `coded` holds the work on 16-bit pools.

use super::coded;
use super::simd::{Simd, exp};

/// Tokens of one split; part of the numerics.
pub(crate) const SPLIT: usize = 256;
/// Largest head width.
pub(crate) const WIDEST: usize = 256;
/// Most queries of one call, over all instruction sets.
pub(crate) const QUERIES: usize = 12;
pub(super) const PITCH: usize = SPLIT + 16;

/// One layer's pool. In f32, keys of a page lie as [kv_heads][head_dim][page_size], values as
/// [kv_heads][page_size][value_pitch]. Coded, each head of a page holds 16-bit integers, keys as
/// [head_dim / 2][page_size][2] and values as [page_size / 2][value_pitch][2], and then an f32 scale a token.
#[derive(Clone, Copy)]
pub(crate) struct Pool {
    pub(crate) keys: *mut u8,
    pub(crate) values: *mut u8,
    pub(crate) coded: bool,
    pub(crate) page_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// head_dim rounded up to 16; the rest is zero.
    pub(crate) value_pitch: usize,
}

// SAFETY: a pool is addresses and sizes; each user states why what it writes is its own.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

impl Pool {
    /// Bytes of one head's keys and of its values in a page.
    pub(crate) fn head_bytes(&self) -> (usize, usize) {
        let size = self.page_size;
        if !self.coded {
            return (size * self.head_dim * 4, size * self.value_pitch * 4);
        }
        let pairs = size.next_multiple_of(2);
        (size * (self.head_dim * 2 + 4), pairs * self.value_pitch * 2 + size * 4)
    }

    /// Where the keys of `head` in `page` start.
    #[inline(always)]
    pub(super) fn key_head(&self, page: usize, head: usize) -> *mut u8 {
        self.keys.wrapping_add((page * self.kv_heads + head) * self.head_bytes().0)
    }

    /// Where the values of `head` in `page` start.
    #[inline(always)]
    pub(super) fn value_head(&self, page: usize, head: usize) -> *mut u8 {
        self.values.wrapping_add((page * self.kv_heads + head) * self.head_bytes().1)
    }

    /// f32 elements of values before those of token `offset` of `head` in `page`.
    #[inline(always)]
    fn value(&self, page: usize, head: usize, offset: usize) -> usize {
        ((page * self.kv_heads + head) * self.page_size + offset) * self.value_pitch
    }
}

/// One query head at one position.
#[derive(Clone, Copy)]
pub(crate) struct Query {
    /// head_dim values, already rotated.
    pub(crate) data: *const f32,
    /// Where head_dim results go.
    pub(crate) out: *mut f32,
    pub(crate) position: usize,
}

/// Queries of one sequence and one key head; at most Simd::QUERIES of them.
#[derive(Clone, Copy)]
pub(crate) struct Attend<'a> {
    pub(crate) pool: Pool,
    pub(crate) pages: &'a [u32],
    pub(crate) head: usize,
    pub(crate) queries: &'a [Query],
    pub(crate) scale: f32,
    /// Last positions visible to a query, itself included.
    pub(crate) window: usize,
}

/// Working memory of one thread.
pub(crate) struct Scratch {
    q: [f32; QUERIES * PITCH],
    pub(super) scores: [f32; QUERIES * PITCH],
    pub(super) acc: [f32; QUERIES * WIDEST],
    tile: [f32; WIDEST * 16],
    rows: [usize; SPLIT],
    pub(super) coded: coded::Scratch,
}

impl Scratch {
    pub(crate) fn new() -> Box<Self> {
        Box::new(Self {
            q: [0.0; QUERIES * PITCH],
            scores: [0.0; QUERIES * PITCH],
            acc: [0.0; QUERIES * WIDEST],
            tile: [0.0; WIDEST * 16],
            rows: [0; SPLIT],
            coded: coded::Scratch::new(),
        })
    }
}

/// Attend all queries of `job`.
#[inline(always)]
pub(crate) unsafe fn attend<S: Simd>(job: &Attend<'_>, scratch: &mut Scratch) {
    macro_rules! rows {
        ($($m:literal),*) => {
            match job.queries.len() {
                $($m if $m <= S::QUERIES && job.pool.coded => coded::tile::<S, $m>(job, scratch),)*
                $($m if $m <= S::QUERIES => tile::<S, $m>(job, scratch),)*
                _ => unreachable!("at most Simd::QUERIES queries a call"),
            }
        };
    }
    rows!(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12);
}

#[inline(always)]
unsafe fn tile<S: Simd, const M: usize>(job: &Attend<'_>, scratch: &mut Scratch) {
    let dim = job.pool.head_dim;
    for m in 0..M {
        let data = job.queries[m].data;
        for d in (0..dim / 16 * 16).step_by(16) {
            let to = scratch.q.as_mut_ptr().add(m * PITCH + d);
            S::store(to, S::mul(S::load(data.add(d)), S::splat(job.scale)));
        }
        for d in dim / 16 * 16..dim {
            scratch.q[m * PITCH + d] = *data.add(d) * job.scale;
        }
    }
    let (first, last) = span(job);
    let mut tops = [f32::NEG_INFINITY; M];
    let mut totals = [0.0f32; M];
    for split in first / SPLIT..last.div_ceil(SPLIT) {
        let start = split * SPLIT;
        let end = last.min(start + SPLIT);
        scores::<S, M>(job, scratch, start, end);
        let mut factors = [(0.0f32, 0.0f32); M];
        for m in 0..M {
            let visible = visible(job, m, start, end);
            if visible.0 < visible.1 {
                factors[m] = weigh::<S>(scratch, m, end - start, visible, &mut tops[m], &mut totals[m]);
            } else {
                // Nothing of this split is visible: what was accumulated so far stays as it is.
                scratch.scores[m * PITCH..][..end - start].fill(0.0);
                factors[m] = (if totals[m] == 0.0 { 0.0 } else { 1.0 }, 0.0);
            }
        }
        values::<S, M>(job, scratch, start, end, &factors);
    }
    for m in 0..M {
        finish::<S>(scratch, m, totals[m], dim, job.queries[m].out);
    }
}

/// First token that any query sees, and the one after the last.
#[inline(always)]
pub(super) fn span(job: &Attend<'_>) -> (usize, usize) {
    let (mut first, mut last) = (usize::MAX, 0);
    for query in job.queries {
        first = first.min((query.position + 1).saturating_sub(job.window));
        last = last.max(query.position + 1);
    }
    (first, last)
}

/// Results of query `m`: what was accumulated over the sum of its weights.
#[inline(always)]
pub(super) unsafe fn finish<S: Simd>(scratch: &Scratch, m: usize, total: f32, dim: usize, out: *mut f32) {
    let inverse = 1.0 / total;
    for d in (0..dim / 16 * 16).step_by(16) {
        let sum = S::load(scratch.acc.as_ptr().add(m * WIDEST + d));
        S::store(out.add(d), S::mul(sum, S::splat(inverse)));
    }
    for d in dim / 16 * 16..dim {
        *out.add(d) = scratch.acc[m * WIDEST + d] * inverse;
    }
}

/// Tokens of start..end that query `m` sees, counted from `start`.
#[inline(always)]
pub(super) fn visible(job: &Attend<'_>, m: usize, start: usize, end: usize) -> (usize, usize) {
    let position = job.queries[m].position;
    let from = (position + 1).saturating_sub(job.window).max(start) - start;
    (from, (position + 1).min(end).saturating_sub(start))
}

/// Scores of every query with tokens start..end (and, unused, up to the next multiple of 16).
#[inline(always)]
unsafe fn scores<S: Simd, const M: usize>(job: &Attend<'_>, scratch: &mut Scratch, start: usize, end: usize) {
    let pool = &job.pool;
    let size = pool.page_size;
    let wide = wide::<S, M>();
    let mut token = start;
    while token < end {
        if !size.is_multiple_of(16) {
            gather(job, scratch, token, end);
            let keys = [scratch.tile.as_ptr(); 4];
            products::<S, M, 1>(scratch, keys, 16, pool.head_dim, token - start);
            token += 16;
            continue;
        }
        let mut keys = [pool.keys.cast::<f32>().cast_const(); 4];
        let vectors = (end - token).div_ceil(16);
        for (i, key) in keys.iter_mut().enumerate().take(vectors) {
            let at = token + i * 16;
            *key = pool.key_head(job.pages[at / size] as usize, job.head).cast::<f32>().add(at % size);
        }
        // The number of vectors taken together changes registers, not the order inside a score.
        let taken = if vectors >= wide { wide } else { 1 };
        match taken {
            4 => products::<S, M, 4>(scratch, keys, size, pool.head_dim, token - start),
            2 => products::<S, M, 2>(scratch, keys, size, pool.head_dim, token - start),
            _ => products::<S, M, 1>(scratch, keys, size, pool.head_dim, token - start),
        }
        token += taken * 16;
    }
}

/// Vectors that `M` queries work on together, so that registers are used and loads shared.
#[inline(always)]
pub(super) const fn wide<S: Simd, const M: usize>() -> usize {
    if !S::PAIRS {
        1
    } else if M <= 4 {
        4
    } else {
        2
    }
}

/// Scores with `W` vectors of 16 tokens; stored from token `at` of the split on.
#[inline(always)]
unsafe fn products<S: Simd, const M: usize, const W: usize>(
    scratch: &mut Scratch,
    keys: [*const f32; 4],
    pitch: usize,
    dim: usize,
    at: usize,
) {
    if W > wide::<S, M>() {
        return;
    }
    let q = scratch.q.as_ptr();
    let mut acc = [[S::splat(0.0); M]; W];
    for d in 0..dim {
        let mut key = [S::splat(0.0); W];
        for w in 0..W {
            key[w] = S::load(keys[w].add(d * pitch));
        }
        for m in 0..M {
            let factor = S::splat(*q.add(m * PITCH + d));
            for w in 0..W {
                acc[w][m] = S::fma(key[w], factor, acc[w][m]);
            }
        }
    }
    for w in 0..W {
        for m in 0..M {
            S::store(scratch.scores.as_mut_ptr().add(m * PITCH + at + w * 16), acc[w][m]);
        }
    }
}

/// Keys of 16 tokens as [head_dim][16], for pages that a vector would straddle.
#[inline(always)]
unsafe fn gather(job: &Attend<'_>, scratch: &mut Scratch, token: usize, end: usize) {
    let pool = &job.pool;
    let size = pool.page_size;
    for lane in 0..16 {
        if token + lane >= end {
            for d in 0..pool.head_dim {
                scratch.tile[d * 16 + lane] = 0.0;
            }
            continue;
        }
        let at = token + lane;
        let base = pool.key_head(job.pages[at / size] as usize, job.head).cast::<f32>().add(at % size);
        for d in 0..pool.head_dim {
            scratch.tile[d * 16 + lane] = *base.add(d * size);
        }
    }
}

/// Turn scores of query `m` into weights; returns the factors of earlier splits and of this one.
#[inline(always)]
unsafe fn weigh<S: Simd>(
    scratch: &mut Scratch,
    m: usize,
    count: usize,
    visible: (usize, usize),
    top: &mut f32,
    sum: &mut f32,
) -> (f32, f32) {
    let padded = count.div_ceil(16) * 16;
    let scores = scratch.scores.as_mut_ptr().add(m * PITCH);
    for i in (0..visible.0).chain(visible.1..padded) {
        *scores.add(i) = f32::NEG_INFINITY;
    }
    // Lanes are whole vectors counted from the split's start, so their order is the same for every caller.
    let seen = visible.1.div_ceil(16) * 16;
    let mut most = S::splat(f32::NEG_INFINITY);
    for i in (0..seen).step_by(16) {
        most = S::max(most, S::load(scores.add(i)));
    }
    let here = S::peak(most);
    let shift = S::splat(here);
    let mut acc = S::splat(0.0);
    for i in (0..seen).step_by(16) {
        let weight = exp::<S>(S::sub(S::load(scores.add(i)), shift));
        S::store(scores.add(i), weight);
        acc = S::add(acc, weight);
    }
    for i in seen..padded {
        *scores.add(i) = 0.0;
    }
    let total = S::sum(acc);
    if *sum == 0.0 {
        (*top, *sum) = (here, total);
        return (0.0, 1.0);
    }
    let new = if here > *top { here } else { *top };
    let (old_factor, factor) = ((*top - new).exp(), (here - new).exp());
    *sum = *sum * old_factor + total * factor;
    *top = new;
    (old_factor, factor)
}

/// Add the weighted values of tokens start..end to the accumulators: acc = acc * old + split * new.
#[inline(always)]
unsafe fn values<S: Simd, const M: usize>(
    job: &Attend<'_>,
    scratch: &mut Scratch,
    start: usize,
    end: usize,
    factors: &[(f32, f32); M],
) {
    let pool = &job.pool;
    let size = pool.page_size;
    let mut token = start;
    while token < end {
        let first = pool.value(job.pages[token / size] as usize, job.head, token % size);
        let run = (size - token % size).min(end - token);
        for i in 0..run {
            scratch.rows[token - start + i] = first + i * pool.value_pitch;
        }
        token += run;
    }
    let mut d = 0;
    while d < pool.value_pitch {
        let left = (pool.value_pitch - d) / 16;
        let taken = if left >= wide::<S, M>() { wide::<S, M>() } else { 1 };
        match taken {
            4 => sums::<S, M, 4>(pool, scratch, d, end - start, factors),
            2 => sums::<S, M, 2>(pool, scratch, d, end - start, factors),
            _ => sums::<S, M, 1>(pool, scratch, d, end - start, factors),
        }
        d += taken * 16;
    }
}

/// Weighted sums of `count` tokens for `W` vectors of a value, from element `d` on.
#[inline(always)]
unsafe fn sums<S: Simd, const M: usize, const W: usize>(
    pool: &Pool,
    scratch: &mut Scratch,
    d: usize,
    count: usize,
    factors: &[(f32, f32); M],
) {
    if W > wide::<S, M>() {
        return;
    }
    let weights = scratch.scores.as_ptr();
    let mut acc = [[S::splat(0.0); M]; W];
    for t in 0..count {
        let mut value = [S::splat(0.0); W];
        for w in 0..W {
            value[w] = S::load(pool.values.cast::<f32>().add(scratch.rows[t] + d + w * 16));
        }
        for m in 0..M {
            let factor = S::splat(*weights.add(m * PITCH + t));
            for w in 0..W {
                acc[w][m] = S::fma(value[w], factor, acc[w][m]);
            }
        }
    }
    for w in 0..W {
        for m in 0..M {
            let (old, new) = factors[m];
            if (old, new) == (1.0, 0.0) {
                continue;
            }
            let to = scratch.acc.as_mut_ptr().add(m * WIDEST + d + w * 16);
            let fresh = S::mul(acc[w][m], S::splat(new));
            let sum = if old == 0.0 { fresh } else { S::fma(S::load(to), S::splat(old), fresh) };
            S::store(to, sum);
        }
    }
}

/// Write the key and value of one token of every head. `key` and `value` hold kv_heads * head_dim values.
/// The pool must hold the page, and no other thread may touch this token.
#[inline(always)]
pub(crate) unsafe fn write<S: Simd>(
    pool: &Pool,
    page: usize,
    offset: usize,
    key: *const f32,
    value: *const f32,
) {
    if pool.coded {
        return coded::write::<S>(pool, page, offset, key, value);
    }
    let (dim, size) = (pool.head_dim, pool.page_size);
    for head in 0..pool.kv_heads {
        let keys = pool.key_head(page, head).cast::<f32>().add(offset);
        for d in 0..dim {
            *keys.add(d * size) = *key.add(head * dim + d);
        }
        let values = pool.values.cast::<f32>().add(pool.value(page, head, offset));
        values.copy_from_nonoverlapping(value.add(head * dim), dim);
    }
}
