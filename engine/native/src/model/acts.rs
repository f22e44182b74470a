//! Activations on their way into a matrix product: tiled, and quantised where the weights are integers.

use crate::kernels::{Kernels, Spike, Tile};

/// Buffers for the activations of one step; they grow and are reused.
#[derive(Default)]
pub(crate) struct Acts {
    q: Vec<i8>,
    scale: Vec<f32>,
    sums: Vec<f32>,
    wide: Vec<i32>,
    half: Vec<i32>,
    spikes: Vec<Spike>,
    counts: Vec<u32>,
    f: Vec<f32>,
}

/// What a consumer of activations needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Form {
    pub(crate) integer: bool,
    pub(crate) float: bool,
}

/// A shaped `Acts`: `rows` rows of `cols` values, cut into tiles of nearly equal height.
#[derive(Clone, Copy)]
pub(crate) struct ActsView {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    tiles: usize,
    form: Form,
    q: *mut i8,
    scale: *mut f32,
    sums: *mut f32,
    wide: *mut i32,
    half: *mut i32,
    spikes: *mut Spike,
    counts: *mut u32,
    f: *mut f32,
}

// SAFETY: a view is plain addresses. Whoever writes through one writes rows that are its own (`put`).
unsafe impl Send for ActsView {}
// SAFETY: as above.
unsafe impl Sync for ActsView {}

fn grow<T: Default + Clone>(buffer: &mut Vec<T>, needed: usize) -> *mut T {
    if buffer.len() < needed {
        buffer.resize(needed, T::default());
    }
    buffer.as_mut_ptr()
}

impl Acts {
    /// Make room for `rows` rows of `cols` values in tiles of at most `tile` rows. Contents are undefined.
    /// Integer forms need `cols` to be a multiple of 32.
    pub(crate) fn shape(&mut self, rows: usize, cols: usize, tile: usize, form: Form) -> ActsView {
        let (values, blocks) = if form.integer { (rows * cols, rows * cols / 32) } else { (0, 0) };
        ActsView {
            rows,
            cols,
            tiles: rows.div_ceil(tile),
            form,
            q: grow(&mut self.q, values),
            scale: grow(&mut self.scale, blocks),
            sums: grow(&mut self.sums, blocks),
            wide: grow(&mut self.wide, blocks),
            half: grow(&mut self.half, blocks * 2),
            spikes: grow(&mut self.spikes, blocks),
            counts: grow(&mut self.counts, if form.integer { rows } else { 0 }),
            f: grow(&mut self.f, if form.float { rows * cols } else { 0 }),
        }
    }
}

impl ActsView {
    /// Number of tiles.
    pub(crate) fn tiles(&self) -> usize {
        self.tiles
    }

    /// First row and number of rows of a tile.
    pub(crate) fn span(&self, tile: usize) -> (usize, usize) {
        let start = tile * self.rows / self.tiles;
        (start, (tile + 1) * self.rows / self.tiles - start)
    }

    /// A tile as kernels take it.
    pub(crate) fn tile(&self, tile: usize) -> Tile {
        let (start, rows) = self.span(tile);
        let blocks = start * (self.cols / 32);
        // Offsets stay within the buffers: `start` rows of each precede the tile. Absent forms are not offset.
        let (values, blocks) = if self.form.integer { (start * self.cols, blocks) } else { (0, 0) };
        Tile {
            rows,
            q: self.q.wrapping_add(values),
            scale: self.scale.wrapping_add(blocks),
            sums: self.sums.wrapping_add(blocks),
            wide: self.wide.wrapping_add(blocks),
            half: self.half.wrapping_add(blocks * 2),
            spikes: self.spikes.wrapping_add(blocks),
            counts: self.counts.wrapping_add(if self.form.integer { start } else { 0 }),
            f: self.f.wrapping_add(if self.form.float { start * self.cols } else { 0 }),
        }
    }

    /// The tile that holds `row`, and the row's place in it.
    pub(crate) fn locate(&self, row: usize) -> (usize, usize) {
        let mut tile = row * self.tiles / self.rows;
        while tile + 1 < self.tiles && self.span(tile + 1).0 <= row {
            tile += 1;
        }
        (tile, row - self.span(tile).0)
    }

    /// Put the spikes of a row, all of whose values were `put`, first in their buffer and count them.
    ///
    /// # Safety
    /// `row` must be below `rows`, and no other thread access its spikes.
    pub(crate) unsafe fn settle(&self, row: usize) {
        if !self.form.integer {
            return;
        }
        let blocks = self.cols / 32;
        // SAFETY: the buffers hold `blocks` spikes and one count for each row, one row after the other in
        // whatever tiles; the row is the caller's alone.
        unsafe {
            let spikes = std::slice::from_raw_parts_mut(self.spikes.add(row * blocks), blocks);
            let mut count = 0;
            for block in 0..blocks {
                let spike = spikes[block];
                if spike.value != 0.0 {
                    spikes[count] = spike;
                    count += 1;
                }
            }
            *self.counts.add(row) = count as u32;
        }
    }

    /// Store values `from..from + count` of a row, in every form wanted.
    ///
    /// # Safety
    /// `x` must hold `count` values, `from + count` not exceed `cols`, `row` lie in `tile`, both `from` and
    /// `count` be multiples of 32 for integer forms, and no other thread access these values.
    pub(crate) unsafe fn put(
        &self,
        kernels: &Kernels,
        tile: &Tile,
        row: usize,
        from: usize,
        x: *const f32,
        count: usize,
    ) {
        // SAFETY: the caller's promise; a tile's buffers hold `cols` values for each of its rows.
        unsafe {
            if self.form.integer {
                for block in 0..count / 32 {
                    (kernels.quantise)(x.add(block * 32), tile, row, from / 32 + block, self.cols / 32);
                }
            }
            if self.form.float {
                for i in 0..count {
                    *tile.f.cast_mut().add((from + i) * tile.rows + row) = *x.add(i);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_rows_and_differ_by_at_most_one() {
        for rows in 1..200 {
            for tile in [2, 3, 6] {
                let mut acts = Acts::default();
                let view = acts.shape(rows, 32, tile, Form { integer: true, float: true });
                let spans: Vec<_> = (0..view.tiles()).map(|i| view.span(i)).collect();
                assert_eq!(spans.iter().map(|span| span.1).sum::<usize>(), rows);
                assert!(spans.iter().all(|span| span.1 >= 1 && span.1 <= tile));
                let (low, high) = (spans.iter().map(|s| s.1).min(), spans.iter().map(|s| s.1).max());
                assert!(high.unwrap() - low.unwrap() <= 1);
                for row in 0..rows {
                    let (at, place) = view.locate(row);
                    assert_eq!(spans[at].0 + place, row);
                    assert!(place < spans[at].1);
                }
            }
        }
    }
}
