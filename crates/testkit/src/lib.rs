//! Fakes for tests: a scripted HTTP worker and test clocks.

mod scripted;

pub use scripted::{Record, ScriptedWorker, Seen, Step, chunk, event_stream, last_chunk, response};
