//! Text to ids and back, by the tokenizers crate, with a bounded cache of encoded pieces in front.
//!
//! Encoding is CPU work of up to milliseconds: whoever runs an event loop calls it on another thread.
//! Memory: the tokenizers crate's tables (about 300 bytes an id), the vocabulary, and the cache's budget.

use std::sync::Arc;

use branchline_core::{Error, ErrorCode, Result};
use serde_json::Value;
use tokenizers::tokenizer::Tokenizer as Inner;
use tokenizers::{Encoding, Model, PostProcessor as _, TruncationDirection};

use crate::prefixes::{Cuts, PrefixCache, PrefixCacheStats};
use crate::reach::Reach;
use crate::vocabulary::Vocabulary;

/// Encoded text kept by default, in bytes.
const CACHE_BYTES: usize = 16 << 20;

/// A token id no vocabulary has: stands for the text when asking what is put around it.
const MARK: u32 = u32::MAX;

/// Ids above this are refused: the tables would be mostly holes.
const MAX_ID: u32 = 1 << 24;

/// A tokenizer.json, ready to use; shared by all threads.
pub struct Tokenizer {
    inner: Inner,
    vocabulary: Arc<Vocabulary>,
    cuts: Option<Cuts>,
    cache: PrefixCache,
    /// What the post-processor puts before and after a text.
    before: Vec<u32>,
    after: Vec<u32>,
    /// What bounds the tokens of a text, if anything is known to.
    reach: Option<Reach>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("len", &self.vocabulary.len()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads a tokenizer.json. Truncation and padding set in it are dropped: a prompt is never cut silently.
    ///
    /// # Errors
    /// `InvalidArgument` with the reader's reason.
    pub fn from_json(data: &[u8]) -> Result<Self> {
        Self::with_cache_bytes(data, CACHE_BYTES)
    }

    /// As [`Self::from_json`] with another cache budget; 0 turns the cache off.
    ///
    /// # Errors
    /// As [`Self::from_json`].
    pub fn with_cache_bytes(data: &[u8], cache_bytes: usize) -> Result<Self> {
        let wrong =
            |reason: String| Error::invalid("tokenizer", format!("tokenizer.json can't be read: {reason}"));
        let file: Value = serde_json::from_slice(data).map_err(|error| wrong(error.to_string()))?;
        let mut inner = Inner::from_bytes(data).map_err(|error| wrong(error.to_string()))?;
        inner.with_truncation(None).map_err(|error| wrong(error.to_string()))?;
        inner.with_padding(None);
        let added: Vec<(u32, String, bool)> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .map(|(id, token)| (id, token.content, token.special))
            .collect();
        let model = inner.get_model().get_vocab();
        if let Some(id) =
            added.iter().map(|token| token.0).chain(model.values().copied()).find(|&id| id > MAX_ID)
        {
            return Err(wrong(format!("token id {id} is over {MAX_ID}")));
        }
        let vocabulary = Vocabulary::build(&file, model.into_iter().map(|(token, id)| (id, token)), &added);
        let (before, after) = surroundings(&inner).map_err(wrong)?;
        let cuts = Cuts::new(inner.get_added_tokens_decoder().into_values());
        let cache = PrefixCache::new(cache_bytes);
        let reach = Reach::of(&file, &vocabulary);
        Ok(Self { inner, vocabulary: Arc::new(vocabulary), cuts, cache, before, after, reach })
    }

    /// Ids of a text. Text that spells an added token gives that token's id. With `add_special`, also what
    /// the tokenizer puts around a text, such as a begin mark.
    ///
    /// # Errors
    /// `InvalidArgument` if the tokenizer can't represent the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let mut ids = if add_special { self.before.clone() } else { Vec::new() };
        match &self.cuts {
            Some(cuts) if self.cache.is_on() => {
                for piece in cuts.pieces(text) {
                    self.encode_piece(piece, &mut ids)?;
                }
            }
            _ => ids.extend_from_slice(&self.encode_uncached(text)?),
        }
        if add_special {
            ids.extend_from_slice(&self.after);
        }
        Ok(ids)
    }

