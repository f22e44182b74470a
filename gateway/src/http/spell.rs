//! Spells token ids by a model's vocabulary, for logprobs.

use std::sync::Arc;

use branchline_protocol::Spelling;
use branchline_text::Vocabulary;

/// A vocabulary that answers may spell by.
#[derive(Clone)]
pub(super) struct Spell(pub(super) Arc<Vocabulary>);

impl Spelling for Spell {
    fn text(&self, id: u32) -> String {
        self.0.text(id)
    }

    fn bytes(&self, id: u32) -> Vec<u8> {
        self.0.bytes(id).to_vec()
    }
}

/// The same for generated text that leaves special tokens out.
pub(super) struct WithoutSpecial<'a>(pub(super) &'a Spell);

impl Spelling for WithoutSpecial<'_> {
    fn text(&self, id: u32) -> String {
        self.0.text(id)
    }

    fn bytes(&self, id: u32) -> Vec<u8> {
        self.0.bytes(id)
    }

    fn shows(&self, id: u32) -> bool {
        !self.0.0.is_special(id)
    }
}
