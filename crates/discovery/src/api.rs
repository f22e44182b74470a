//! What discovery needs of an API server: one answer as a whole, one as lines that go on. Tests put a script in its place.

use std::fmt;
use std::pin::Pin;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::Stream;
use serde::Deserialize;

/// Lines of a watch, one event each, until the server ends it.
pub type Lines = Pin<Box<dyn Stream<Item = Result<String, Failure>> + Send>>;

/// An API server.
#[async_trait]
pub trait Api: Send + Sync + 'static {
    /// The body that a GET of path and query answers.
    ///
    /// # Errors
    /// [`Failure`] with the server's status, or without one if none came.
    async fn get(&self, uri: &str) -> Result<Bytes, Failure>;

    /// The lines that a GET of path and query goes on answering.
    ///
    /// # Errors
    /// As [`Self::get`], before the first line.
    async fn watch(&self, uri: &str) -> Result<Lines, Failure>;
}

/// Why an API server gave no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// HTTP status or the code of an ERROR event; `None` if it was not reached or hung up.
    pub status: Option<u16>,
    /// What it said.
    pub message: String,
}

impl Failure {
    /// No answer at all.
    pub fn broken(cause: impl fmt::Display) -> Self {
        Self { status: None, message: cause.to_string() }
    }

    /// The server's own words, from a body that is a `Status` or from any other.
    pub fn answered(status: u16, body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Status {
            message: String,
        }
        let message = serde_json::from_slice::<Status>(body).map_or_else(
            |_| String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned(),
            |status| status.message,
        );
        Self { status: Some(status), message }
    }

    /// Whether the version that a watch starts from is gone or not yet there: only a new list helps.
    pub(crate) fn is_expired(&self) -> bool {
        matches!(self.status, Some(410 | 504))
    }

    /// The word for metrics.
    pub(crate) fn kind(&self) -> &'static str {
        match self.status {
            None => "unreachable",
            Some(401) => "unauthorized",
            Some(403) => "forbidden",
            Some(410 | 504) => "expired",
            Some(_) => "refused",
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            Some(status) => write!(f, "{status}: {}", self.message),
            None => f.write_str(&self.message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_speaks_with_the_servers_words() {
        let body = br#"{"kind":"Status","message":"pods is forbidden","code":403}"#;
        let failure = Failure::answered(403, body);
        assert_eq!((failure.to_string().as_str(), failure.kind()), ("403: pods is forbidden", "forbidden"));
        assert_eq!(Failure::answered(502, b"<html>").to_string(), "502: <html>");
        assert_eq!(Failure::broken("hung up").kind(), "unreachable");
    }

    #[test]
    fn a_version_is_expired_when_it_is_gone_or_too_large() {
        let expired = |status| Failure::answered(status, b"").is_expired();
        assert!(expired(410) && expired(504));
        assert!(!expired(403) && !expired(500) && !Failure::broken("x").is_expired());
    }
}
