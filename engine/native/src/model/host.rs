//! The host tier's memory: whole pages as bytes, in slots that the page cache numbers. No idea of who owns them.

use super::forward::Model;

/// Slots of one page each; empty without a tier.
#[derive(Debug, Default)]
pub(crate) struct HostPages {
    memory: Vec<u8>,
    slots: usize,
}

/// One copy: from page to slot, or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageMove {
    pub(crate) store: bool,
    pub(crate) page: u32,
    pub(crate) slot: u32,
}

impl Model {
    /// Bytes that a page takes in either tier.
    pub(crate) fn page_bytes(&self) -> usize {
        self.cache.page_bytes()
    }

    /// Memory for so many pages; the system hands it out at first touch. What was there is forgotten.
    pub(crate) fn reserve_host(&mut self, slots: usize) -> Result<(), String> {
        let refused = || format!("no memory for {slots} host pages; lower host-cache-gib");
        let bytes = slots.checked_mul(self.cache.page_bytes()).ok_or_else(refused)?;
        Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| refused())?;
        self.host = HostPages { memory: vec![0; bytes], slots };
        Ok(())
    }

    /// The bytes of these pages, one after the other: what [`Self::write_pages`] takes in a model of the same numerics.
    pub(crate) fn read_pages(&self, pages: &[u32], to: &mut [u8]) -> Result<(), String> {
        let size = self.check_pages(pages, to.len())?;
        for (page, bytes) in pages.iter().zip(to.chunks_exact_mut(size)) {
            self.cache.copy_out(*page as usize, bytes);
        }
        Ok(())
    }

    /// Fills these pages from what [`Self::read_pages`] gave.
    pub(crate) fn write_pages(&mut self, pages: &[u32], from: &[u8]) -> Result<(), String> {
        let size = self.check_pages(pages, from.len())?;
        for (page, bytes) in pages.iter().zip(from.chunks_exact(size)) {
            self.cache.copy_in(*page as usize, bytes);
        }
        Ok(())
    }

    /// Bytes a page, if all of these exist and `length` bytes are theirs.
    fn check_pages(&self, pages: &[u32], length: usize) -> Result<usize, String> {
        let (there, size) = (self.cache.pages(), self.cache.page_bytes());
        if let Some(page) = pages.iter().find(|page| **page as usize >= there) {
            return Err(format!("page {page} does not exist: there are {there}"));
        }
        if pages.len().checked_mul(size) != Some(length) {
            return Err(format!("{length} bytes are not {} pages of {size}", pages.len()));
        }
        Ok(size)
    }

    /// Copies pages in this order; nothing is copied if one of them names what does not exist.
    pub(crate) fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), String> {
        let (pages, slots) = (self.cache.pages(), self.host.slots);
        if let Some(PageMove { page, slot, .. }) =
            moves.iter().find(|one| one.page as usize >= pages || one.slot as usize >= slots)
        {
            return Err(format!(
                "page {page} or host slot {slot} does not exist: there are {pages} and {slots}"
            ));
        }
        let size = self.cache.page_bytes();
        for one in moves {
            let slot = &mut self.host.memory[one.slot as usize * size..][..size];
            if one.store {
                self.cache.copy_out(one.page as usize, slot);
            } else {
                self.cache.copy_in(one.page as usize, slot);
            }
        }
        Ok(())
    }
}
