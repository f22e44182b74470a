//! What one request's reader holds.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use branchline_core::{Error, ErrorCode, Result};
use futures_util::Stream;

use super::mux::Mux;
use super::slot::Slot;
use crate::load::LoadGuard;
use crate::proto::SequenceDelta;

/// The answer to one request, in the engine's order. Dropping it before its end cancels the request at once.
///
/// Ends with `None` after the last sequence's `finish`, or with one error and then `None`: the engine's own error,
/// `UpstreamFailed` if the engine died, `ResourceExhausted` if the reader lagged, `DeadlineExceeded`.
pub struct DeltaStream {
    pub(super) slot: Arc<Slot>,
    pub(super) mux: Arc<Mux>,
    pub(super) handle: u64,
    pub(super) deadline: Option<Pin<Box<tokio::time::Sleep>>>,
    pub(super) guard: Option<LoadGuard>,
    pub(super) done: bool,
}

impl std::fmt::Debug for DeltaStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeltaStream")
            .field("handle", &self.handle)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl DeltaStream {
    /// The next delta; `None` at the end. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<SequenceDelta>> {
        std::future::poll_fn(|cx| self.poll_delta(cx)).await
    }

    fn poll_delta(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<SequenceDelta>>> {
        if self.done {
            return Poll::Ready(None);
        }
        match self.slot.poll_next(cx) {
            Poll::Ready(Some(Ok(delta))) => {
                if let Some(guard) = &mut self.guard
                    && !delta.token_ids.is_empty()
                {
                    guard.prefilled();
                }
                Poll::Ready(Some(Ok(delta)))
            }
            Poll::Ready(end) => {
                self.done = true;
                Poll::Ready(end)
            }
            Poll::Pending => {
                let Some(deadline) = &mut self.deadline else { return Poll::Pending };
                std::task::ready!(deadline.as_mut().poll(cx));
                self.done = true;
                self.mux.cancel(self.handle);
                let text = "the deadline of the request passed before the worker had finished it";
                Poll::Ready(Some(Err(Error::new(ErrorCode::DeadlineExceeded, text))))
            }
        }
    }
}

impl Stream for DeltaStream {
    type Item = Result<SequenceDelta>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_delta(cx)
    }
}

impl Drop for DeltaStream {
    fn drop(&mut self) {
        if !self.slot.has_ended() {
            self.mux.cancel(self.handle);
        }
    }
}
