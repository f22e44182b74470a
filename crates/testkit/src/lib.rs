//! Fakes at the edge, each on a port of its own: a scripted engine and scripted HTTP workers.
//!
//! For tests only. Waits are on conditions, bounded by [`within`].

mod engine;
mod scripted;
mod tokenizer;

use std::future::Future;
use std::time::Duration;

pub use engine::{Act, EngineSetup, FakeEngine, Script};
pub use scripted::{Record, ScriptedWorker, Seen, Step, chunk, event_stream, last_chunk, response};
pub use tokenizer::byte_tokenizer_json;

/// Longest wait for anything in a test.
const PATIENCE: Duration = Duration::from_secs(20);

/// What `future` answers; fails the test, naming `what`, if it does not come.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(answer) => answer,
        Err(_) => panic!("{what} did not come within {} s", PATIENCE.as_secs()),
    }
}