    /// A text's ids with the marks around it, its end cut off where they would be more than `most`.
    ///
    /// # Errors
    /// As [`Self::encode`]; `InvalidArgument` if `most` has no room for a token beside the marks.
    pub fn encode_cut(&self, text: &str, most: usize) -> Result<Vec<u32>> {
        let room = self.room(most, self.before.len() + self.after.len())?;
        let body = self.encode(text, false)?;
        Ok([&self.before, &body[..body.len().min(room)], &self.after].concat())
    }

    /// Two texts as the tokenizer joins them, and which of the two each id belongs to. With `most`, the end of the
    /// second is cut off where they would be more.
    ///
    /// # Errors
    /// As [`Self::encode`]; `InvalidArgument` if `most` has no room for a token of the second.
    pub fn encode_pair(
        &self,
        first: &str,
        second: &str,
        most: Option<usize>,
    ) -> Result<(Vec<u32>, Vec<u32>)> {
        let [first, mut second] = [self.encoding(first)?, self.encoding(second)?];
        if let Some(most) = most {
            let marks = self.inner.get_post_processor().map_or(0, |processor| processor.added_tokens(true));
            let room = self.room(most, marks + first.len())?;
            if second.len() > room {
                second.truncate(room, 0, TruncationDirection::Right);
            }
        }
        let joined =
            self.inner.post_process(first, Some(second), true).map_err(|error| untokenisable(&error))?;
        Ok((joined.get_ids().to_vec(), joined.get_type_ids().to_vec()))
    }

    fn room(&self, most: usize, taken: usize) -> Result<usize> {
        most.checked_sub(taken).filter(|&room| room > 0).ok_or_else(|| {
            let message = format!(
                "{most} tokens have no room for a text: {taken} are taken before it; raise the limit"
            );
            Error::new(ErrorCode::InvalidArgument, message).with_field("truncate_prompt_tokens")
        })
    }

    fn encoding(&self, text: &str) -> Result<Encoding> {
        self.inner.encode(text, false).map_err(|error| untokenisable(&error))
    }

    /// Tokens that a text has at least: a bound for about a nanosecond a byte, unlike encoding. 0 if the tokenizer
    /// may drop text.
    #[must_use]
    pub fn at_least(&self, text: &str) -> usize {
        self.reach.as_ref().map_or(0, |reach| reach.at_least(text))
    }

    /// The text of the ids as the tokenizer's own decoder makes it; ids without an entry give nothing.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        self.inner.decode(ids, skip_special).unwrap_or_else(|_| {
            let visible = ids.iter().filter(|&&id| !(skip_special && self.vocabulary.is_special(id)));
            let bytes: Vec<u8> = visible.flat_map(|&id| self.vocabulary.bytes(id)).copied().collect();
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }

    /// The bytes of each id.
    #[must_use]
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Use and memory of the cache of encoded pieces.
    #[must_use]
    pub fn cache_stats(&self) -> PrefixCacheStats {
        self.cache.stats()
    }

    fn encode_piece(&self, piece: &str, ids: &mut Vec<u32>) -> Result<()> {
        if self.cache.find(piece, ids) {
            return Ok(());
        }
        let encoded = self.encode_uncached(piece)?;
        ids.extend_from_slice(&encoded);
        self.cache.keep(piece, encoded);
        Ok(())
    }

    fn encode_uncached(&self, text: &str) -> Result<Vec<u32>> {
        match self.inner.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(untokenisable(&error)),
        }
    }
}

fn untokenisable(error: &tokenizers::Error) -> Error {
    let message = format!("the text can't be tokenised: {error}");
    Error::new(ErrorCode::InvalidArgument, message).with_field("prompt")
}

/// What the post-processor puts before and after a text, found by processing a marked one.
fn surroundings(inner: &Inner) -> std::result::Result<(Vec<u32>, Vec<u32>), String> {
    let mark = tokenizers::Token::new(MARK, String::new(), (0, 0));
    let processed = inner
        .post_process(Encoding::from_tokens(vec![mark], 0), None, true)
        .map_err(|error| error.to_string())?;
    let ids = processed.get_ids();
    match ids.iter().position(|&id| id == MARK) {
        Some(at) => Ok((ids[..at].to_vec(), ids[at + 1..].to_vec())),
        None => Err("its post-processor drops the text".to_owned()),
    }
}

#[cfg(test)]
mod tests;
