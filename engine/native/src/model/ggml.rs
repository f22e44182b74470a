//! Tensor formats of GGUF files and of safetensors: sizes, codes of one block, values of one row.
//!
//! Knows bytes, not models. Follows the layouts that ggml documents in its block structures.

use crate::kernels::half::{from_bf16, from_f16, to_f16};

/// A stored element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4K,
    Q6K,
}

impl Format {
    /// The format of a name as GGUF spells it.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "Q4_0" => Self::Q4_0,
            "Q4_1" => Self::Q4_1,
            "Q8_0" => Self::Q8_0,
            "Q4_K" => Self::Q4K,
            "Q6_K" => Self::Q6K,
            _ => return None,
        })
    }

    /// Values and bytes of a block.
    pub(crate) fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q6K => (256, 210),
        }
    }

    /// Bytes of a row of `cols` values; None if they do not fill blocks.
    pub(crate) fn row_bytes(self, cols: usize) -> Option<usize> {
        let (values, bytes) = self.block();
        cols.is_multiple_of(values).then_some(cols / values * bytes)
    }
}

/// The integers of 32 values: value = scale * (q - offset) + min, the offset being the packed kind's.
#[derive(Clone, Copy)]
pub(crate) struct Code {
    pub(crate) q: [u8; 32],
    /// f16 bits; the second applies to the upper half where scales cover 16 values, else it equals the first.
    pub(crate) scales: [u16; 2],
    /// f16 bits; 0 where the kind has none.
    pub(crate) min: u16,
}

fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Nibbles of 16 bytes: low ones first, as Q4_0 and Q4_1 order them.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    let mut q = [0; 32];
    for (i, byte) in bytes[..16].iter().enumerate() {
        q[i] = byte & 15;
        q[i + 16] = byte >> 4;
    }
    q
}

/// Scale and minimum number `i` (0..8) of a Q4_K block, 6 bits each.
fn scale_min(packed: &[u8], i: usize) -> (u8, u8) {
    if i < 4 {
        return (packed[i] & 63, packed[i + 4] & 63);
    }
    ((packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4), (packed[i + 4] >> 4) | (packed[i] >> 6 << 4))
}

/// The `i`-th 32 nibbles of a Q4_K block.
fn nibbles_k(block: &[u8], i: usize) -> [u8; 32] {
    let mut q = [0; 32];
    for (to, byte) in q.iter_mut().zip(&block[16 + i / 2 * 32..]) {
        *to = if i.is_multiple_of(2) { byte & 15 } else { byte >> 4 };
    }
    q
}

/// The `i`-th 32 six-bit values of a Q6_K block.
fn sixes(block: &[u8], i: usize) -> [u8; 32] {
    let (part, quarter) = (i / 4, i % 4);
    let low = &block[part * 64 + quarter % 2 * 32..];
    let high = &block[128 + part * 32..];
    let mut q = [0; 32];
    for l in 0..32 {
        let nibble = if quarter < 2 { low[l] & 15 } else { low[l] >> 4 };
        q[l] = nibble | ((high[l] >> (2 * quarter)) & 3) << 4;
    }
    q
}

/// Code of the `index`-th 32 values of a quantised row. Scales of K formats are products, rounded to f16.
pub(crate) fn code(format: Format, row: &[u8], index: usize) -> Code {
    let (values, bytes) = format.block();
    let at = index * 32 / values * bytes;
    let block = &row[at..at + bytes];
    let inner = index * 32 % values / 32;
    match format {
        Format::Q4_0 => {
            let scale = half_at(block, 0);
            let min = to_f16(-8.0 * from_f16(scale));
            Code { q: nibbles(&block[2..]), scales: [scale; 2], min }
        }
        Format::Q4_1 => {
            Code { q: nibbles(&block[4..]), scales: [half_at(block, 0); 2], min: half_at(block, 2) }
        }
        Format::Q8_0 => {
            let mut q = [0; 32];
            for (to, byte) in q.iter_mut().zip(&block[2..]) {
                *to = byte.wrapping_add(128);
            }
            Code { q, scales: [half_at(block, 0); 2], min: 0 }
        }
        Format::Q4K => {
            let (scale, min) = scale_min(&block[4..16], inner);
            let scale = to_f16(from_f16(half_at(block, 0)) * f32::from(scale));
            let min = to_f16(-(from_f16(half_at(block, 2)) * f32::from(min)));
            Code { q: nibbles_k(block, inner), scales: [scale; 2], min }
        }
        Format::Q6K => {
            let d = from_f16(half_at(block, 208));
            let at = 192 + inner * 2;
            let scale = |i: usize| to_f16(d * f32::from(block[at + i] as i8));
            Code { q: sixes(block, inner), scales: [scale(0), scale(1)], min: 0 }
        }
        Format::F32 | Format::F16 | Format::Bf16 => Code { q: [0; 32], scales: [0; 2], min: 0 },
    }
}

/// The values of a row, exactly as the format defines them.
pub(crate) fn values(format: Format, row: &[u8], out: &mut [f32]) {
    match format {
        Format::F32 => {
            for (to, bytes) in out.iter_mut().zip(row.chunks_exact(4)) {
                *to = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        Format::F16 => {
            out.iter_mut().zip(row.chunks_exact(2)).for_each(|(to, b)| *to = from_f16(half_at(b, 0)))
        }
        Format::Bf16 => {
            out.iter_mut().zip(row.chunks_exact(2)).for_each(|(to, b)| *to = from_bf16(half_at(b, 0)))
        }
        _ => out.chunks_exact_mut(32).enumerate().for_each(|(i, to)| block_values(format, row, i, to)),
    }
}

fn block_values(format: Format, row: &[u8], index: usize, out: &mut [f32]) {
    let (values, bytes) = format.block();
    let at = index * 32 / values * bytes;
    let block = &row[at..at + bytes];
    let inner = index * 32 % values / 32;
    let q = code(format, row, index).q;
    match format {
        Format::Q4K => {
            let (scale, min) = scale_min(&block[4..16], inner);
            let scale = from_f16(half_at(block, 0)) * f32::from(scale);
            let min = from_f16(half_at(block, 2)) * f32::from(min);
            out.iter_mut().zip(q).for_each(|(to, q)| *to = scale * f32::from(q) - min);
        }
        Format::Q6K => {
            let d = from_f16(half_at(block, 208));
            for (i, (to, q)) in out.iter_mut().zip(q).enumerate() {
                *to = d * f32::from(block[192 + inner * 2 + i / 16] as i8) * (f32::from(q) - 32.0);
            }
        }
        _ => {
            let scale = from_f16(half_at(block, 0));
            let (offset, min) = match format {
                Format::Q4_0 => (8.0, 0.0),
                Format::Q8_0 => (128.0, 0.0),
                _ => (0.0, from_f16(half_at(block, 2))),
            };
            out.iter_mut().zip(q).for_each(|(to, q)| *to = scale * (f32::from(q) - offset) + min);
        }
    }
}
