//! Ids, closed error codes, clock and worker descriptions. No I/O; imports none of our crates.
//!
//! Every other crate answers failures with [`Error`], so that one table maps a code to HTTP, to gRPC
//! and to the OpenAI `type` string.

mod clock;
mod error;
mod ids;
mod role;

pub use clock::{Clock, SystemClock};
pub use error::{Error, ErrorCode, Result};
pub use ids::{RequestId, WorkerId};
pub use role::Role;
