//! All of the worker crate's integration tests in one program: each alone would link the whole stack anew.

mod choice;
mod engine;
mod golden;
mod http;
mod index;
