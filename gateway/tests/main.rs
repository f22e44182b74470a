//! All of the gateway's integration tests in one program: each alone would link the whole stack anew.

mod admin_port;
mod admission;
mod apis;
mod continuation;
mod engine;
mod engine_faults;
mod families;
mod guard;
mod headers;
mod health;
mod kit;
mod limits;
mod process;
mod reasoned;
mod reference;
mod registration;
mod relay;
mod routing;
mod slow_reader;
mod split;
mod tls;
mod wire;
