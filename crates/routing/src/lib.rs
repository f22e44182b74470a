//! Routing policies and the cache index. Pure and sync: clock and randomness are passed in.
//!
//! [`BlockIndex`] mirrors engines' caches exactly from their events; [`TextIndex`] remembers approximately where
//! prompts went whose workers say nothing. Both answer how much of a prompt a worker has; a [`Policy`] turns
//! that and the load into a choice.

mod block;
mod identity;
mod pair;
mod policy;
mod slots;
mod text;
mod uses;

pub use block::{Batch, BlockIndex, Change, Gap};
pub use pair::cheapest_pair;
pub use policy::{Ask, Candidate, Policy, PolicyKind, fork_part, hinted_tokens};
pub use text::{BLOCK_BYTES, TextIndex};
pub use uses::{CopyCost, Uses};
