//! The forward pass: embeddings to logits, over any mix of prefill and decode rows.
//!
//! Each row's numbers depend on its own sequence only: all kernels sum in an order fixed by shapes and
//! positions, and threads split outputs, never sums.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::acts::{Acts, ActsView};
use super::batch::Batch;
use super::host::HostPages;
use super::kv::Cache;
use super::linear::{Hands, Linear, Local, Shared, gated};
use super::profile::{Op, Profile};
use super::spec::Spec;
use super::weight::Packed;
use crate::kernels::attention::{Attend, Pool, Query};
use crate::kernels::{Kernels, Threads};

/// Values below which a loop over rows is not worth sharing.
const SHARE: usize = 32 * 1024;

/// One layer's weights.
pub(crate) struct Layer {
    pub(crate) attention_norm: Vec<f32>,
    pub(crate) qkv: Linear,
    /// Of all columns of `qkv`, padding included; empty if there are none.
    pub(crate) qkv_bias: Vec<f32>,
    /// Norms of a query head and of a key head; empty if there are none.
    pub(crate) head_norms: (Vec<f32>, Vec<f32>),
    pub(crate) output: Linear,
    pub(crate) output_bias: Vec<f32>,
    pub(crate) mlp_norm: Vec<f32>,
    pub(crate) gate: Packed,
    pub(crate) up: Packed,
    pub(crate) down: Linear,
}

/// A loaded model with its cache, threads and working memory.
pub(crate) struct Model {
    pub(crate) spec: Spec,
    pub(crate) kernels: Kernels,
    pub(crate) threads: Threads,
    pub(crate) cache: Cache,
    pub(crate) host: HostPages,
    pub(crate) embedding: Linear,
    pub(crate) layers: Vec<Layer>,
    pub(crate) norm: Vec<f32>,
    /// None if the embedding is the head.
    pub(crate) head: Option<Linear>,
    pub(crate) frequencies: Vec<f32>,
    pub(crate) work: Work,
    pub(crate) profile: Profile,
}

/// Buffers of a step; they grow to the largest step seen.
#[derive(Default)]
pub(crate) struct Work {
    acts: Acts,
    gated: Acts,
    x: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    angles: Vec<f32>,
    logits: Vec<f32>,
    rows: usize,
    units: Vec<Unit>,
    queries: Vec<Query>,
    locals: Vec<Local>,
}

// SAFETY: `queries` holds addresses into `qkv` and `attended` only while `forward` runs.
unsafe impl Send for Work {}
// SAFETY: as above; nothing is written through a shared reference.
unsafe impl Sync for Work {}

/// Some queries of one sequence and key head.
#[derive(Clone, Copy)]
struct Unit {
    sequence: usize,
    head: usize,
    first: usize,
    count: usize,
}

fn room(buffer: &mut Vec<f32>, needed: usize) {
    if buffer.len() < needed {
        buffer.resize(needed, 0.0);
    }
}

/// Run `row` for every row, shared among threads if there is enough to do.
fn each_row(threads: &mut Threads, rows: usize, width: usize, row: &(dyn Fn(usize) + Sync)) {
    if rows * width < SHARE {
        (0..rows).for_each(row);
        return;
    }
    let piece = rows.div_ceil(threads.threads() * 4);
    threads.run(rows.div_ceil(piece), &|index, _| {
        (index * piece..(index * piece + piece).min(rows)).for_each(row)
    });
}

impl Model {
    /// Compute the step: keys and values are written, and logits of the wanted rows kept until the next call.
    pub(crate) fn forward(&mut self, batch: &Batch<'_>) -> Result<(), String> {
        batch.check(&self.spec, self.cache.pages(), self.cache.page_size())?;
        let rows = batch.tokens.len();
        if rows == 0 {
            self.work.rows = 0;
            return Ok(());
        }
        while self.work.locals.len() < self.threads.threads() {
            self.work.locals.push(Local::new());
        }
        self.profile.begin();
        self.embed(batch);
        self.turn(batch);
        self.plan(batch);
        self.profile.lap(Op::Begin);
        for layer in 0..self.layers.len() {
            self.attention(layer, batch);
            self.mlp(layer, rows);
        }
        self.logits(batch);
        Ok(())
    }

