//! The closed error code set and its HTTP, gRPC and OpenAI mappings.

use std::time::Duration;

/// Shorthand for results with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Every way a request can fail. One row a code in [`ErrorCode::row`]; adding a code means adding its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The request is wrong; the same request will fail again.
    InvalidArgument,
    /// A named thing does not exist.
    NotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// Credentials are missing or wrong.
    Unauthenticated,
    /// Known, but not allowed.
    PermissionDenied,
    /// The body is over the limit.
    PayloadTooLarge,
    /// The state of a thing forbids the request.
    Conflict,
    /// A queue, pool or budget is full; try later.
    ResourceExhausted,
    /// No worker can serve now.
    Unavailable,
    /// A deadline passed.
    DeadlineExceeded,
    /// A feature or field that is not implemented.
    Unimplemented,
    /// A worker failed or spoke nonsense.
    UpstreamFailed,
    /// Aborted by its owner.
    Cancelled,
    /// A fault of ours.
    Internal,
}

struct Row {
    name: &'static str,
    http: u16,
    kind: &'static str,
    grpc: i32,
}

impl ErrorCode {
    /// All codes, for closure tests.
    pub const ALL: [ErrorCode; 14] = [
        Self::InvalidArgument,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::Unauthenticated,
        Self::PermissionDenied,
        Self::PayloadTooLarge,
        Self::Conflict,
        Self::ResourceExhausted,
        Self::Unavailable,
        Self::DeadlineExceeded,
        Self::Unimplemented,
        Self::UpstreamFailed,
        Self::Cancelled,
        Self::Internal,
    ];

    /// The one table. `grpc` is the numeric google.rpc.Code.
    fn row(self) -> Row {
        let (name, http, kind, grpc) = match self {
            Self::InvalidArgument => ("invalid_argument", 400, "invalid_request_error", 3),
            Self::NotFound => ("not_found", 404, "not_found_error", 5),
            Self::MethodNotAllowed => ("method_not_allowed", 405, "invalid_request_error", 12),
            Self::Unauthenticated => ("unauthenticated", 401, "authentication_error", 16),
            Self::PermissionDenied => ("permission_denied", 403, "permission_error", 7),
            Self::PayloadTooLarge => ("payload_too_large", 413, "invalid_request_error", 8),
            Self::Conflict => ("conflict", 409, "conflict_error", 9),
            Self::ResourceExhausted => ("resource_exhausted", 429, "rate_limit_error", 8),
            Self::Unavailable => ("unavailable", 503, "service_unavailable_error", 14),
            Self::DeadlineExceeded => ("deadline_exceeded", 504, "timeout_error", 4),
            Self::Unimplemented => ("unimplemented", 400, "invalid_request_error", 12),
            Self::UpstreamFailed => ("upstream_failed", 502, "upstream_error", 14),
            Self::Cancelled => ("cancelled", 499, "cancelled_error", 1),
            Self::Internal => ("internal", 500, "internal_error", 13),
        };
        Row { name, http, kind, grpc }
    }

    /// Stable snake_case name, used as OpenAI `code`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// HTTP status.
    pub fn http_status(self) -> u16 {
        self.row().http
    }

    /// OpenAI `type` string.
    pub fn kind(self) -> &'static str {
        self.row().kind
    }

    /// Numeric google.rpc.Code.
    pub fn grpc_code(self) -> i32 {
        self.row().grpc
    }
}

/// A refusal or failure, as the client will see it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The closed code.
    pub code: ErrorCode,
    /// Lower-case sentence that names the value and what to do.
    pub message: String,
    /// The offending field as the client spelt it, for example `messages[0].content`.
    pub field: Option<String>,
    /// When to try again.
    pub retry_after: Option<Duration>,
}

impl Error {
    /// A failure without a field.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), field: None, retry_after: None }
    }

    /// A wrong field: code `InvalidArgument`.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message).with_field(field)
    }

    /// A fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, message)
    }

    /// Names the field.
    #[must_use]
    pub fn with_field(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// Says when to try again.
    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_code_has_its_own_name_and_an_error_status() {
        let names: HashSet<_> = ErrorCode::ALL.iter().map(|c| c.name()).collect();
        assert_eq!(names.len(), ErrorCode::ALL.len());
        for code in ErrorCode::ALL {
            assert!((400..600).contains(&code.http_status()), "{}", code.name());
            assert!((1..=16).contains(&code.grpc_code()), "{}", code.name());
        }
    }
}
