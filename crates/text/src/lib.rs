//! Text in and out of a model: tokenising, chat templates, incremental detokenising and stop strings.
//!
//! Pure: no I/O, no clock but the one given to a template. [`Vocabulary`] says which bytes an id stands
//! for, [`TextStream`] turns ids into text that may be sent, [`Tokenizer`] turns text into ids, and
//! [`ChatTemplate`] turns messages into text, and [`parse`] finds tool calls and reasoning in what a model says.

pub mod parse;
mod prefixes;
mod reach;
mod special;
mod stop;
mod stream;
mod template;
mod tokenizer;
mod utf8;
mod vocabulary;

pub use prefixes::PrefixCacheStats;
pub use stop::StopStrings;
pub use stream::{TextOptions, TextStep, TextStream};
pub use template::{ChatTemplate, SpecialTokens};
pub use tokenizer::Tokenizer;
pub use vocabulary::Vocabulary;

#[cfg(test)]
mod fixtures;
