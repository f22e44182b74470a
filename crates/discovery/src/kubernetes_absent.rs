//! The place of the connection in builds without it: discovery is refused before any port opens.

use std::sync::Arc;

use branchline_core::{Error, ErrorCode, Result};

use crate::api::Api;

/// Always refused.
///
/// # Errors
/// `Unimplemented` with the words to build with.
pub async fn connect() -> Result<Arc<dyn Api>> {
    let text = "service_discovery: this build has no Kubernetes client; use the wheel or image, or build with --features kubernetes";
    Err(Error::new(ErrorCode::Unimplemented, text).with_field("service_discovery"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_build_without_it_says_what_to_build_with() {
        let error = connect().await.err().unwrap();
        assert_eq!(error.field.as_deref(), Some("service_discovery"));
        assert!(error.message.contains("--features kubernetes"), "{error}");
    }
}
