//! Server-sent events: a parser of bytes in any cut, and a writer. Framing only; data stays bytes.

mod parser;
mod writer;

pub use parser::{Event, Item, Parser, TooLong};
pub use writer::{DONE, KEEP_ALIVE, comment, data, json, named};
