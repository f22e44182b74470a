//! Event streams of HTTP workers: whole events pass at once; a stream that breaks ends in one error event.
//!
//! An unfinished event is held back until it is whole, so that a break can't glue it to the error event.
//! Past [`HELD_LIMIT`] it passes in pieces, and a break then closes it with an empty line first.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use branchline_core::{Error, ErrorCode};
use branchline_protocol::ErrorBody;
use branchline_protocol::anthropic::error_kind;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame};
use memchr::memmem;

use super::body::Upstream;
use super::scan::{Family, Scan};

/// Most bytes of one unfinished event that are held.
const HELD_LIMIT: usize = 1 << 20;

/// The client's side of a relayed event stream.
pub(super) struct Events {
    upstream: Upstream,
    scan: Scan,
    family: Family,
    /// The unfinished event.
    held: BytesMut,
    /// Part of the unfinished event has passed already.
    split: bool,
    /// What an open family needs to be complete has been seen.
    complete: bool,
    ended: bool,
    /// The worker has told of a failure itself.
    failed: bool,
}

impl Events {
    pub(super) fn new(upstream: Upstream, family: Family) -> Self {
        Self {
            upstream,
            scan: Scan::new(family),
            family,
            held: BytesMut::new(),
            split: false,
            complete: family == Family::Open,
            ended: false,
            failed: false,
        }
    }

    /// What of `chunk` may pass now; `None` if all of it is held.
    fn take(&mut self, chunk: Bytes, cx: &mut Context<'_>) -> Option<Bytes> {
        let found = self.scan.feed(&chunk);
        if found.last {
            self.complete = true;
            self.ended = true;
            self.upstream.finish(cx);
        }
        if found.whole == 0 {
            self.held.extend_from_slice(&chunk);
            if self.held.len() <= HELD_LIMIT {
                return None;
            }
            self.split = true;
            return Some(self.held.split().freeze());
        }
        self.split = false;
        let passing = chunk.slice(..found.whole);
        let passing = match self.held.is_empty() {
            true => passing,
            false => {
                self.held.extend_from_slice(&passing);
                self.held.split().freeze()
            }
        };
        if !found.last {
            self.held.extend_from_slice(&chunk[found.whole..]);
        }
        if !self.failed && tells_failure(&passing) {
            self.failed = true;
        }
        Some(passing)
    }

    /// The stream's last bytes after a break.
    fn break_off(&mut self, error: &Error) -> Bytes {
        self.ended = true;
        self.upstream.broke();
        self.held.clear();
        if self.failed && !self.split {
            return Bytes::new();
        }
        self.upstream.count_error(error.code);
        let mut out = BytesMut::new();
        if self.split {
            out.extend_from_slice(b"\n\n");
        }
        out.extend_from_slice(&error_event(self.family, error));
        out.freeze()
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            if self.ended {
                return Poll::Ready(None);
            }
            let last = match ready!(self.upstream.poll_data(cx)) {
                Some(Ok(chunk)) => match self.take(chunk, cx) {
                    Some(passing) => passing,
                    None => continue,
                },
                Some(Err(error)) => self.break_off(&error),
                None if self.complete || (!self.split && self.scan.ends_here()) => {
                    self.ended = true;
                    self.upstream.succeed();
                    match self.held.is_empty() {
                        true => return Poll::Ready(None),
                        false => self.held.split().freeze(),
                    }
                }
                None => {
                    let message = "the worker closed the stream before its end mark; try again";
                    self.break_off(&Error::new(ErrorCode::UpstreamFailed, message))
                }
            };
            if last.is_empty() {
                return Poll::Ready(None);
            }
            return Poll::Ready(Some(Ok(Frame::data(last))));
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

/// Whether one of these whole events is a JSON object with an `error`.
fn tells_failure(events: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Failure {
        error: Option<serde::de::IgnoredAny>,
    }
    // Inside a payload's text the quotes would be escaped, so that most streams are never parsed.
    memmem::find(events, b"\"error\"").is_some()
        && events
            .split(|byte| matches!(byte, b'\n' | b'\r'))
            .filter_map(|line| line.strip_prefix(b"data:"))
            .any(|data| serde_json::from_slice::<Failure>(data).is_ok_and(|failure| failure.error.is_some()))
}

/// One event that says, in the family's own form, that the stream failed.
pub(crate) fn error_event(family: Family, error: &Error) -> Bytes {
    let body = ErrorBody::from(error).to_json();
    let (event, data) = match family {
        Family::Done | Family::Open => (None, String::from_utf8_lossy(&body).into_owned()),
        Family::Messages => (
            Some("error"),
            serde_json::json!({
                "type": "error",
                "error": {"type": error_kind(error.code), "message": error.message},
            })
            .to_string(),
        ),
        Family::Responses => (
            Some("response.failed"),
            serde_json::json!({
                "type": "response.failed",
                "response": {
                    "object": "response",
                    "status": "failed",
                    "error": {"code": "server_error", "message": error.message},
                },
            })
            .to_string(),
        ),
    };
    let event = event.map(|name| format!("event: {name}\n")).unwrap_or_default();
    Bytes::from(format!("{event}data: {data}\n\n"))
}
