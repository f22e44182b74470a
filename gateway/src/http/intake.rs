//! The way into every API handler: body, relay or engine, document, model. Knows no API family.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::response::Response;
use branchline_core::{RequestId, Result};
use branchline_protocol::{Document, Fields, Limits};
use http::Request;

use super::relay;
use crate::app::App;
use crate::dispatch::{self, LiveGuard};
use crate::guard::read_body;

/// A request for an engine.
pub(super) struct Intake {
    pub(super) app: Arc<App>,
    pub(super) document: Document,
    /// The engines' model that serves it.
    pub(super) target: Target,
    pub(super) arrived: Instant,
    pub(super) created: u64,
    /// The client's trace context.
    pub(super) traceparent: String,
    /// Bytes of the body: what text work will cost at most.
    pub(super) bytes: usize,
}

/// A model and the name that the client gave it.
pub(super) struct Target {
    pub(super) model: Arc<branchline_gateway_model::Model>,
    pub(super) name: String,
}
