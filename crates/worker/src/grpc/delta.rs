//! What one request's reader holds.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use branchline_core::{Error, ErrorCode, Result};
use futures_util::Stream;

use super::mux::Mux;
use super::slot::Slot;
use crate::health::Verdict;
use crate::load::{LoadGuard, Watch};
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

    /// What to ask about the worker while no token has come; see [`crate::Fleet::judge`].
    pub fn watch(&self) -> Option<Watch> {
        self.guard.as_ref().and_then(LoadGuard::watch)
    }

    /// The other half of the request has done its part; see [`LoadGuard::waits_no_longer`].
    pub fn waits_no_longer(&mut self) {
        if let Some(guard) = &mut self.guard {
            guard.waits_no_longer();
        }
    }

    /// What came is unusable, or nothing came for too long: the worker's record has a failure.
    pub fn blame(&mut self) {
        if let Some(guard) = &mut self.guard {
            guard.settle(Verdict::Failure);
        }
    }

    /// Tells the worker's record how the request ended.
    fn settle(&mut self, end: Option<&Result<SequenceDelta>>) {
        let Some(guard) = &mut self.guard else { return };
        let verdict = match end {
            None => Verdict::Success,
            Some(Ok(_)) => Verdict::Neutral,
            Some(Err(error)) => {
                if let Some(wait) = error.retry_after {
                    guard.rest(wait);
                }
                match error.code {
                    ErrorCode::UpstreamFailed | ErrorCode::Internal => Verdict::Failure,
                    _ => Verdict::Neutral,
                }
            }
        };
        guard.settle(verdict);
    }

    fn poll_delta(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<SequenceDelta>>> {
        if self.done {
            return Poll::Ready(None);
        }
        match self.slot.poll_next(cx) {
            Poll::Ready(Some(Ok(delta))) => {
                if let Some(guard) = &mut self.guard {
                    if delta.token_ids.is_empty() && delta.finish.is_none() {
                        guard.progressed();
                    } else {
                        guard.prefilled();
                        guard.progressed();
                    }
                }
                Poll::Ready(Some(Ok(delta)))
            }
            Poll::Ready(end) => {
                self.done = true;
                self.settle(end.as_ref());
                Poll::Ready(end)
            }
            Poll::Pending => {
                if let Some(guard) = &mut self.guard {
                    guard.awaits();
                }
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
        } else if !self.done && self.slot.is_spent() {
            // Who has the last `finish` need not ask for the end; only now is it known that nobody blamed the worker.
            self.settle(None);
        }
    }
}
