//! Which bytes a token id stands for, and which ids are special.
//!
//! One flat buffer: 4 bytes an id over the bytes themselves (SmolLM2: 0.5 MB; 150,000 ids: about 1.6 MB).

use serde_json::Value;

use crate::special::Spelling;

/// Bytes by id. Ids without an entry have no bytes and are not special.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    /// Where each id's bytes end.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// Bytes of the longest entry.
    longest: usize,
}

impl Vocabulary {
    /// Builds from `(id, token)` pairs of the model and `(id, text, special)` of added tokens, which stand
    /// for themselves and take precedence.
    pub(crate) fn build(
        file: &Value,
        model: impl Iterator<Item = (u32, String)>,
        added: &[(u32, String, bool)],
    ) -> Self {
        let spelling = Spelling::of(file);
        let mut entries: Vec<Vec<u8>> = Vec::new();
        let mut put = |id: u32, bytes: Vec<u8>| {
            if entries.len() <= id as usize {
                entries.resize_with(id as usize + 1, Vec::new);
            }
            entries[id as usize] = bytes;
        };
        for (id, token) in model {
            put(id, spelling.bytes(&token));
        }
        for (id, text, _) in added {
            put(*id, text.clone().into_bytes());
        }
        let mut special = vec![false; entries.len()];
        for (id, _, is_special) in added {
            special[*id as usize] = *is_special;
        }
        let longest = entries.iter().map(Vec::len).max().unwrap_or(0);
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(entries.len()));
        for entry in entries {
            bytes.extend_from_slice(&entry);
            ends.push(bytes.len() as u32);
        }
        Self { bytes, ends, special, longest }
    }

    /// One more than the highest id.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no ids.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of an id; empty for ids without an entry.
    #[must_use]
    pub fn bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else {
            return &[];
        };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Bytes of the longest token.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// By byte: whether no token stands for it alone.
    pub(crate) fn missing_bytes(&self) -> [bool; 256] {
        let mut missing = [true; 256];
        for id in 0..self.ends.len() {
            if let [byte] = self.bytes(id as u32) {
                missing[usize::from(*byte)] = false;
            }
        }
        missing
    }

    /// Whether the id is a control token such as an end mark.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The id's bytes as text; parts of characters become U+FFFD.
    #[must_use]
    pub fn text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.bytes(id)).into_owned()
    }

    /// Memory held, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.bytes.capacity() + 4 * self.ends.capacity() + self.special.capacity()
    }
}
