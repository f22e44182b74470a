//! The one error body of all API families: `{"error": {"message", "type", "param", "code"}}`.

use branchline_core::Error;
use bytes::Bytes;
use serde::Serialize;

/// An [`Error`] as it is written to a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorBody<'a> {
    error: Detail<'a>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Detail<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl<'a> From<&'a Error> for ErrorBody<'a> {
    fn from(error: &'a Error) -> Self {
        Self {
            error: Detail {
                message: &error.message,
                kind: error.code.kind(),
                param: error.field.as_deref(),
                code: error.code.name(),
            },
        }
    }
}

impl ErrorBody<'_> {
    /// The body as JSON.
    pub fn to_json(&self) -> Bytes {
        serde_json::to_vec(self).expect("strings and options always serialise").into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use branchline_core::ErrorCode;

    #[test]
    fn the_body_has_the_four_openai_fields_for_every_code() {
        for code in ErrorCode::ALL {
            let error = Error::new(code, "no");
            let value: serde_json::Value =
                serde_json::from_slice(&ErrorBody::from(&error).to_json()).unwrap();
            assert_eq!(value["error"]["message"], "no");
            assert_eq!(value["error"]["code"], code.name());
            assert_eq!(value["error"]["type"], code.kind());
            assert!(value["error"]["param"].is_null());
        }
    }

    #[test]
    fn the_field_becomes_param() {
        let error = Error::invalid("messages[0].role", "no");
        let text = String::from_utf8(ErrorBody::from(&error).to_json().to_vec()).unwrap();
        assert_eq!(
            text,
            r#"{"error":{"message":"no","type":"invalid_request_error","param":"messages[0].role","code":"invalid_argument"}}"#
        );
    }
}
