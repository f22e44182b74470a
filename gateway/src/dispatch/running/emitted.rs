//! What of a sequence the client has: enough for another worker to go on from there.

use crate::dispatch::Piece;

/// One sequence so far.
#[derive(Debug, Default)]
pub(super) struct Emitted {
    /// Every id sent.
    pub(super) ids: Vec<u32>,
    /// Bytes of text sent; what a stop string may still swallow is not among them.
    pub(super) text_bytes: u64,
    pub(super) ended: bool,
}

impl Emitted {
    pub(super) fn add(&mut self, piece: &Piece) {
        self.ids.extend_from_slice(&piece.token_ids);
        self.text_bytes += piece.text.len() as u64;
        self.ended |= piece.end.is_some();
    }
}
