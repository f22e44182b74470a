//! `{"type": "error", "error": {"type", "message"}}`.

use branchline_core::{Error, ErrorCode};
use serde_json::{Value, json};

/// Anthropic's name for a code.
pub fn error_kind(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::InvalidArgument
        | ErrorCode::MethodNotAllowed
        | ErrorCode::Conflict
        | ErrorCode::Unimplemented
        | ErrorCode::Cancelled => "invalid_request_error",
        ErrorCode::NotFound => "not_found_error",
        ErrorCode::Unauthenticated => "authentication_error",
        ErrorCode::PermissionDenied => "permission_error",
        ErrorCode::PayloadTooLarge => "request_too_large",
        ErrorCode::ResourceExhausted => "rate_limit_error",
        ErrorCode::Unavailable => "overloaded_error",
        ErrorCode::DeadlineExceeded => "timeout_error",
        ErrorCode::UpstreamFailed | ErrorCode::Internal => "api_error",
    }
}

/// The body of an error, in an answer or an `error` event.
pub fn error_body(error: &Error) -> Value {
    json!({"type": "error", "error": {"type": error_kind(error.code), "message": error.message}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_kind_that_clients_know() {
        let known = [
            "invalid_request_error",
            "authentication_error",
            "permission_error",
            "not_found_error",
            "request_too_large",
            "rate_limit_error",
            "timeout_error",
            "api_error",
            "overloaded_error",
        ];
        for code in ErrorCode::ALL {
            assert!(known.contains(&error_kind(code)), "{}", code.name());
            let body = error_body(&Error::new(code, "no"));
            assert_eq!((&body["type"], &body["error"]["message"]), (&json!("error"), &json!("no")));
        }
    }
}
