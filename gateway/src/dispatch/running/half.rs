//! The half of a split leg that computes its prompt, on another worker than the one that decodes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use branchline_core::{Error, ErrorCode, Result};
use branchline_worker::{DeltaStream, Watch, Worker, proto};
use futures_util::Stream as _;

use crate::dispatch::Room;

/// The field that engines name when a hand-over failed and not the request.
const FIELD: &str = "disaggregation";

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

/// The prompt's computation. Dropping it cancels it and frees the room.
pub(super) struct Half {
    pub(super) worker: Arc<Worker>,
    /// What its worker calls it.
    pub(super) id: String,
    stream: DeltaStream,
    /// Whether the prompt is computed.
    pub(super) done: bool,
    _room: Room,
}

impl Half {
    pub(super) fn new(worker: Arc<Worker>, id: String, stream: DeltaStream, room: Room) -> Self {
        Self { worker, id, stream, done: false, _room: room }
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
