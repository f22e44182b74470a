//! From a validated request to its answer: tokenise, choose, attempt, retry before the first piece, relay, settle.
//!
//! The only part of the gateway that speaks the engine contract. Knows nothing of API families: it takes a
//! [`Job`] and gives a stream of [`Piece`]s.

mod batch;
mod contract;
mod embed;
mod lease;
mod live;
mod observe;
mod offload;
mod piece;
mod rooms;
mod running;
mod score;
mod single;
mod tokens;

pub use batch::{Batch, Item};
pub use branchline_worker::Model;
pub use contract::Job;
pub use embed::{EmbedJob, embed};
pub use lease::{JobLease, LeaseName, LeaseSigner, LeaseWant, read_lease};
pub use live::{LiveGuard, LiveRequests, Part};
pub use observe::failed;
pub use offload::Offload;
pub use piece::{End, LeaseFound, Piece, PromptFound, lease_state};
pub use rooms::{Room, RoomRange, Rooms};
pub use running::{Running, start};
pub use score::{ScoreJob, score};
pub use tokens::{encode, limits, render};
