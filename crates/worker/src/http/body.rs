//! Bodies of HTTP workers: they stream with back pressure, untouched.

use std::pin::Pin;
use std::task::{Context, Poll};

use branchline_core::{Error, ErrorCode};
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;

use crate::http::pool::Lease;

/// A worker's answer. Its end gives the connection back to the pool; dropping it earlier closes the connection,
/// which tells the worker that nobody listens.
#[derive(Debug)]
pub struct ResponseBody {
    incoming: Incoming,
    /// The connection; `None` once given back or lost.
    lease: Option<Lease>,
    worker: std::sync::Arc<str>,
}

impl ResponseBody {
    pub(crate) fn new(incoming: Incoming, lease: Lease, worker: std::sync::Arc<str>) -> Self {
        let mut body = Self { incoming, lease: Some(lease), worker };
        if body.incoming.is_end_stream() {
            body.give_back();
        }
        body
    }

    fn give_back(&mut self) {
        if let Some(lease) = self.lease.take() {
            lease.give_back();
        }
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let frame = std::task::ready!(Pin::new(&mut self.incoming).poll_frame(cx));
        Poll::Ready(match frame {
            Some(Ok(frame)) => {
                if self.incoming.is_end_stream() {
                    self.give_back();
                }
                Some(Ok(frame))
            }
            Some(Err(cause)) => {
                self.lease = None;
                // Clients learn what happened, not where.
                tracing::warn!(worker = %self.worker, cause = %cause, "the worker broke off its answer");
                Some(Err(Error::new(ErrorCode::UpstreamFailed, "the worker broke off its answer; try again")))
            }
            None => {
                self.give_back();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