    /// Logits of the last step: rows and columns. Columns beyond the vocabulary are cut off.
    pub(crate) fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        let width = self.head().width();
        self.work.logits[..self.work.rows * width].chunks_exact(width).map(|row| &row[..self.spec.vocab])
    }

    /// Logits rows of the last step beside what works on them.
    pub(crate) fn split(&mut self) -> (Vec<&[f32]>, Kernels, &mut Threads) {
        let width = self.head().width();
        let vocab = self.spec.vocab;
        let rows =
            self.work.logits[..self.work.rows * width].chunks_exact(width).map(|row| &row[..vocab]).collect();
        (rows, self.kernels, &mut self.threads)
    }

    /// Bytes of packed matrices.
    pub(crate) fn weight_bytes(&self) -> usize {
        matrices(&self.layers, &self.embedding, self.head.as_ref()).map(Packed::bytes).sum()
    }

    /// Read every packed matrix `rounds` times with all threads and compute nothing: what memory can do.
    /// Returns the bytes of a round, seconds of the fastest, and a sum that keeps the reading from being left out.
    pub(crate) fn sweep(&mut self, rounds: usize) -> (usize, f64, u64) {
        const PIECE: usize = 64 * 1024;
        let Self { layers, embedding, head, threads, .. } = self;
        let pieces: Vec<&[u8]> = matrices(layers, embedding, head.as_ref())
            .flat_map(|packed| packed.bytes_of_groups().chunks(PIECE))
            .collect();
        let total = AtomicU64::new(0);
        let run = |index: usize, _: usize| {
            let mut sum = [0u64; 8];
            for line in pieces[index].chunks_exact(64) {
                for (to, word) in sum.iter_mut().zip(line.chunks_exact(8)) {
                    *to = to.wrapping_add(word.try_into().map_or(0, u64::from_ne_bytes));
                }
            }
            total.fetch_add(sum.iter().fold(0, |a, b| a ^ b), Ordering::Relaxed);
        };
        let mut best = f64::INFINITY;
        for _ in 0..rounds {
            let start = Instant::now();
            threads.run(pieces.len(), &run);
            best = best.min(start.elapsed().as_secs_f64());
        }
        (pieces.iter().map(|piece| piece.len()).sum(), best, total.into_inner())
    }

    fn head(&self) -> &Linear {
        self.head.as_ref().unwrap_or(&self.embedding)
    }

    fn hidden_pitch(&self) -> usize {
        self.spec.hidden.next_multiple_of(16)
    }

    fn embed(&mut self, batch: &Batch<'_>) {
        let (pitch, hidden) = (self.hidden_pitch(), self.spec.hidden);
        let rows = batch.tokens.len();
        room(&mut self.work.x, rows * pitch);
        let x = Shared(self.work.x.as_mut_ptr());
        let table = &self.embedding.parts()[0];
        each_row(&mut self.threads, rows, hidden * 8, &|row| {
            // SAFETY: `x` holds `rows` rows of `pitch` values; each row is one call's alone.
            let to = unsafe { std::slice::from_raw_parts_mut(x.at(row * pitch), pitch) };
            table.row(batch.tokens[row] as usize, &mut to[..hidden]);
            to[hidden..].fill(0.0);
        });
    }

    /// Cosines and sines of every row's position, as the reference computes them: f32 angle, then its cosine.
    fn turn(&mut self, batch: &Batch<'_>) {
        let half = self.frequencies.len();
        room(&mut self.work.angles, batch.tokens.len() * half * 2);
        for (to, &position) in self.work.angles.chunks_exact_mut(half * 2).zip(batch.positions) {
            let (cos, sin) = to.split_at_mut(half);
            for (i, frequency) in self.frequencies.iter().enumerate() {
                let angle = f64::from(position as f32 * frequency);
                (sin[i], cos[i]) = (angle.sin() as f32, angle.cos() as f32);
            }
        }
    }

    /// Cut the step's queries into units of work for attention; the same for every layer.
    fn plan(&mut self, batch: &Batch<'_>) {
        let spec = &self.spec;
        let group = spec.heads / spec.kv_heads;
        let (width, out) =
            (self.layers.first().map_or(0, |layer| layer.qkv.width()), spec.heads * spec.head_dim);
        let rows = batch.tokens.len();
        let work = &mut self.work;
        room(&mut work.qkv, rows * width);
        room(&mut work.attended, rows * out);
        work.units.clear();
        work.queries.clear();
        let mut start = 0;
        for (sequence, &length) in batch.query_lens.iter().enumerate() {
            let end = start + length as usize;
            for head in 0..spec.kv_heads {
                let first = work.queries.len();
                for row in start..end {
                    for query in head * group..(head + 1) * group {
                        work.queries.push(Query {
                            data: work.qkv.as_ptr().wrapping_add(row * width + query * spec.head_dim),
                            out: work.attended.as_mut_ptr().wrapping_add(row * out + query * spec.head_dim),
                            position: batch.positions[row] as usize,
                        });
                    }
                }
                let last = work.queries.len();
                for first in (first..last).step_by(self.kernels.queries) {
                    work.units.push(Unit {
                        sequence,
                        head,
                        first,
                        count: (last - first).min(self.kernels.queries),
                    });
                }
            }
            start = end;
        }
    }

    /// Normalised (or, without `norm`, plain) rows of `source`, ready for a product.
    fn prepare(&mut self, source: Source, layer: usize, rows: usize) -> ActsView {
        let Self { work, kernels, threads, layers, spec, .. } = self;
        let layer = &layers[layer];
        let (from, pitch, cols, norm, form) = match source {
            Source::Attention => (
                &work.x,
                spec.hidden.next_multiple_of(16),
                spec.hidden,
                &layer.attention_norm,
                layer.qkv.form(),
            ),
            Source::Mlp => {
                let form = joined(&layer.gate, &layer.up);
                (&work.x, spec.hidden.next_multiple_of(16), spec.hidden, &layer.mlp_norm, form)
            }
            Source::Output => {
                let width = spec.heads * spec.head_dim;
                (&work.attended, width, width, &NOTHING, layer.output.form())
            }
        };
        let view = work.acts.shape(rows, cols, kernels.tile, form);
        let kernels = *kernels;
        fill(&kernels, threads, view, |row| from[row * pitch..][..cols].as_ptr(), norm, spec.eps);
        self.profile.lap(Op::Prepare);
        view
    }

    fn attention(&mut self, index: usize, batch: &Batch<'_>) {
        let rows = batch.tokens.len();
        let x = self.prepare(Source::Attention, index, rows);
        let Self { work, kernels, threads, layers, .. } = self;
        let mut hands = Hands { kernels: *kernels, threads, locals: &mut work.locals };
        layers[index].qkv.run(&mut hands, x, &mut work.qkv, false);
        self.profile.lap(Op::Qkv);
        let pool = self.cache.layer(index);
        self.place(index, batch, pool);
        self.profile.lap(Op::Place);
        self.attend(batch, pool);
        self.profile.lap(Op::Attend);
        let x = self.prepare(Source::Output, index, rows);
        let Self { work, kernels, threads, layers, spec, .. } = self;
        let mut hands = Hands { kernels: *kernels, threads, locals: &mut work.locals };
        layers[index].output.run(&mut hands, x, &mut work.x, true);
        let bias = &layers[index].output_bias;
        if !bias.is_empty() {
            for row in work.x.chunks_exact_mut(spec.hidden.next_multiple_of(16)).take(rows) {
                row.iter_mut().zip(bias).for_each(|(to, add)| *to += add);
            }
        }
        self.profile.lap(Op::Output);
    }

    /// Bias, head norms and rotation of queries and keys; keys and values into their slots.
    fn place(&mut self, index: usize, batch: &Batch<'_>, pool: Pool) {
        let Self { work, kernels, threads, layers, spec, .. } = self;
        let layer = &layers[index];
        let (width, half, dim) = (layer.qkv.width(), spec.head_dim / 2, spec.head_dim);
        let (keys, values) = (layer.qkv.offset(1), layer.qkv.offset(2));
        let qkv = Shared(work.qkv.as_mut_ptr());
        let angles = &work.angles;
        let kernels = *kernels;
        each_row(threads, batch.tokens.len(), width * 4, &|row| {
            let cos = &angles[row * half * 2..][..half];
            let sin = &angles[row * half * 2 + half..][..half];
            let slot = batch.slots[row] as usize;
            // SAFETY: row `row` of `qkv` is this call's alone, and so is its slot, as slots of a step differ;
            // the slot was checked against the pool's size.
            unsafe {
                let data = std::slice::from_raw_parts_mut(qkv.at(row * width), width);
                data.iter_mut().zip(&layer.qkv_bias).for_each(|(to, add)| *to += add);
                let heads = (0..spec.heads).map(|head| (head * dim, &layer.head_norms.0));
                let key_heads = (0..spec.kv_heads).map(|head| (keys + head * dim, &layer.head_norms.1));
                for (at, norm) in heads.chain(key_heads) {
                    let head = data[at..at + dim].as_mut_ptr();
                    if !norm.is_empty() {
                        (kernels.norm)(head, norm.as_ptr(), dim, spec.eps, head);
                    }
                    (kernels.rotate)(head, cos.as_ptr(), sin.as_ptr(), half);
                }
                let (page, offset) = (slot / pool.page_size, slot % pool.page_size);
                (kernels.write)(&pool, page, offset, data[keys..].as_ptr(), data[values..].as_ptr());
            }
        });
    }

    fn attend(&mut self, batch: &Batch<'_>, pool: Pool) {
        let Self { work, kernels, threads, spec, .. } = self;
        let locals = Shared(work.locals.as_mut_ptr());
        let (units, queries) = (&work.units, Shared(work.queries.as_mut_ptr()));
        let scale = 1.0 / (spec.head_dim as f32).sqrt();
        let window = spec.window;
        let run = |index: usize, thread: usize| {
            // Later units have longer contexts: they start first, so that threads end together.
            let unit = units[units.len() - 1 - index];
            // SAFETY: `thread` is unique among running pieces; queries of a unit write results of their own;
            // the pool outlives the loop, and page numbers and positions were checked.
            unsafe {
                let local = &mut *locals.at(thread);
                let job = Attend {
                    pool,
                    pages: &batch.page_tables[unit.sequence],
                    head: unit.head,
                    queries: std::slice::from_raw_parts(queries.at(unit.first), unit.count),
                    scale,
                    window,
                };
                (kernels.attend)(&job, &mut local.attend);
            }
        };
        threads.run(units.len(), &run);
    }

    fn mlp(&mut self, index: usize, rows: usize) {
        let x = self.prepare(Source::Mlp, index, rows);
        let Self { work, kernels, threads, layers, spec, profile, .. } = self;
        let layer = &layers[index];
        let next = work.gated.shape(rows, spec.intermediate, kernels.tile, layer.down.form());
        let mut hands = Hands { kernels: *kernels, threads, locals: &mut work.locals };
        gated(&mut hands, (&layer.gate, &layer.up), x, next);
        profile.lap(Op::GateUp);
        layer.down.run(&mut hands, next, &mut work.x, true);
        profile.lap(Op::Down);
    }

    fn logits(&mut self, batch: &Batch<'_>) {
        let pitch = self.hidden_pitch();
        let rows = batch.logit_rows.len();
        self.work.rows = rows;
        if rows == 0 {
            return;
        }
        let Self { work, kernels, threads, head, embedding, norm, spec, .. } = self;
        let head = head.as_ref().unwrap_or(embedding);
        let x = work.acts.shape(rows, spec.hidden, kernels.tile, head.form());
        let source = &work.x;
        let at = |row: usize| source[batch.logit_rows[row] as usize * pitch..][..spec.hidden].as_ptr();
        fill(kernels, threads, x, at, norm, spec.eps);
        room(&mut work.logits, rows * head.width());
        let mut hands = Hands { kernels: *kernels, threads, locals: &mut work.locals };
        head.run(&mut hands, x, &mut work.logits, false);
        self.profile.lap(Op::Head);
    }
}

