//! The key and value pool: one allocation, touched page by page as it is written.

use super::spec::Spec;
use crate::kernels::attention::Pool;

/// Keys and values of all layers and pages.
pub(crate) struct Cache {
    memory: Vec<u8>,
    start: usize,
    layer_bytes: usize,
    key_bytes: usize,
    shape: Pool,
    pages: usize,
    layers: usize,
    /// Bytes of one page's keys and of its values in a layer; each lies in one piece.
    page_bytes: (usize, usize),
}

impl Cache {
    /// A zeroed pool; the system hands out its memory at first touch. None if sizes overflow.
    pub(crate) fn new(spec: &Spec, pages: usize, page_size: usize, coded: bool) -> Option<Self> {
        let nowhere = std::ptr::null_mut();
        let shape = Pool {
            keys: nowhere,
            values: nowhere,
            coded,
            page_size,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            value_pitch: spec.head_dim.next_multiple_of(16),
        };
        // Far above any real page, and small enough that a head's bytes cannot overflow.
        if page_size > 1 << 32 {
            return None;
        }
        let heads = pages.checked_mul(spec.kv_heads)?;
        let (key, value) = shape.head_bytes();
        let key_bytes = heads.checked_mul(key)?.checked_next_multiple_of(64)?;
        let value_bytes = heads.checked_mul(value)?.checked_next_multiple_of(64)?;
        let layer_bytes = key_bytes.checked_add(value_bytes)?;
        // Vectors of the last page may be read up to 16 tokens past its end.
        let total = layer_bytes.checked_mul(spec.layers)?.checked_add(128)?;
        Vec::<u8>::new().try_reserve_exact(total).ok()?;
        let memory = vec![0u8; total];
        let start = memory.as_ptr().align_offset(64);
        Some(Self {
            memory,
            start,
            layer_bytes,
            key_bytes,
            shape,
            pages,
            layers: spec.layers,
            page_bytes: (spec.kv_heads * key, spec.kv_heads * value),
        })
    }

    /// Number of pages.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// Tokens a page.
    pub(crate) fn page_size(&self) -> usize {
        self.shape.page_size
    }

    /// Bytes of one page over all layers.
    pub(crate) fn page_bytes(&self) -> usize {
        self.layers * (self.page_bytes.0 + self.page_bytes.1)
    }

    /// Where a page lies: its keys and its values, layer after layer.
    fn pieces(&self, page: usize) -> impl Iterator<Item = std::ops::Range<usize>> + use<> {
        let (start, layer_bytes, key_bytes) = (self.start, self.layer_bytes, self.key_bytes);
        let (keys, values) = self.page_bytes;
        (0..self.layers).flat_map(move |layer| {
            let base = start + layer * layer_bytes;
            let (key, value) = (base + page * keys, base + key_bytes + page * values);
            [key..key + keys, value..value + values]
        })
    }

    /// Copies a page out to `to`, which has [`Self::page_bytes`].
    pub(crate) fn copy_out(&self, page: usize, mut to: &mut [u8]) {
        for piece in self.pieces(page) {
            let (first, rest) = to.split_at_mut(piece.len());
            first.copy_from_slice(&self.memory[piece]);
            to = rest;
        }
    }

    /// Copies a page in from `from`, which [`Self::copy_out`] wrote.
    pub(crate) fn copy_in(&mut self, page: usize, mut from: &[u8]) {
        for piece in self.pieces(page) {
            let (first, rest) = from.split_at(piece.len());
            self.memory[piece].copy_from_slice(first);
            from = rest;
        }
    }

    /// One layer as kernels take it; valid as long as `self`.
    pub(crate) fn layer(&mut self, layer: usize) -> Pool {
        let base = self.memory[self.start + layer * self.layer_bytes..][..self.layer_bytes].as_mut_ptr();
        Pool { keys: base, values: base.wrapping_add(self.key_bytes), ..self.shape }
    }
}
