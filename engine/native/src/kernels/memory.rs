//! One region for all packed weights, in huge pages where the system gives them.
//!
//! Weights are read from end to end for every token: with small pages a tenth of that time goes into finding
//! them. Filled once while loading, then only read. Also here: the view of a Python buffer that loading reads.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

use pyo3::buffer::{Element, PyBuffer};

const HUGE: usize = 2 << 20;

/// Owned bytes, aligned to a huge page.
pub(crate) struct Region {
    start: NonNull<u8>,
    layout: Layout,
    filled: usize,
}

// SAFETY: a region is plain bytes, written through `&mut` and read through `&` only.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Room for `bytes`; None if there is none.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1).checked_next_multiple_of(HUGE)?, HUGE).ok()?;
        // SAFETY: the layout's size is not 0.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        #[cfg(target_os = "linux")]
        // SAFETY: the range is ours; a refusal of the advice changes nothing.
        unsafe {
            libc::madvise(start.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE);
        }
        Some(Self { start, layout, filled: 0 })
    }

    /// Append bytes; their place in the region, a multiple of 64. None if they do not fit.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Option<usize> {
        let at = self.filled.next_multiple_of(64);
        let end = at.checked_add(bytes.len()).filter(|&end| end <= self.layout.size())?;
        // SAFETY: at..end is inside the region, which does not overlap `bytes`.
        unsafe { self.start.as_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.filled = end;
        Some(at)
    }

    /// Bytes that were pushed at `at`.
    pub(crate) fn get(&self, at: usize, length: usize) -> &[u8] {
        assert!(at + length <= self.filled, "only what was pushed is initialised");
        // SAFETY: checked above; gaps between pieces are never handed out, as pieces start where push said.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(at), length) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// The bytes of a Python buffer, a mapped file for example, without a copy; None if they do not lie in a row.
/// They must not change while the result lives: who hands in a buffer promises that.
pub(crate) fn bytes_of(buffer: &PyBuffer<u8>) -> Option<&[u8]> {
    items_of(buffer)
}

/// The same of ids.
pub(crate) fn words_of(buffer: &PyBuffer<u32>) -> Option<&[u32]> {
    items_of(buffer)
}

/// Only for elements of which any bytes are a valid value.
fn items_of<T: Element>(buffer: &PyBuffer<T>) -> Option<&[T]> {
    let start = buffer.buf_ptr().cast::<T>();
    if !buffer.is_c_contiguous() || !start.is_aligned() {
        return None;
    }
    if buffer.item_count() == 0 {
        return Some(&[]);
    }
    // SAFETY: the exporter keeps these aligned items as long as the buffer lives, and any bytes are a valid u8 or u32.
    Some(unsafe { std::slice::from_raw_parts(start, buffer.item_count()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_aligned_and_too_much_is_refused() {
        let mut region = Region::new(100).expect("memory for one huge page");
        let first = region.push(&[1; 70]).expect("room");
        let second = region.push(&[2; 64]).expect("room");
        assert_eq!((first % 64, second % 64), (0, 0));
        assert_eq!(region.get(first, 70), [1; 70]);
        assert_eq!(region.get(second, 64), [2; 64]);
        assert_eq!(region.push(&vec![0; HUGE]), None);
    }
}
