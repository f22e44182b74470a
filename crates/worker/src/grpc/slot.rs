//! The bounded buffer between an engine's stream and one request's reader.
//!
//! The stream's task pushes and never waits. Past the bounds this request alone fails. A lagging reader
//! finds consecutive plain deltas of a sequence merged, so text alone hardly ever reaches the bounds.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use branchline_core::{Error, ErrorCode};
use parking_lot::Mutex;

use crate::convert::error_from_proto;
use crate::options::BufferLimits;
use crate::proto::{SequenceDelta, TokenLogprobs};

/// Up to this many deltas wait unmerged, so that a reader that keeps up sees each step.
const MERGE_FROM: usize = 16;

/// What a push led to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// More may come.
    Open,
    /// The request is over; its handle is free.
    Ended,
    /// The request failed on this side: the engine must be told to stop.
    Abandoned,
}

pub(crate) struct Slot {
    state: Mutex<State>,
    limits: BufferLimits,
}

struct State {
    queue: VecDeque<SequenceDelta>,
    bytes: usize,
    /// Per sequence, whether it goes on.
    open: Vec<bool>,
    left: usize,
    /// Set once; comes out after the queue.
    failure: Option<Error>,
    ended: bool,
    waker: Option<Waker>,
}

impl Slot {
    /// A buffer for a request of `sequences` sequences.
    pub(crate) fn new(sequences: usize, limits: BufferLimits) -> Self {
        let state = State {
            queue: VecDeque::new(),
            bytes: 0,
            open: vec![true; sequences],
            left: sequences,
            failure: None,
            ended: false,
            waker: None,
        };
        Self { state: Mutex::new(state), limits }
    }

    /// Whether nothing more will be pushed.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.lock().ended
    }

    /// Whether it ended well and its reader has all of it.
    pub(crate) fn is_spent(&self) -> bool {
        let state = self.state.lock();
        state.ended && state.failure.is_none() && state.queue.is_empty()
    }

    /// Ends the request with a failure unless it has ended.
    pub(crate) fn fail(&self, error: Error) {
        self.state.lock().end(Some(error));
    }

    /// Takes the next piece of news.
    pub(crate) fn push(&self, mut delta: SequenceDelta) -> Pushed {
        let mut state = self.state.lock();
        if state.ended {
            return Pushed::Ended;
        }
        if let Some(error) = delta.error.take() {
            state.end(Some(error_from_proto(error)));
            return Pushed::Ended;
        }
        let index = delta.index as usize;
        let Some(open) = state.open.get_mut(index) else {
            let text = format!("the worker sent sequence {index} of a request that has {}", state.open.len());
            state.end(Some(Error::new(ErrorCode::UpstreamFailed, text)));
            return Pushed::Abandoned;
        };
        if delta.finish.is_some() && std::mem::take(open) {
            state.left -= 1;
        }
        state.store(delta);
        if state.left == 0 {
            state.end(None);
            return Pushed::Ended;
        }
        if state.queue.len() > self.limits.deltas || state.bytes > self.limits.bytes {
            let text = format!(
                "the client reads too slowly: {} deltas of {} bytes are waiting; read faster or ask for fewer logprobs",
                state.queue.len(),
                state.bytes
            );
            state.end(Some(Error::new(ErrorCode::ResourceExhausted, text)));
            return Pushed::Abandoned;
        }
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
        Pushed::Open
    }

    /// The next delta, the failure, or the end.
    pub(crate) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<Result<SequenceDelta, Error>>> {
        let mut state = self.state.lock();
        if let Some(delta) = state.queue.pop_front() {
            state.bytes -= weigh(&delta).min(state.bytes);
            return Poll::Ready(Some(Ok(delta)));
        }
        if let Some(error) = state.failure.take() {
            return Poll::Ready(Some(Err(error)));
        }
        if state.ended {
            return Poll::Ready(None);
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            state.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

impl State {
    fn end(&mut self, failure: Option<Error>) {
        if !self.ended {
            self.ended = true;
            self.failure = failure;
        }
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    /// Queues the delta, or merges it into the last one of its sequence if the reader lags.
    fn store(&mut self, delta: SequenceDelta) {
        self.bytes += weigh(&delta);
        if self.queue.len() >= MERGE_FROM
            && let Some(last) = self.queue.iter_mut().rev().find(|queued| queued.index == delta.index)
            && can_merge(last, &delta)
        {
            self.bytes -= EMPTY_BYTES;
            merge(last, delta);
        } else {
            self.queue.push_back(delta);
        }
    }
}

/// Whether `next` can be appended without changing what a reader learns.
fn can_merge(last: &SequenceDelta, next: &SequenceDelta) -> bool {
    last.finish.is_none()
        && last.input_logprobs.is_none()
        && next.input_logprobs.is_none()
        && next.prompt.is_none()
        && last.logprobs.is_some() == next.logprobs.is_some()
}

fn merge(last: &mut SequenceDelta, next: SequenceDelta) {
    last.token_ids.extend(next.token_ids);
    last.text.push_str(&next.text);
    if let (Some(columns), Some(more)) = (&mut last.logprobs, next.logprobs) {
        columns.token_ids.extend(more.token_ids);
        columns.logprobs.extend(more.logprobs);
        columns.top.extend(more.top);
        columns.chosen.extend(more.chosen);
    }
    last.finish = next.finish;
}

const EMPTY_BYTES: usize = size_of::<SequenceDelta>();

/// Memory of a queued delta, estimated. Additive under [`merge`] up to `EMPTY_BYTES`.
fn weigh(delta: &SequenceDelta) -> usize {
    let columns = |logprobs: &Option<TokenLogprobs>| {
        logprobs.as_ref().map_or(0, |columns| {
            let nested = |tops: &[crate::proto::TopLogprobs]| {
                tops.iter().map(|top| 48 + 8 * top.token_ids.len()).sum::<usize>()
            };
            8 * columns.token_ids.len() + nested(&columns.top) + nested(&columns.chosen)
        })
    };
    EMPTY_BYTES
        + 4 * delta.token_ids.len()
        + delta.text.len()
        + columns(&delta.logprobs)
        + columns(&delta.input_logprobs)
}

#[cfg(test)]
mod tests;
