//! Packed weights: built once from stored tensors, then only read.

use super::ggml::{self, Code, Format};
use crate::kernels::half::{from_bf16, from_f16, to_bf16, to_f16};
use std::sync::Arc;

use crate::kernels::{Kind, Region, WeightView};

/// A tensor as stored: `rows` rows of `cols` values.
#[derive(Clone, Copy)]
pub(crate) struct Stored<'a> {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) bytes: &'a [u8],
    /// Heads whose rows a converter has interleaved for pairwise rotation; 0 if rows are in order.
    pub(crate) interleaved_heads: usize,
}

/// What weights are held in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightType {
    /// As stored.
    Stored,
    /// 8-bit blocks of 32.
    Int8,
    Bf16,
    F32,
}

impl WeightType {
    /// Every type with its name as an option's value.
    pub(crate) const ALL: [(&'static str, Self); 4] =
        [("auto", Self::Stored), ("int8", Self::Int8), ("bf16", Self::Bf16), ("f32", Self::F32)];
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Where the groups of a weight are.
enum Data {
    /// While rows are put in.
    Own(Vec<Line>),
    /// Place and length in a region that all weights of a model share.
    Placed(Arc<Region>, usize, usize),
}

/// A weight in groups of 16 rows; see `kernels::gemm` for the layout. Rows are padded with zeros.
pub(crate) struct Packed {
    pub(crate) kind: Kind,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    data: Data,
    scales: Vec<u16>,
    mins: Vec<u16>,
}

impl<'a> Stored<'a> {
    /// Bytes of the row that stands at `row` once heads are in order.
    fn row(&self, row: usize) -> &'a [u8] {
        let row = match self.rows.checked_div(self.interleaved_heads) {
            None => row,
            Some(dim) => {
                let (head, inner) = (row / dim, row % dim);
                head * dim + inner % (dim / 2) * 2 + inner / (dim / 2)
            }
        };
        let width = self.bytes.len() / self.rows;
        &self.bytes[row * width..(row + 1) * width]
    }

    /// All values of one row.
    pub(crate) fn values(&self, row: usize, out: &mut [f32]) {
        ggml::values(self.format, self.row(row), out);
    }
}

fn kind_of(stored: &Stored<'_>, wanted: WeightType) -> Kind {
    match (wanted, stored.format) {
        (WeightType::Int8, Format::Q8_0) => Kind::Bytes,
        (WeightType::Int8, _) if stored.cols.is_multiple_of(32) => Kind::Bytes,
        (WeightType::Bf16, _) => Kind::Bf16,
        (WeightType::F32, _) => Kind::F32,
        (_, Format::Q4_0 | Format::Q4_1 | Format::Q4K) => Kind::Nibbles,
        (_, Format::Q8_0) => Kind::Bytes,
        (_, Format::Q6K) => Kind::Sixes,
        (_, Format::F32) => Kind::F32,
        (_, Format::F16) => Kind::F16,
        (_, Format::Bf16) => Kind::Bf16,
    }
}

/// Eight-bit code of 32 values.
fn requantise(values: &[f32]) -> Code {
    let top = values.iter().fold(0.0f32, |top, value| top.max(value.abs()));
    let scale = to_f16(top / 127.0);
    let step = from_f16(scale);
    let mut q = [128; 32];
    if step > 0.0 {
        for (to, value) in q.iter_mut().zip(values) {
            *to = ((value / step).round_ties_even().clamp(-127.0, 127.0) as i32 + 128) as u8;
        }
    }
    Code { q, scales: [scale; 2], min: 0 }
}

impl Packed {
    /// An empty weight of the right size; `fill` puts rows in.
    pub(crate) fn new(stored: &Stored<'_>, wanted: WeightType) -> Self {
        let kind = kind_of(stored, wanted);
        let groups = stored.rows.div_ceil(16);
        let scales = groups * kind.group_scales(stored.cols);
        let mins = if kind == Kind::Nibbles { scales } else { 0 };
        Self {
            kind,
            rows: stored.rows,
            cols: stored.cols,
            data: Data::Own(vec![Line([0; 64]); (groups * kind.group_bytes(stored.cols)).div_ceil(64)]),
            scales: vec![0; scales],
            mins: vec![0; mins],
        }
    }

    /// Pack a whole tensor.
    pub(crate) fn pack(stored: &Stored<'_>, wanted: WeightType) -> Self {
        let mut packed = Self::new(stored, wanted);
        let mut values = vec![0.0; stored.cols];
        for row in 0..stored.rows {
            packed.fill(stored, row, wanted, &mut values);
        }
        packed
    }

    fn fill(&mut self, stored: &Stored<'_>, row: usize, wanted: WeightType, values: &mut [f32]) {
        let native =
            wanted == WeightType::Stored || (wanted == WeightType::Int8 && stored.format == Format::Q8_0);
        if !(native && self.kind.is_integer()) {
            stored.values(row, values);
        }
        if !self.kind.is_integer() {
            return self.fill_floats(row, values);
        }
        let bytes = stored.row(row);
        for block in 0..self.cols / 32 {
            let code = if native {
                ggml::code(stored.format, bytes, block)
            } else {
                requantise(&values[block * 32..][..32])
            };
            self.fill_code(row, block, &code);
        }
    }

    fn fill_floats(&mut self, row: usize, values: &[f32]) {
        let (group, lane, kind, cols) = (row / 16, row % 16, self.kind, self.cols);
        let width = kind.group_bytes(1) / 16;
        for (k, &value) in values.iter().enumerate() {
            let bits = match kind {
                Kind::F32 => value.to_bits(),
                Kind::F16 => u32::from(to_f16(value)),
                _ => u32::from(to_bf16(value)),
            };
            self.write(((group * cols + k) * 16 + lane) * width, &bits.to_le_bytes()[..width]);
        }
    }

    fn fill_code(&mut self, row: usize, block: usize, code: &Code) {
        let (group, lane) = (row / 16, row % 16);
        let start = group * self.kind.group_bytes(self.cols);
        if self.kind == Kind::Nibbles {
            for pair in 0..4 {
                let (low, high) = code.q[pair * 8..][..8].split_at(4);
                let both = [0, 1, 2, 3].map(|j: usize| low[j] | high[j] << 4);
                self.write(start + block * 256 + pair * 64 + lane * 4, &both);
            }
            self.mins[(group * (self.cols / 32) + block) * 16 + lane] = code.min;
        } else {
            for (step, four) in code.q.chunks_exact(4).enumerate() {
                self.write(start + block * 512 + step * 64 + lane * 4, four);
            }
        }
        if self.kind == Kind::Sixes {
            for (i, scale) in code.scales.iter().enumerate() {
                self.scales[(group * (self.cols / 16) + block * 2 + i) * 16 + lane] = *scale;
            }
        } else {
            self.scales[(group * (self.cols / 32) + block) * 16 + lane] = code.scales[0];
        }
    }

    /// Put bytes that do not cross a line of 64.
    fn write(&mut self, at: usize, bytes: &[u8]) {
        if let Data::Own(lines) = &mut self.data {
            lines[at / 64].0[at % 64..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    fn get(&self, at: usize) -> u8 {
        self.bytes_of_groups()[at]
    }

    pub(crate) fn bytes_of_groups(&self) -> &[u8] {
        match &self.data {
            // SAFETY: lines are arrays of bytes without padding.
            Data::Own(lines) => unsafe {
                std::slice::from_raw_parts(lines.as_ptr().cast(), lines.len() * 64)
            },
            Data::Placed(region, at, length) => region.get(*at, *length),
        }
    }

    /// Bytes that a region needs for this weight.
    pub(crate) fn room(&self) -> usize {
        self.bytes_of_groups().len().next_multiple_of(64)
    }

    /// Move the groups to a region being filled, so that no two copies of a model exist; place and length, for
    /// `settle`, before which the weight is empty.
    pub(crate) fn move_to(&mut self, region: &mut Region) -> Option<(usize, usize)> {
        let (at, length) = (region.push(self.bytes_of_groups())?, self.bytes_of_groups().len());
        self.data = Data::Own(Vec::new());
        Some((at, length))
    }

    /// Read the groups from the region they were moved to.
    pub(crate) fn settle(&mut self, region: &Arc<Region>, (at, length): (usize, usize)) {
        self.data = Data::Placed(Arc::clone(region), at, length);
    }

    /// Groups of 16 rows.
    pub(crate) fn groups(&self) -> usize {
        self.rows.div_ceil(16)
    }

    /// What kernels read; valid as long as `self`.
    pub(crate) fn view(&self) -> WeightView {
        WeightView {
            kind: self.kind,
            cols: self.cols,
            data: self.bytes_of_groups().as_ptr(),
            scales: self.scales.as_ptr(),
            mins: self.mins.as_ptr(),
        }
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes_of_groups().len() + (self.scales.len() + self.mins.len()) * 2
    }

    /// The values of one row, as products see them.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let (group, lane) = (row / 16, row % 16);
        let start = group * self.kind.group_bytes(self.cols);
        for (k, to) in out.iter_mut().enumerate() {
            let float = (group * self.cols + k) * 16 + lane;
            let scale =
                |width: usize| from_f16(self.scales[(group * (self.cols / width) + k / width) * 16 + lane]);
            *to = match self.kind {
                Kind::Nibbles => {
                    let byte = self.get(start + k / 8 * 64 + lane * 4 + k % 4);
                    let q = if k / 4 % 2 == 0 { byte & 15 } else { byte >> 4 };
                    let min = from_f16(self.mins[(group * (self.cols / 32) + k / 32) * 16 + lane]);
                    scale(32) * f32::from(q) + min
                }
                // Never packed: products unpack nibbles to it for a while.
                Kind::Spread => f32::NAN,
                Kind::Bytes => {
                    scale(32) * (f32::from(self.get(start + k / 4 * 64 + lane * 4 + k % 4)) - 128.0)
                }
                Kind::Sixes => {
                    scale(16) * (f32::from(self.get(start + k / 4 * 64 + lane * 4 + k % 4)) - 32.0)
                }
                Kind::F32 => f32::from_bits(self.bits(float * 4, 4)),
                Kind::F16 => from_f16(self.bits(float * 2, 2) as u16),
                Kind::Bf16 => from_bf16(self.bits(float * 2, 2) as u16),
            };
        }
    }

    fn bits(&self, at: usize, width: usize) -> u32 {
        (0..width).fold(0, |bits, i| bits | u32::from(self.get(at + i)) << (8 * i))
    }
}
