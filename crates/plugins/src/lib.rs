//! WebAssembly middleware: modules, their limits, their calls, and the table of all of them.
//!
//! The only crate with `wasmtime`, and only with the feature `runtime`. Knows HTTP heads and bodies, but no server:
//! the gateway decides when a hook is called and what a refusal looks like.

#![cfg_attr(not(feature = "runtime"), allow(dead_code, reason = "only the runtime calls it"))]

mod check;
#[cfg(feature = "componentize")]
pub mod componentize;
#[cfg(not(feature = "componentize"))]
#[path = "componentize_absent.rs"]
pub mod componentize;
mod disk;
mod failure;
mod grants;
mod module;
mod registry;
#[cfg(feature = "runtime")]
mod runtime;
#[cfg(not(feature = "runtime"))]
#[path = "runtime_absent.rs"]
mod runtime;
mod sign;
mod spec;
mod state;
mod store;
#[cfg_attr(feature = "runtime", allow(unsafe_code, reason = "wasmtime's derives write unsafe impls"))]
mod view;

pub use check::{apply_request, apply_response, reply, visible};
pub use failure::{Called, Cause, Cost, Failure};
pub use grants::{Folder, Grantable, Grants, Peers};
pub use module::{Events, Module};
pub use registry::{Chain, MODULE_CAP_BYTES, PluginOptions, Plugins};
pub use sign::{Signature, TrustedKey, Upload};
pub use spec::{FailMode, Hook, Limits, Routes, Spec};
pub use state::{Level, Line};
pub use view::{
    CandidateView, EventAction, EventView, FailureView, Header, HeaderChanges, LabelView, Needs, NewEvent,
    Reply, RequestAction, RequestChanges, RequestView, ResponseAction, ResponseChanges, ResponseView,
    RouteAction, RouteView, Weight,
};

/// The contract, for authors: `branchline:middleware@1.0.0`.
pub const WIT: &str = include_str!("../wit/branchline/middleware.wit");
/// SGLang's contract, whose modules run here, too.
pub const SMG_WIT: &str = include_str!("../wit/smg/smg.wit");
