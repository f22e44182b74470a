//! Bodies that a module wants whole, within `--wasm-body-limit`.

use axum::body::Body;
use branchline_core::{Error, ErrorCode, Result};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};

use crate::app::App;
use crate::guard::{BodyLimit, read_body};

/// A body on its way: untouched, or whole in memory.
pub(super) enum Pending {
    Coming(Body),
    Whole(Bytes),
}

impl Pending {
    /// Reads a request's body, once.
    ///
    /// # Errors
    /// `PayloadTooLarge` past the limit, or what the body's reading says.
    pub(super) async fn whole(&mut self, app: &App) -> Result<Bytes> {
        if let Self::Whole(bytes) = self {
            return Ok(bytes.clone());
        }
        let Self::Coming(body) = std::mem::replace(self, Self::Whole(Bytes::new())) else {
            return Ok(Bytes::new());
        };
        let usual = app.body_limit();
        let own = app.options.wasm_body_limit.0;
        let limit = BodyLimit { bytes: usual.bytes.min(own), ..usual };
        let bytes = read_body(body, limit).await.map_err(|error| match error.code {
            ErrorCode::PayloadTooLarge if own < usual.bytes => {
                let message = format!("the body is over {own} bytes, which middleware reads; send less, or raise --wasm-body-limit");
                Error::new(ErrorCode::PayloadTooLarge, message)
            }
            _ => error,
        })?;
        *self = Self::Whole(bytes.clone());
        Ok(bytes)
    }

    pub(super) fn into_body(self) -> Body {
        match self {
            Self::Coming(body) => body,
            Self::Whole(bytes) => Body::from(bytes),
        }
    }
}

/// What reading an answer's body gave.
pub(super) enum Collected {
    Whole(Bytes),
    /// Over the limit; nothing of it is lost.
    TooLarge(Body),
    /// The worker broke off.
    Broken(String),
}

/// Reads an answer's body up to the limit.
pub(super) async fn collect(body: Body, limit: usize) -> Collected {
    let mut pieces = body.into_data_stream();
    let mut whole = BytesMut::new();
    while let Some(piece) = pieces.next().await {
        let piece = match piece {
            Ok(piece) => piece,
            Err(error) => return Collected::Broken(error.to_string()),
        };
        whole.extend_from_slice(&piece);
        if whole.len() > limit {
            let read = stream::once(std::future::ready(Ok(whole.freeze())));
            return Collected::TooLarge(Body::from_stream(read.chain(pieces)));
        }
    }
    Collected::Whole(whole.freeze())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(pieces: &[&'static str]) -> Body {
        let pieces: Vec<std::io::Result<&'static str>> = pieces.iter().map(|piece| Ok(*piece)).collect();
        Body::from_stream(stream::iter(pieces))
    }

    #[tokio::test]
    async fn a_body_over_the_limit_loses_nothing() {
        let Collected::TooLarge(rest) = collect(body(&["abc", "def", "ghi"]), 4).await else {
            panic!("nine bytes are over four");
        };
        assert_eq!(axum::body::to_bytes(rest, 100).await.expect("whole"), "abcdefghi");
        let Collected::Whole(whole) = collect(body(&["abc", "d"]), 4).await else { panic!("four bytes fit") };
        assert_eq!(whole, "abcd");
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_told_from_a_whole_one() {
        let broken = Body::from_stream(stream::iter([Ok("ab"), Err(std::io::Error::other("reset"))]));
        assert!(matches!(collect(broken, 10).await, Collected::Broken(_)));
    }
}
