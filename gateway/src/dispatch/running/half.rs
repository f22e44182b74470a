//! The half of a split leg that computes its prompt, on another worker than the one that decodes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result};
use branchline_worker::{DeltaStream, Watch, Worker, proto};
use futures_util::Stream as _;
use tokio_util::task::TaskTracker;

use crate::dispatch::Room;

/// The field that engines name when a hand-over failed and not the request.
const FIELD: &str = "disaggregation";

/// Longest wait for a worker that is told that nobody comes for a prompt.
const CALL_OFF: Duration = Duration::from_secs(5);

/// Which part of a split leg was at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The worker that computes the prompt.
    Prefill,
    /// What is between them.
    Transfer,
    /// The worker that decodes.
    Decode,
}

impl Fault {
    /// Whose fault an error of the decoding worker is.
    pub(super) fn of(error: &Error) -> Self {
        match error.field.as_deref().is_some_and(|field| field.split('.').next() == Some(FIELD)) {
            true => Self::Transfer,
            false => Self::Decode,
        }
    }
}

/// The prompt's computation. Dropping it calls it off and frees the room, also at a worker that has computed it already:
/// its pages would wait for whoever continues it until their time is over.
pub(super) struct Half {
    pub(super) worker: Arc<Worker>,
    /// What its worker calls it.
    pub(super) id: String,
    stream: DeltaStream,
    /// Whether the prompt is computed.
    pub(super) done: bool,
    /// Whether output has come of it, so that nothing waits for it any more.
    is_used: bool,
    tracker: TaskTracker,
    _room: Room,
}

impl Half {
    pub(super) fn new(
        worker: Arc<Worker>,
        id: String,
        stream: DeltaStream,
        room: Room,
        tracker: TaskTracker,
    ) -> Self {
        Self { worker, id, stream, done: false, is_used: false, tracker, _room: room }
    }

    /// Output has come: what is left of it. None if it has done its part; else it goes on until the output ends.
    pub(super) fn unless_spent(mut self) -> Option<Self> {
        self.is_used = self.done;
        (!self.is_used).then_some(self)
    }

    /// What to ask about its worker while it computes.
    pub(super) fn watch(&self) -> Option<Watch> {
        self.stream.watch()
    }

    /// The prompt's worker was silent for too long.
    pub(super) fn blame(&mut self) {
        self.stream.blame();
    }

    /// Ready once, when the prompt is computed or can't be.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        while !self.done {
            match ready!(Pin::new(&mut self.stream).poll_next(cx)) {
                Some(Ok(delta)) => {
                    let Some(finish) = delta.finish else { continue };
                    if finish.reason() == proto::FinishReason::Abort {
                        let text = "the prompt's computation was aborted; try again";
                        return Poll::Ready(Err(Error::new(ErrorCode::Unavailable, text)));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => {
                    self.done = true;
                    return Poll::Ready(Ok(()));
                }
            }
        }
        Poll::Pending
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        // Its stream has told a worker that still computes; by the id one hears of it that has just ended.
        if !self.is_used && tokio::runtime::Handle::try_current().is_ok() {
            let (worker, id) = (Arc::clone(&self.worker), std::mem::take(&mut self.id));
            self.tracker.spawn(async move {
                let told = tokio::time::timeout(CALL_OFF, worker.abort(&id)).await;
                if !matches!(told, Ok(Ok(_))) {
                    tracing::debug!(worker = %worker.url, id, "a room is left to its time");
                }
            });
        }
    }
}
