//! Who may talk to the gateway and how much they may send: keys, exposure, Host and Origin, body limits.
//!
//! Knows nothing of APIs or workers. [`Gate`] stands before every route, so no handler can forget it.

mod admission;
mod allowance;
mod body;
mod exposure;
mod flight;
mod gate;
mod keyfile;
mod keys;
mod origin;
mod policies;
mod queue;
mod routes;
mod tenants;
mod usage;

pub use admission::{Admission, Entry, Permit, Queued};
pub use body::{BodyLimit, read_body};
pub use exposure::{check_admin_exposure, check_exposure, is_loopback};
pub use gate::{Counted, Gate, Surface, Trusted};
pub use keyfile::KeyFile;
pub use keys::{KeyHash, Keys, Role, hash_of};
pub use routes::{Access, Route, route_of};
