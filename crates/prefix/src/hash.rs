//! Chained block hashes: the one function the engine's events and the gateway's index share.
//!
//! A block's hash covers its namespace, every token before it and its own tokens, so equal tokens after
//! different prefixes are different blocks. xxh3-64 over little-endian bytes: stable over processes and
//! machines. It is no cryptographic hash: whoever needs certainty compares tokens.

use smallvec::SmallVec;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Keeps a namespace's root apart from a block hash of the same bytes.
const ROOT_SEED: u64 = 0x6272_616e_6368_6c69;

/// The parent hash of a namespace's first blocks.
#[must_use]
pub fn root(namespace: &[u8]) -> u64 {
    xxh3_64_with_seed(namespace, ROOT_SEED)
}

/// The hash of the block of `tokens` that follows the block `parent`.
#[must_use]
pub fn chain(parent: u64, tokens: &[u32]) -> u64 {
    let mut bytes: SmallVec<[u8; 256]> = SmallVec::with_capacity(8 + 4 * tokens.len());
    bytes.extend_from_slice(&parent.to_le_bytes());
    for token in tokens {
        bytes.extend_from_slice(&token.to_le_bytes());
    }
    xxh3_64(&bytes)
}

/// Hashes of every whole block of `page` tokens; a shorter tail has none. Empty for `page` 0.
#[must_use]
pub fn chain_all(namespace: &[u8], tokens: &[u32], page: usize) -> Vec<u64> {
    if page == 0 {
        return Vec::new();
    }
    let mut parent = root(namespace);
    tokens
        .chunks_exact(page)
        .map(|block| {
            parent = chain(parent, block);
            parent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_tokens_after_another_prefix_hash_differently() {
        let one = chain_all(b"n", &[1, 2, 3, 4, 1, 2, 3, 4], 4);
        let two = chain_all(b"n", &[9, 9, 9, 9, 1, 2, 3, 4], 4);
        let mut all: Vec<u64> = one.iter().chain(&two).copied().collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4);
        assert_eq!(one[1], chain(one[0], &[1, 2, 3, 4]));
    }

    #[test]
    fn namespaces_and_tails_are_kept_apart() {
        assert_ne!(chain_all(b"a", &[1, 2], 2), chain_all(b"b", &[1, 2], 2));
        assert_eq!(chain_all(b"a", &[1, 2, 3], 2).len(), 1);
        assert!(chain_all(b"a", &[1, 2, 3], 0).is_empty());
    }

    #[test]
    fn hashes_are_the_same_on_every_machine() {
        // Pinned: an index of another version or process must agree, so a change here is a breaking one.
        assert_eq!(root(b""), xxh3_64_with_seed(b"", 0x6272_616e_6368_6c69));
        assert_eq!(chain(1, &[2, 3]), xxh3_64(&[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]));
    }
}
