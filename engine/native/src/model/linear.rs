//! Products of activations with packed weights, shared among threads by output rows.

use super::acts::{ActsView, Form};
use super::weight::Packed;
use crate::kernels::attention::Scratch;
use crate::kernels::{Kernels, Kind, Out, Threads, WeightView};

/// Bytes of weights that one piece of work keeps in the first-level cache while activations pass by.
const PIECE_BYTES: usize = 24 * 1024;
/// Pieces a thread gets of a small product, so that an uneven pace evens out.
const PIECES: usize = 4;
/// Columns of the gated product that are made at a time; whole blocks of 32.
const GATE_COLUMNS: usize = 32;
const TALLEST: usize = 6;
/// Rows whose spikes one thread counts at least: fewer are not worth waking another for.
const SETTLE: usize = 64;
/// Tiles from which on it pays to unpack nibbles first, and inputs up to which they then stay in fast cache.
const SPREAD_TILES: usize = 4;
const SPREAD_COLUMNS: usize = 768;

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
    spread: Vec<u8>,
    gate: [f32; TALLEST * GATE_COLUMNS],
    up: [f32; TALLEST * GATE_COLUMNS],
}

impl Local {
    pub(crate) fn new() -> Self {
        Self {
            attend: Scratch::new(),
            spread: Vec::new(),
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

    /// Its weights, to be moved.
    pub(crate) fn parts_mut(&mut self) -> &mut [Packed] {
        &mut self.parts
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
    pub(crate) fn run(&self, hands: &mut Hands<'_>, x: ActsView, out: &mut [f32], add: bool) {
        let stride = self.width();
        assert!(out.len() >= x.rows * stride, "the output of a product must hold all its rows");
        let groups = stride / 16;
        let piece = self.piece(x.rows, hands.threads.threads());
        let out = Shared(out.as_mut_ptr());
        let kernels = hands.kernels;
        hands.run(groups.div_ceil(piece), &|index, local| {
            let (first, last) = (index * piece, (index * piece + piece).min(groups));
            let mut base = 0;
            for part in &self.parts {
                let (from, to) = (first.max(base), last.min(base + part.groups()));
                if from < to {
                    let (view, begin) =
                        ready(&kernels, part, from - base, to - base, x.tiles(), &mut local.spread);
                    for tile in 0..x.tiles() {
                        let data = out.at(x.span(tile).0 * stride + from * 16);
                        // SAFETY: weights and activations have the same number of columns; columns
                        // 16*from..16*to of the tile's rows are inside `out` and no other piece's.
                        unsafe {
                            let target = Out { data, stride, add };
                            (kernels.gemm)(&view, begin, begin + to - from, &x.tile(tile), target);
                        };
                    }
                }
                base += part.groups();
            }
        });
    }
}

/// The part's groups from..to as they are best read by `tiles` tiles, and the number of the first in that view.
/// The view lives as long as the part and an unchanged `buffer`.
fn ready(
    kernels: &Kernels,
    part: &Packed,
    from: usize,
    to: usize,
    tiles: usize,
    buffer: &mut Vec<u8>,
) -> (WeightView, usize) {
    let view = part.view();
    if part.kind != Kind::Nibbles || tiles < SPREAD_TILES || part.cols > SPREAD_COLUMNS {
        return (view, from);
    }
    let start = buffer.len();
    buffer.resize(start + (to - from) * Kind::Spread.group_bytes(part.cols), 0);
    let scales = from * Kind::Nibbles.group_scales(part.cols);
    // SAFETY: the buffer was made to hold the groups; scales and minima start at the first group's.
    unsafe {
        let data = buffer.as_mut_ptr().add(start);
        (kernels.spread)(&view, from, to, data);
        let (scales, mins) = (view.scales.add(scales), view.mins.add(scales));
        (WeightView { kind: Kind::Spread, data, scales, mins, ..view }, 0)
    }
}

/// What does the work: kernels, threads and each thread's own memory.
pub(crate) struct Hands<'a> {
    pub(crate) kernels: Kernels,
    pub(crate) threads: &'a mut Threads,
    pub(crate) locals: &'a mut [Local],
}

impl Hands<'_> {
    /// Call `piece(index, memory)` for each index below `count`; see `Threads::run`.
    fn run(&mut self, count: usize, piece: &(dyn Fn(usize, &mut Local) + Sync)) {
        assert!(self.locals.len() >= self.threads.threads(), "each thread needs its own memory");
        let locals = Shared(self.locals.as_mut_ptr());
        self.threads.run(count, &|index, thread| {
            // SAFETY: `thread` is unique among running pieces, so this memory is this piece's alone.
            let local = unsafe { &mut *locals.at(thread) };
            local.spread.clear();
            piece(index, local);
        });
    }
}

/// next = silu(x * gate) * (x * up), in the form that `next` has.
pub(crate) fn gated(hands: &mut Hands<'_>, (gate, up): (&Packed, &Packed), x: ActsView, next: ActsView) {
    assert!(
        gate.rows == up.rows && next.cols == gate.rows && next.rows == x.rows,
        "gate and up must have one shape"
    );
    let step = GATE_COLUMNS / 16;
    let groups = gate.groups();
    let kernels = hands.kernels;
    // A piece is one block of columns of all rows; of few rows, as many blocks as make a fair share.
    let blocks = groups.div_ceil(step);
    let share = blocks.div_ceil(hands.threads.threads() * PIECES).max(1);
    let piece = if x.rows <= TALLEST { share } else { 1 };
    hands.run(blocks.div_ceil(piece), &|index, local| {
        for block in index * piece..((index + 1) * piece).min(blocks) {
            let (first, last) = (block * step, (block * step + step).min(groups));
            let count = (gate.rows - first * 16).min(GATE_COLUMNS);
            local.spread.clear();
            // Room for both at once: growing would move what the first view reads.
            local.spread.reserve(2 * step * Kind::Spread.group_bytes(gate.cols));
            let (one, at) = ready(&kernels, gate, first, last, x.tiles(), &mut local.spread);
            let (two, from) = ready(&kernels, up, first, last, x.tiles(), &mut local.spread);
            let into = |data: *mut f32| Out { data, stride: GATE_COLUMNS, add: false };
            let (g, u) = (local.gate.as_mut_ptr(), local.up.as_mut_ptr());
            for tile in 0..x.tiles() {
                let (acts, to) = (x.tile(tile), next.tile(tile));
                // SAFETY: both buffers hold TALLEST rows of GATE_COLUMNS, no tile is taller, `next` has
                // the same tiles as `x`, and columns first*16.. of them are no other piece's.
                unsafe {
                    (kernels.gemm)(&one, at, at + last - first, &acts, into(g));
                    (kernels.gemm)(&two, from, from + last - first, &acts, into(u));
                    (kernels.gate)(g, u, acts.rows * GATE_COLUMNS, g);
                    for row in 0..acts.rows {
                        next.put(&kernels, &to, row, first * 16, g.add(row * GATE_COLUMNS), count);
                    }
                }
            }
        }
    });
    // A row's blocks came from many pieces: its spikes are counted when all are there.
    let share = next.rows.div_ceil(hands.threads.threads()).max(SETTLE);
    hands.threads.run(next.rows.div_ceil(share), &|index, _| {
        for row in index * share..((index + 1) * share).min(next.rows) {
            // SAFETY: all values were put above, and the row is this piece's alone.
            unsafe { next.settle(row) };
        }
    });
}
