//! A hasher for keys that are hashes already.

use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by well-mixed 64-bit hashes.
pub(crate) type HashMap<V> = std::collections::HashMap<u64, V, BuildHasherDefault<Identity>>;

/// Passes a `u64` through.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }

    /// Not used by `u64` keys; keeps the trait total.
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxhash_rust::xxh3::xxh3_64_with_seed(bytes, self.0);
    }
}
