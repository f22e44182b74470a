//! The place of the component tools in builds without them.

use branchline_core::{Error, ErrorCode, Result};

/// As where the tools are; refused.
///
/// # Errors
/// `Unimplemented`, with what to do.
pub fn middleware(_source: &[u8], _world: &str) -> Result<Vec<u8>> {
    let message = "this build can't make components; use the wheel, or build with --features wasm";
    Err(Error::new(ErrorCode::Unimplemented, message))
}
