//! Matrix products of activation tiles with packed weights.
//!
//! A weight is cut into groups of 16 output rows; inside a group, every 4 (or 1, for floats) inputs of the 16
//! rows lie together. One output element is always summed in the order of its inputs: exact integer dot
//! products inside a block of 32 (16 for `Sixes`), blocks added in order in f32, then the row's spikes in
//! order. The number of activation rows in a tile changes registers, never order, so a row's bits do not
//! depend on its company.

use super::simd::Simd;

/// How a packed weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// 4-bit unsigned with f16 scale and minimum a block of 32.
    Nibbles,
    /// 8-bit, offset by 128, with an f16 scale a block of 32.
    Bytes,
    /// 6-bit in bytes, offset by 32, with an f16 scale a block of 16.
    Sixes,
    /// `Nibbles` as one pass over many rows unpacks them: a byte each, no offset.
    Spread,
    F32,
    F16,
    Bf16,
}

impl Kind {
    /// Whether activations must be quantised for it.
    pub(crate) fn is_integer(self) -> bool {
        matches!(self, Self::Nibbles | Self::Bytes | Self::Sixes | Self::Spread)
    }

    /// Bytes of 16 rows of `cols` inputs, scales left out.
    pub(crate) fn group_bytes(self, cols: usize) -> usize {
        match self {
            Self::Nibbles => cols * 8,
            Self::Bytes | Self::Sixes | Self::Spread => cols * 16,
            Self::F32 => cols * 64,
            Self::F16 | Self::Bf16 => cols * 32,
        }
    }

    /// Scales of 16 rows of `cols` inputs.
    pub(crate) fn group_scales(self, cols: usize) -> usize {
        match self {
            Self::Nibbles | Self::Bytes | Self::Spread => cols / 2,
            Self::Sixes => cols,
            _ => 0,
        }
    }
}

/// A packed weight as kernels see it. Pointers are valid for all groups.
#[derive(Clone, Copy)]
pub(crate) struct WeightView {
    pub(crate) kind: Kind,
    pub(crate) cols: usize,
    pub(crate) data: *const u8,
    pub(crate) scales: *const u16,
    pub(crate) mins: *const u16,
}

/// An activation too large for its block to be coded with it: it stands apart, as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spike {
    pub(crate) column: u32,
    pub(crate) value: f32,
}

/// Some activation rows, interleaved: 4 inputs of each row (1 for floats) lie side by side.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// 1..=Simd::TILE.
    pub(crate) rows: usize,
    /// [cols/4][rows][4]
    pub(crate) q: *const i8,
    /// [cols/32][rows] scale of a block, and scale times the sum of its integers
    pub(crate) scale: *const f32,
    pub(crate) sums: *const f32,
    /// [cols/32][rows] -128 times the sum of a block's integers
    pub(crate) wide: *const i32,
    /// [cols/16][rows] -32 times the sum of a half block's integers
    pub(crate) half: *const i32,
    /// [rows][cols/32] with the `counts[row]` spikes of a row first, by column
    pub(crate) spikes: *const Spike,
    /// [rows]
    pub(crate) counts: *const u32,
    /// [cols][rows]
    pub(crate) f: *const f32,
}

/// Where a product goes: row m, column n at `data[m * stride + n]`.
#[derive(Clone, Copy)]
pub(crate) struct Out {
    pub(crate) data: *mut f32,
    pub(crate) stride: usize,
    /// Add to what is there instead of replacing it.
    pub(crate) add: bool,
}

/// Output columns 16*first..16*last of `x` times `w`; `out.data` is where column 16*first goes.
#[inline(always)]
pub(crate) unsafe fn gemm<S: Simd>(w: &WeightView, first: usize, last: usize, x: &Tile, out: Out) {
    macro_rules! rows {
        ($($m:literal),*) => {
            match x.rows {
                $($m if $m <= S::TILE => columns::<S, $m>(w, first, last, x, out),)*
                _ => unreachable!("tiles hold at most Simd::TILE rows"),
            }
        };
    }
    rows!(1, 2, 3, 4, 5, 6);
}

#[inline(always)]
unsafe fn columns<S: Simd, const M: usize>(w: &WeightView, first: usize, last: usize, x: &Tile, out: Out) {
    let mut group = first;
    while group < last {
        let to = Out { data: out.data.add((group - first) * 16), ..out };
        // Two groups share each load of an activation; the order inside a sum is the same for one.
        if S::PAIRS && group + 2 <= last {
            groups::<S, M, 2>(w, group, x, to);
            group += 2;
        } else {
            groups::<S, M, 1>(w, group, x, to);
            group += 1;
        }
    }
}

