//! Errors as HTTP answers: status, headers and the OpenAI-shaped body, from the one code table.

use std::sync::Arc;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use branchline_core::{Error, ErrorCode};
use branchline_protocol::ErrorBody;
use branchline_protocol::anthropic::error_body;
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;

/// An error on its way to the client.
#[derive(Debug)]
pub struct Refusal(pub Error);

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        refuse(&self.0)
    }
}

/// The answer to a request that failed before its first byte.
pub fn refuse(error: &Error) -> Response {
    let mut response = Response::new(Body::from(ErrorBody::from(error).to_json()));
    *response.status_mut() =
        StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // For the gate, which counts errors by code and gives them the shape of the path's API.
    response.extensions_mut().insert(error.code);
    response.extensions_mut().insert(Arc::new(error.clone()));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(after) = error.retry_after {
        // Whole seconds, rounded up: 0 would ask for a retry at once.
        headers
            .insert(header::RETRY_AFTER, HeaderValue::from(after.as_millis().div_ceil(1000).max(1) as u64));
    }
    if error.code == ErrorCode::Unauthenticated {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// A refusal on a path of Anthropic's API in that API's shape; all else as it is.
pub(crate) fn shape(anthropic: bool, response: Response) -> Response {
    let error = response.extensions().get::<Arc<Error>>().cloned();
    let Some(error) = error.filter(|_| anthropic) else { return response };
    let mut response = response.map(|_| Body::from(error_body(&error).to_string()));
    // That of the body that was there before.
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response
}

/// Whether a path is of Anthropic's API.
pub(crate) fn is_anthropic(path: &str) -> bool {
    path == "/v1/messages" || path.starts_with("/v1/messages/")
}

/// A JSON answer with a status.
pub fn json(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(text) => {
            let mut response = Response::new(Body::from(text));
            *response.status_mut() = status;
            response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => refuse(&Error::internal(format!("the answer could not be written: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_code_answers_its_own_status() {
        for code in ErrorCode::ALL {
            assert_eq!(refuse(&Error::new(code, "no")).status().as_u16(), code.http_status());
        }
    }

    #[test]
    fn the_wait_is_rounded_up_to_whole_seconds() {
        let error = Error::new(ErrorCode::Unavailable, "no").with_retry_after(Duration::from_millis(1200));
        assert_eq!(refuse(&error).headers()[header::RETRY_AFTER], "2");
        let error = Error::new(ErrorCode::Unavailable, "no").with_retry_after(Duration::ZERO);
        assert_eq!(refuse(&error).headers()[header::RETRY_AFTER], "1");
    }
}
