//! Products of activations with packed weights, shared among threads by output rows.

use super::acts::{ActsView, Form};
use super::weight::Packed;
use crate::kernels::attention::Scratch;
use crate::kernels::{Kernels, Out, Threads};

/// Bytes of weights that one piece of work keeps in the first-level cache while activations pass by.
const PIECE_BYTES: usize = 24 * 1024;
/// Pieces a thread gets of a small product, so that an uneven pace evens out.
const PIECES: usize = 4;
/// Columns of the gated product that are made at a time; whole blocks of 32.
const GATE_COLUMNS: usize = 32;
const TALLEST: usize = 6;

/// An address that threads may share; each writes only what is its own.
pub(crate) struct Shared<T>(pub(crate) *mut T);

// SAFETY: it is an address; every use states why its writes are disjoint.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The address `count` elements on.
    pub(crate) fn at(&self, count: usize) -> *mut T {
        self.0.wrapping_add(count)
    }
}

/// Working memory of one thread.
pub(crate) struct Local {
    pub(crate) attend: Box<Scratch>,
    gate: [f32; TALLEST * GATE_COLUMNS],
    up: [f32; TALLEST * GATE_COLUMNS],
}

impl Local {
    pub(crate) fn new() -> Self {
        Self {
            attend: Scratch::new(),
            gate: [0.0; TALLEST * GATE_COLUMNS],
            up: [0.0; TALLEST * GATE_COLUMNS],
        }
    }
}

/// Weights that read the same activations; their outputs stand side by side, each padded to 16 columns.
pub(crate) struct Linear {
    parts: Vec<Packed>,
}

impl Linear {
    pub(crate) fn new(parts: Vec<Packed>) -> Self {
        Self { parts }
    }

    /// What its activations must look like.
    pub(crate) fn form(&self) -> Form {
        Form {
            integer: self.parts.iter().any(|part| part.kind.is_integer()),
            float: self.parts.iter().any(|part| !part.kind.is_integer()),
        }
    }

    /// Columns of the output, padding included.
    pub(crate) fn width(&self) -> usize {
        self.parts.iter().map(|part| part.groups() * 16).sum()
    }

    /// First output column of a part.
    pub(crate) fn offset(&self, part: usize) -> usize {
        self.parts[..part].iter().map(|part| part.groups() * 16).sum()
    }

    /// Its weights.
    pub(crate) fn parts(&self) -> &[Packed] {
        &self.parts
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.parts.iter().map(Packed::bytes).sum()
    }

    /// Groups of 16 columns that make one piece of work.
    fn piece(&self, rows: usize, threads: usize) -> usize {
        let groups = self.width() / 16;
        let share = groups.div_ceil(threads * PIECES).next_multiple_of(2);
        if rows <= TALLEST {
            return share;
        }
        let heaviest = self.parts.iter().map(|part| part.kind.group_bytes(part.cols)).max().unwrap_or(1);
        share.min((PIECE_BYTES / heaviest / 2 * 2).max(2))
    }

    /// out[row][column] = x * weights, or added to it. `out` has `x.rows` rows of `width()` columns.
    pub(crate) fn run(
        &self,
        kernels: &Kernels,
        threads: &mut Threads,
        x: ActsView,
        out: &mut [f32],
        add: bool,
    ) {
        let stride = self.width();
        assert!(out.len() >= x.rows * stride, "the output of a product must hold all its rows");
        let groups = stride / 16;
        let piece = self.piece(x.rows, threads.threads());
        let out = Shared(out.as_mut_ptr());
        threads.run(groups.div_ceil(piece), &|index, _| {
            let (first, last) = (index * piece, (index * piece + piece).min(groups));
            for tile in 0..x.tiles() {
                let start = x.span(tile).0;
                let acts = x.tile(tile);
                let mut base = 0;
                for part in &self.parts {
                    let (from, to) = (first.max(base), last.min(base + part.groups()));
                    if from < to {
                        let target = Out { data: out.at(start * stride + from * 16), stride, add };
                        // SAFETY: weights and activations have the same number of columns; columns
                        // 16*from..16*to of the tile's rows are inside `out` and no other piece's.
                        unsafe { (kernels.gemm)(&part.view(), from - base, to - base, &acts, target) };
                    }
                    base += part.groups();
                }
            }
        });
    }
}

/// next = silu(x * gate) * (x * up), in the form that `next` has.
pub(crate) fn gated(
    kernels: &Kernels,
    threads: &mut Threads,
    (gate, up): (&Packed, &Packed),
    x: ActsView,
    next: ActsView,
    locals: &mut [Local],
) {
    assert!(
        gate.rows == up.rows && next.cols == gate.rows && next.rows == x.rows,
        "gate and up must have one shape"
    );
    assert!(locals.len() >= threads.threads(), "each thread needs its own memory");
    let step = GATE_COLUMNS / 16;
    let groups = gate.groups();
    let blocks = groups.div_ceil(step);
    let share = blocks.div_ceil(threads.threads() * PIECES).max(1);
    let weight = 2 * step * gate.kind.group_bytes(gate.cols);
    let piece = if x.rows <= TALLEST { share } else { share.min((PIECE_BYTES / weight).max(1)) };
    let locals = Shared(locals.as_mut_ptr());
    threads.run(blocks.div_ceil(piece), &|index, thread| {
        // SAFETY: `thread` is unique among running pieces, so this memory is this piece's alone.
        let local = unsafe { &mut *locals.at(thread) };
        for tile in 0..x.tiles() {
            let (acts, to) = (x.tile(tile), next.tile(tile));
            for block in index * piece..((index + 1) * piece).min(blocks) {
                let (first, last) = (block * step, (block * step + step).min(groups));
                let count = (gate.rows - first * 16).min(GATE_COLUMNS);
                let into = |data: *mut f32| Out { data, stride: GATE_COLUMNS, add: false };
                // SAFETY: both buffers hold TALLEST rows of GATE_COLUMNS, no tile is taller, `next` has
                // the same tiles as `x`, and columns first*16.. of them are no other piece's.
                unsafe {
                    (kernels.gemm)(&gate.view(), first, last, &acts, into(local.gate.as_mut_ptr()));
                    (kernels.gemm)(&up.view(), first, last, &acts, into(local.up.as_mut_ptr()));
                    let (g, u) = (local.gate.as_mut_ptr(), local.up.as_ptr());
                    (kernels.gate)(g, u, acts.rows * GATE_COLUMNS, g);
                    for row in 0..acts.rows {
                        next.put(kernels, &to, row, first * 16, g.add(row * GATE_COLUMNS), count);
                    }
                }
            }
        }
    });
}