#[inline(always)]
unsafe fn groups<S: Simd, const M: usize, const W: usize>(w: &WeightView, group: usize, x: &Tile, out: Out) {
    if W == 2 && !S::PAIRS {
        return;
    }
    let acc = match w.kind {
        Kind::Nibbles => nibbles::<S, M, W>(w, group, x),
        Kind::Bytes => bytes::<S, M, W, 128>(w, group, x),
        Kind::Sixes => bytes::<S, M, W, 32>(w, group, x),
        Kind::Spread => bytes::<S, M, W, 0>(w, group, x),
        Kind::F32 => floats::<S, M, W, 4>(w, group, x),
        Kind::F16 => floats::<S, M, W, 2>(w, group, x),
        Kind::Bf16 => floats::<S, M, W, 0>(w, group, x),
    };
    for g in 0..W {
        for m in 0..M {
            let at = out.data.add(m * out.stride + g * 16);
            let value = if out.add { S::add(S::load(at), acc[g][m]) } else { acc[g][m] };
            S::store(at, value);
        }
    }
}

/// How far ahead of use weights are asked for.
const AHEAD: usize = 2048;

#[inline(always)]
unsafe fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(p.cast());
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

#[inline(always)]
unsafe fn nibbles<S: Simd, const M: usize, const W: usize>(
    w: &WeightView,
    group: usize,
    x: &Tile,
) -> [[S::F; M]; W] {
    let blocks = w.cols / 32;
    let stride = Kind::Nibbles.group_bytes(w.cols);
    let mut data = w.data.add(group * stride);
    let mut at = group * blocks * 16;
    let mut q = x.q;
    let mut acc = [[S::splat(0.0); M]; W];
    for block in 0..blocks {
        let mut dots = [[S::splat_i(0); M]; W];
        for pair in 0..4 {
            let mut both = [S::bytes(data); W];
            let mut part = both;
            for g in 0..W {
                let from = data.add(g * stride + pair * 64);
                if M == 1 {
                    prefetch(from.wrapping_add(AHEAD));
                }
                both[g] = S::bytes(from);
                part[g] = S::low(both[g]);
            }
            for m in 0..M {
                let four = S::four(q.add((pair * 2 * M + m) * 4));
                for g in 0..W {
                    dots[g][m] = S::dot(dots[g][m], part[g], four);
                }
            }
            for g in 0..W {
                part[g] = S::high(both[g]);
            }
            for m in 0..M {
                let four = S::four(q.add(((pair * 2 + 1) * M + m) * 4));
                for g in 0..W {
                    dots[g][m] = S::dot(dots[g][m], part[g], four);
                }
            }
        }
        for g in 0..W {
            let scale = S::load_f16(w.scales.add(at + g * blocks * 16));
            let min = S::load_f16(w.mins.add(at + g * blocks * 16));
            for m in 0..M {
                let i = block * M + m;
                acc[g][m] = S::fma(S::to_f(dots[g][m]), S::mul(scale, S::splat(*x.scale.add(i))), acc[g][m]);
                acc[g][m] = S::fma(min, S::splat(*x.sums.add(i)), acc[g][m]);
            }
        }
        data = data.add(256);
        q = q.add(32 * M);
        at += 16;
    }
    spikes::<S, M, W, NIBBLES>(w, group, x, &mut acc);
    acc
}

/// Bytes: blocks of 16 offset by 32, or of 32 offset by 128, or of 32 with a minimum and no offset.
#[inline(always)]
unsafe fn bytes<S: Simd, const M: usize, const W: usize, const OFFSET: usize>(
    w: &WeightView,
    group: usize,
    x: &Tile,
) -> [[S::F; M]; W] {
    let (width, offsets) = if OFFSET == 32 { (16, x.half) } else { (32, x.wide) };
    let blocks = w.cols / width;
    let stride = w.cols * 16;
    let mut data = w.data.add(group * stride);
    let mut at = group * blocks * 16;
    let mut q = x.q;
    let mut acc = [[S::splat(0.0); M]; W];
    for block in 0..blocks {
        let mut dots = [[S::splat_i(0); M]; W];
        for m in 0..M {
            let offset = S::splat_i(if OFFSET == 0 { 0 } else { *offsets.add(block * M + m) });
            for g in 0..W {
                dots[g][m] = offset;
            }
        }
        for step in 0..width / 4 {
            let mut all = [S::bytes(data); W];
            for g in 0..W {
                let from = data.add(g * stride + step * 64);
                if M == 1 {
                    prefetch(from.wrapping_add(AHEAD));
                }
                all[g] = S::bytes(from);
            }
            for m in 0..M {
                let four = S::four(q.add((step * M + m) * 4));
                for g in 0..W {
                    dots[g][m] = S::dot(dots[g][m], all[g], four);
                }
            }
        }
        for g in 0..W {
            let scale = S::load_f16(w.scales.add(at + g * blocks * 16));
            let min = if OFFSET == 0 { S::load_f16(w.mins.add(at + g * blocks * 16)) } else { scale };
            for m in 0..M {
                let i = if OFFSET == 32 { block / 2 } else { block } * M + m;
                acc[g][m] = S::fma(S::to_f(dots[g][m]), S::mul(scale, S::splat(*x.scale.add(i))), acc[g][m]);
                if OFFSET == 0 {
                    acc[g][m] = S::fma(min, S::splat(*x.sums.add(i)), acc[g][m]);
                }
            }
        }
        data = data.add(width * 16);
        q = q.add(width * M);
        at += 16;
    }
    spikes::<S, M, W, OFFSET>(w, group, x, &mut acc);
    acc
}