/// Every packed matrix, in the order in which a step reads them.
fn matrices<'a>(
    layers: &'a [Layer],
    embedding: &'a Linear,
    head: Option<&'a Linear>,
) -> impl Iterator<Item = &'a Packed> {
    let layers = layers.iter().flat_map(|layer| {
        let last = layer.output.parts().iter().chain([&layer.gate, &layer.up]).chain(layer.down.parts());
        layer.qkv.parts().iter().chain(last)
    });
    layers.chain(embedding.parts()).chain(head.into_iter().flat_map(Linear::parts))
}

/// Which rows a product reads.
#[derive(Clone, Copy)]
enum Source {
    Attention,
    Output,
    Mlp,
}

/// Put all rows of `view`; `at(row)` points to `view.cols` values. Normalised unless `norm` is empty.
fn fill<A>(kernels: &Kernels, threads: &mut Threads, view: ActsView, at: A, norm: &[f32], eps: f32)
where
    A: Fn(usize) -> *const f32 + Sync,
{
    each_row(threads, view.rows, view.cols * 2, &|row| {
        let (tile, place) = view.locate(row);
        let tile = view.tile(tile);
        // SAFETY: `at` gives `cols` values, the buffer has room for them, and the row is this call's alone.
        unsafe {
            if norm.is_empty() {
                view.put(kernels, &tile, place, 0, at(row), view.cols);
                return view.settle(row);
            }
            NORMED.with_borrow_mut(|buffer| {
                room(buffer, view.cols);
                (kernels.norm)(at(row), norm.as_ptr(), view.cols, eps, buffer.as_mut_ptr());
                view.put(kernels, &tile, place, 0, buffer.as_ptr(), view.cols);
                view.settle(row);
            });
        }
    });
}

thread_local! {
    /// One normalised row on its way to being quantised.
    static NORMED: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// No norm.
static NOTHING: Vec<f32> = Vec::new();

fn joined(gate: &Packed, up: &Packed) -> super::acts::Form {
    let kinds = [gate.kind.is_integer(), up.kind.is_integer()];
    super::acts::Form { integer: kinds.contains(&true), float: kinds.contains(&false) }
}
