//! The gateway's side of every worker: connections, health, what is served, load, and choice.
//!
//! [`Fleet`] owns the workers; each has one supervising task that connects, watches and reconnects for
//! ever. Engines of ours are reached over gRPC (`grpc://host:port`, one multiplexed `Attach` stream
//! each), other servers over HTTP (`http://host:port`, bytes untouched). Nothing here knows the
//! client-facing API.

mod address;
mod convert;
mod fleet;
mod grpc;
mod http;
mod index;
mod load;
mod model;
mod options;
pub mod proto;
mod route;
mod tokenizers;
mod worker;

pub use convert::{error_from_proto, error_from_status, error_to_proto};
pub use fleet::Fleet;
pub use grpc::DeltaStream;
pub use http::{HttpWorker, ResponseBody};
pub use load::LoadGuard;
pub use model::Model;
pub use options::{BufferLimits, FleetOptions, SubmitOptions};
pub use route::{CacheKey, Choice, RouteQuery};
pub use worker::{Transport, Worker, WorkerInfo};

pub use branchline_routing::PolicyKind;