/// Stands for `Kind::Nibbles` where the offsets of `bytes` tell the other integer kinds apart.
const NIBBLES: usize = 4;

/// Add what stands apart from the blocks, column by column.
#[inline(always)]
unsafe fn spikes<S: Simd, const M: usize, const W: usize, const OFFSET: usize>(
    w: &WeightView,
    group: usize,
    x: &Tile,
    acc: &mut [[S::F; M]; W],
) {
    for m in 0..M {
        let first = x.spikes.add(m * (w.cols / 32));
        for i in 0..*x.counts.add(m) as usize {
            let Spike { column: k, value } = *first.add(i);
            for g in 0..W {
                let weight = column::<S, OFFSET>(w, group + g, k as usize);
                acc[g][m] = S::fma(weight, S::splat(value), acc[g][m]);
            }
        }
    }
}

/// The 16 weights of a group at column `k`.
#[inline(always)]
unsafe fn column<S: Simd, const OFFSET: usize>(w: &WeightView, group: usize, k: usize) -> S::F {
    let width = if OFFSET == 32 { 16 } else { 32 };
    let at = (group * (w.cols / width) + k / width) * 16;
    let scale = S::load_f16(w.scales.add(at));
    let byte = k as u32 % 4 * 8;
    if OFFSET == NIBBLES {
        let line = S::bytes(w.data.add(group * w.cols * 8 + k / 8 * 64));
        let q = S::pick(line, byte + k as u32 / 4 % 2 * 4, 15);
        return S::fma(S::to_f(q), scale, S::load_f16(w.mins.add(at)));
    }
    let q = S::to_f(S::pick(S::bytes(w.data.add(group * w.cols * 16 + k / 4 * 64)), byte, 255));
    if OFFSET == 0 {
        return S::fma(q, scale, S::load_f16(w.mins.add(at)));
    }
    S::mul(S::sub(q, S::splat(OFFSET as f32)), scale)
}

/// `FORM` is 4 for f32, 2 for f16, 0 for bf16.
#[inline(always)]
unsafe fn floats<S: Simd, const M: usize, const W: usize, const FORM: usize>(
    w: &WeightView,
    group: usize,
    x: &Tile,
) -> [[S::F; M]; W] {
    let width = if FORM == 4 { 64 } else { 32 };
    let data = w.data.add(group * w.cols * width);
    let mut acc = [[S::splat(0.0); M]; W];
    for k in 0..w.cols {
        let mut value = [S::splat(0.0); W];
        for g in 0..W {
            let at = data.add((g * w.cols + k) * width);
            if M == 1 {
                prefetch(at.wrapping_add(AHEAD));
            }
            value[g] = match FORM {
                4 => S::load(at.cast()),
                2 => S::load_f16(at.cast()),
                _ => S::load_bf16(at.cast()),
            };
        }
        for m in 0..M {
            let factor = S::splat(*x.f.add(k * M + m));
            for g in 0..W {
                acc[g][m] = S::fma(value[g], factor, acc[g][m]);
            }
        }
    }
    acc
}

/// Unpack groups first..last of `Nibbles` to `out`, which then is the data of `Spread`.
#[inline(always)]
pub(crate) unsafe fn spread<S: Simd>(w: &WeightView, first: usize, last: usize, out: *mut u8) {
    let stride = Kind::Nibbles.group_bytes(w.cols);
    let (from, lines) = (w.data.add(first * stride), (last - first) * stride / 64);
    for line in 0..lines {
        let both = S::bytes(from.add(line * 64));
        S::store_bytes(out.add(line * 128), S::low(both));
        S::store_bytes(out.add(line * 128 + 64), S::high(both));
    }
}
