//! A cache of encoded pieces of text: chat prompts repeat their first messages turn after turn.
//!
//! A text is only cut where a cut provably can't change its ids: at the start of an added token that the
//! tokenizer takes out of the raw text before anything else looks at it. What is between two such tokens
//! is normalised, split and merged on its own, so the ids of the pieces joined are the ids of the whole.

use std::collections::HashMap;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use parking_lot::Mutex;
use tokenizers::AddedToken;

/// Shorter pieces are joined to the next: looking them up would cost as much as encoding them.
const MIN_PIECE: usize = 48;

/// Map entry, two reference counts and allocator rounding, measured generously.
const ENTRY_OVERHEAD: usize = 112;

/// Where texts may be cut.
pub(crate) struct Cuts {
    /// Finds what the tokenizer itself finds: leftmost-longest over the same tokens.
    finder: AhoCorasick,
    /// Whether the start of this pattern is a safe cut.
    safe: Vec<bool>,
}

impl Cuts {
    /// `None` if no cut is provably safe with these tokens.
    pub(crate) fn new(tokens: impl Iterator<Item = AddedToken>) -> Option<Self> {
        let raw: Vec<AddedToken> =
            tokens.filter(|token| !token.normalized && !token.content.is_empty()).collect();
        // Whether such a token counts depends on its neighbours, which a cut would hide.
        if raw.iter().any(|token| token.single_word) {
            return None;
        }
        // A token that takes the spaces before it, or is one that its left neighbour may take, ties both sides.
        let safe: Vec<bool> = raw
            .iter()
            .map(|token| !token.lstrip && !token.content.starts_with(char::is_whitespace))
            .collect();
        if !safe.contains(&true) {
            return None;
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(raw.iter().map(|token| token.content.as_bytes()))
            .ok()?;
        Some(Self { finder, safe })
    }

    /// The text in pieces. Cuts depend only on what precedes them, so texts with a common prefix share pieces.
    pub(crate) fn pieces<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let (mut pieces, mut start) = (Vec::new(), 0);
        for found in self.finder.find_iter(text) {
            if self.safe[found.pattern().as_usize()] && found.start() - start >= MIN_PIECE {
                pieces.push(&text[start..found.start()]);
                start = found.start();
            }
        }
        pieces.push(&text[start..]);
        pieces
    }
}

/// Use of a tokenizer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixCacheStats {
    /// Pieces found.
    pub hits: u64,
    /// Pieces encoded.
    pub misses: u64,
    /// Memory held now, in bytes; never over `budget`.
    pub bytes: usize,
    /// The most memory it may hold, in bytes.
    pub budget: usize,
}

type Pieces = HashMap<Arc<str>, Arc<[u32]>>;

/// Two generations: when the young one has half the budget it becomes the old one, and the old one is dropped.
#[derive(Debug, Default)]
struct Generations {
    young: Pieces,
    old: Pieces,
    young_bytes: usize,
    old_bytes: usize,
    hits: u64,
    misses: u64,
}

/// Pieces used recently and their ids, within a budget of bytes.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    budget: usize,
    generations: Mutex<Generations>,
}

impl PrefixCache {
    pub(crate) fn new(budget: usize) -> Self {
        Self { budget, generations: Mutex::new(Generations::default()) }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.budget > 0
    }

    /// Appends the piece's ids if they are known.
    pub(crate) fn find(&self, piece: &str, ids: &mut Vec<u32>) -> bool {
        let mut guard = self.generations.lock();
        let generations = &mut *guard;
        let found = match generations.young.get(piece) {
            Some(found) => Some(Arc::clone(found)),
            None => generations.old.remove_entry(piece).map(|(piece, found)| {
                generations.old_bytes -= cost(&piece, &found);
                self.put(generations, piece, Arc::clone(&found));
                found
            }),
        };
        let counter = if found.is_some() { &mut generations.hits } else { &mut generations.misses };
        *counter += 1;
        drop(guard);
        found.is_some_and(|found| {
            ids.extend_from_slice(&found);
            true
        })
    }

    /// Remembers a piece; one over a quarter of the budget would push out all else and is not kept.
    pub(crate) fn keep(&self, piece: &str, ids: Vec<u32>) {
        if cost(piece, &ids) > self.budget / 4 {
            return;
        }
        self.put(&mut self.generations.lock(), piece.into(), ids.into());
    }

    pub(crate) fn stats(&self) -> PrefixCacheStats {
        let generations = self.generations.lock();
        PrefixCacheStats {
            hits: generations.hits,
            misses: generations.misses,
            bytes: generations.young_bytes + generations.old_bytes,
            budget: self.budget,
        }
    }

    fn put(&self, generations: &mut Generations, piece: Arc<str>, ids: Arc<[u32]>) {
        let bytes = cost(&piece, &ids);
        if generations.young_bytes + bytes > self.budget / 2 {
            generations.old = std::mem::take(&mut generations.young);
            generations.old_bytes = std::mem::take(&mut generations.young_bytes);
        }
        if generations.young.insert(piece, ids).is_none() {
            generations.young_bytes += bytes;
        }
    }
}

fn cost(piece: &str, ids: &[u32]) -> usize {
    piece.len() + size_of_val(ids) + ENTRY_OVERHEAD
}
