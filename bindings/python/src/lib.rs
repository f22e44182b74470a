//! The branchline_router._native module: starts and stops gateways, runs the command line.
//!
//! Functions here only convert, release the GIL, call and convert back. Each router owns its runtime; a
//! process that was forked from the one that made a router is refused.

mod call;
mod errors;
mod parsers;
mod router;

use pyo3::prelude::*;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Runs the command line, given without the program's name; answers the exit code.
#[pyfunction]
fn run_cli(py: Python<'_>, arguments: Vec<String>) -> u8 {
    py.detach(|| branchline_gateway::cli::run_code(&arguments))
}

/// A generated page; `None` if no page has this name.
#[pyfunction]
fn reference(page: &str) -> Option<String> {
    branchline_gateway::config::render(page)
}

/// Native parts of the branchline router.
#[pymodule]
mod _native {
    /// The version of the router.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    use crate::call::NativeCall;
    #[pymodule_export]
    use crate::errors::{ConfigError, ForkError, RouterError, StartError, StateError};
    #[pymodule_export]
    use crate::parsers::{NativeReasoningParser, NativeToolParser, add_parser, parser_names};
    #[pymodule_export]
    use crate::router::NativeRouter;
    #[pymodule_export]
    use crate::{reference, run_cli};
}
