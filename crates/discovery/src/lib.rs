//! Workers found in Kubernetes. `plan` says what is watched, `follow` lists and watches it, `store` holds what is there,
//! `member` makes workers of pods and slices, `settle` compares them with those that are known, `run` carries out the
//! difference through a [`Sink`].
//!
//! The only crate with `kube`, and only with the feature `kubernetes`: all but the connection is the same code without it.
//! Knows no fleet: whoever owns one implements [`Sink`].

#![cfg_attr(not(feature = "kubernetes"), allow(dead_code, reason = "only a connection leads there"))]

mod api;
mod follow;
#[cfg(feature = "kubernetes")]
mod kubernetes;
#[cfg(not(feature = "kubernetes"))]
#[path = "kubernetes_absent.rs"]
mod kubernetes;
mod member;
mod object;
mod pause;
mod plan;
mod refusal;
mod run;
mod selector;
mod settle;
mod store;

pub use api::{Api, Failure, Lines};
pub use branchline_core::Role;
pub use kubernetes::connect;
pub use member::{Member, Phase, Protocol, Traits};
pub use plan::{ModelFrom, Plan, Query, Timing};
pub use run::{Applied, Sink, run};
pub use selector::Selector;
pub use settle::{Change, Why};
