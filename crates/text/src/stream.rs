//! One sequence's ids turned into text that may be sent: UTF-8 kept whole, stops found over bytes.
//!
//! Any chunking of the same ids gives the same text and the same stop. Of several stops the one that ends
//! first wins, of two that end together the longer. Stops are looked for in the visible text: a special
//! token that is skipped neither spells nor interrupts one.

use std::sync::Arc;

use branchline_core::Result;

use crate::stop::{State, StopStrings};
use crate::utf8;
use crate::vocabulary::Vocabulary;

/// How a stream treats its ids.
#[derive(Debug, Clone, Default)]
pub struct TextOptions {
    /// Texts that end the sequence.
    pub stop: Vec<String>,
    /// Special tokens give no text.
    pub skip_special: bool,
    /// The matched stop stays in the text.
    pub include_stop: bool,
    /// Stops completed by one of the first `min_tokens` tokens are ignored.
    pub min_tokens: usize,
}

/// What a push made.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TextStep {
    /// Text that is now safe to send.
    pub text: String,
    /// Tokens used; the last of them completed the stop if `matched` is set.
    pub consumed: usize,
    /// The stop that ended the sequence.
    pub matched: Option<String>,
}

/// The state of one sequence. Memory: the held bytes, at most the longest stop and a character.
#[derive(Debug, Clone)]
pub struct TextStream {
    vocabulary: Arc<Vocabulary>,
    stops: Arc<StopStrings>,
    skip_special: bool,
    include_stop: bool,
    min_tokens: usize,
    tokens: usize,
    state: State,
    held: Vec<u8>,
    ended: bool,
}

impl TextStream {
    /// A stream at its first token.
    ///
    /// # Errors
    /// As [`StopStrings::new`].
    pub fn new(vocabulary: Arc<Vocabulary>, options: TextOptions) -> Result<Self> {
        let stops = Arc::new(StopStrings::new(options.stop)?);
        Ok(Self {
            vocabulary,
            stops,
            skip_special: options.skip_special,
            include_stop: options.include_stop,
            min_tokens: options.min_tokens,
            tokens: 0,
            state: 0,
            held: Vec::new(),
            ended: false,
        })
    }

    /// Takes the next tokens, up to the one that completes a stop. After a stop nothing is taken any more.
    pub fn push(&mut self, token_ids: &[u32]) -> TextStep {
        let mut step = TextStep::default();
        let vocabulary = Arc::clone(&self.vocabulary);
        for &id in token_ids {
            if self.ended {
                break;
            }
            step.consumed += 1;
            self.tokens += 1;
            if !(self.skip_special && vocabulary.is_special(id)) {
                step.matched = self.push_bytes(vocabulary.bytes(id), &mut step.text);
            }
        }
        if !self.ended {
            self.release(self.stops.hold(self.state), &mut step.text);
        }
        step
    }

    /// Ends the sequence without a stop: the held text. An unfinished character becomes one U+FFFD.
    pub fn finish(&mut self) -> String {
        self.ended = true;
        let held = std::mem::take(&mut self.held);
        String::from_utf8_lossy(&held).into_owned()
    }

    fn push_bytes(&mut self, bytes: &[u8], text: &mut String) -> Option<String> {
        if self.stops.is_empty() {
            self.held.extend_from_slice(bytes);
            return None;
        }
        for &byte in bytes {
            self.held.push(byte);
            self.state = self.stops.step(self.state, byte);
            if self.tokens > self.min_tokens
                && let Some(stop) = self.stops.matched(self.state)
            {
                let stop = stop.to_owned();
                // The held bytes hold the whole stop: each of its proper prefixes was held back.
                let keep = if self.include_stop { 0 } else { stop.len() };
                self.held.truncate(self.held.len().saturating_sub(keep));
                text.push_str(&self.finish());
                return Some(stop);
            }
        }
        None
    }

    /// Moves all but the last `hold` bytes to `text`; an unfinished character before them stays too, unless
    /// a held stop's first byte already shows that it will never be finished.
    fn release(&mut self, hold: usize, text: &mut String) {
        let ready = self.held.len().saturating_sub(hold);
        let used = utf8::decode_whole(&self.held[..ready], text);
        if hold > 0 && used < ready {
            text.push(char::REPLACEMENT_CHARACTER);
            self.held.drain(..ready);
        } else {
            self.held.drain(..used);
        }
    }
}

#[cfg(test)]
mod tests;
