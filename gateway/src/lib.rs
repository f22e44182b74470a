//! The Branchline gateway: HTTP side and composition root.
//!
//! Reading order: [`config`] (what the operator wants), [`lifecycle`] (bind, serve, drain), [`app`]
//! (what a process holds), [`http`] (routes), [`guard`] (who may call), [`workers`]
//! (where workers come from). The binary and the Python wheel
//! both run [`lifecycle::Server`].

pub mod app;
pub mod authoring;
pub mod cli;
pub mod config;
pub mod dispatch;
pub mod guard;
pub mod http;
pub mod lifecycle;
pub mod middleware;
pub mod parsers;
pub mod workers;

pub use app::App;
pub use config::Options;
