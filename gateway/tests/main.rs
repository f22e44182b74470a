//! All of the gateway's integration tests in one program: each alone would link the whole stack anew.

mod adapters;
mod admin_port;
mod admission;
mod apis;
#[cfg(feature = "wasm")]
mod authoring;
mod continuation;
mod deadlines;
mod discovery;
mod engine;
mod engine_faults;
mod families;
mod guard;
#[cfg(feature = "wasm")]
#[path = "../../crates/plugins/tests/kit/guests.rs"]
mod guests;
mod halves;
mod headers;
mod health;
mod kept;
mod kit;
mod limits;
mod page;
mod process;
mod reasoned;
mod reference;
mod registration;
mod relay;
mod routing;
mod slow_reader;
mod split;
mod tenants;
mod tls;
mod vectors;
#[cfg(feature = "wasm")]
mod wasm;
#[cfg(feature = "wasm")]
mod wasm_admin;
#[cfg(feature = "wasm")]
mod wasm_chain;
#[cfg(feature = "wasm")]
mod wasm_load;
#[cfg(feature = "wasm")]
mod wasm_split;
#[cfg(feature = "wasm")]
mod wasm_streams;
mod wire;
