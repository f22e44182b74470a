//! The gateway's side of every worker: connections, health, what is served, load, and choice.
//!
//! [`Fleet`] owns the workers; each has one supervising task that connects, watches and reconnects for
//! ever. Engines of ours are reached over gRPC (`grpc://host:port`, one multiplexed `Attach` stream
//! each), other servers over HTTP (`http://host:port`, bytes untouched). Nothing here knows the
//! client-facing API.

mod adapters;
mod address;
mod choose;
mod clock;
mod convert;
mod detect;
mod dial;
mod fleet;
mod grpc;
mod health;
mod http;
mod index;
mod load;
mod model;
mod options;
mod pair;
pub mod proto;
mod route;
mod spec;
mod tls;
mod tokenizers;
mod worker;

pub use adapters::AdapterKey;
pub use address::check_address;
pub use choose::Judgement;
pub use clock::FleetClock;
pub use convert::{error_from_proto, error_from_status, error_to_proto};
pub use detect::speaks;
pub use fleet::Fleet;
pub use grpc::DeltaStream;
pub use health::{BreakerOptions, BudgetOptions, HealthOptions, OutlierOptions, Phase, RetryBudget, Verdict};
pub use http::{HttpWorker, ResponseBody};
pub use load::{LoadGuard, Watch};
pub use model::Model;
pub use options::{BufferLimits, FleetOptions, SubmitOptions};
pub use pair::PairChoice;
pub use route::{CacheKey, Choice, Decision, Hints, Look, RouteQuery};
pub use spec::{ModelCard, ModelName, RUNTIMES, Source, WorkerPatch, WorkerSpec};
pub use tls::{ClientFiles, ClientTls, ServerTls, Wire, follow_files};
pub use worker::{Transport, Worker, WorkerInfo};

pub use branchline_routing::{Candidate, PolicyKind};
