//! One `Attach` stream: numbers requests, sends what they say, and hands each frame's deltas to their buffers.
//!
//! Lock order: a mux's state, then a slot's. Neither is held across an await.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use branchline_core::{Error, ErrorCode, Result};
use futures_util::Stream;
use parking_lot::Mutex;

use super::slot::{Pushed, Slot};
use crate::options::BufferLimits;
use crate::proto::{
    AttachRequest, Cancel, GenerateRequest, Hello, StepFrame, Submit, attach_request::Message,
};

/// Requests that may wait for the engine to read them.
const OUTBOUND_MESSAGES: usize = 4096;
/// Prompt tokens that may wait for the engine to read them.
const OUTBOUND_TOKENS: usize = 16 << 20;

pub(crate) struct Mux {
    state: Mutex<State>,
}

struct State {
    slots: HashMap<u64, Arc<Slot>>,
    /// Last handle given; never reused on a stream.
    handle: u64,
    outbound: VecDeque<AttachRequest>,
    outbound_tokens: usize,
    waker: Option<Waker>,
    /// Why the stream ended.
    closed: Option<Error>,
}

impl Mux {
    /// A stream that greets first.
    pub(crate) fn new(hello: Hello) -> Arc<Self> {
        let state = State {
            slots: HashMap::new(),
            handle: 0,
            outbound: VecDeque::from([AttachRequest { message: Some(Message::Hello(hello)) }]),
            outbound_tokens: 0,
            waker: None,
            closed: None,
        };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Numbers and queues a request.
    pub(crate) fn submit(
        &self,
        request: GenerateRequest,
        sequences: usize,
        limits: BufferLimits,
    ) -> Result<(u64, Arc<Slot>)> {
        let mut state = self.state.lock();
        if let Some(error) = &state.closed {
            return Err(Error::new(ErrorCode::Unavailable, error.message.clone()));
        }
        if state.outbound.len() >= OUTBOUND_MESSAGES || state.outbound_tokens >= OUTBOUND_TOKENS {
            let text =
                format!("the worker has not read its last {} messages; try later", state.outbound.len());
            return Err(Error::new(ErrorCode::ResourceExhausted, text)
                .with_retry_after(std::time::Duration::from_secs(1)));
        }
        state.handle += 1;
        let handle = state.handle;
        let slot = Arc::new(Slot::new(sequences, limits));
        state.slots.insert(handle, slot.clone());
        state.outbound_tokens += request.token_ids.len();
        state.send(Message::Submit(Submit { handle, request: Some(request) }));
        Ok((handle, slot))
    }

    /// Forgets a request and tells the engine to stop it. Nothing happens if it has ended.
    pub(crate) fn cancel(&self, handle: u64) {
        let mut state = self.state.lock();
        if state.slots.remove(&handle).is_some() && state.closed.is_none() {
            state.send(Message::Cancel(Cancel { handle }));
        }
    }

    /// Hands out a frame. Deltas of forgotten requests are dropped: a cancelled one still gets its end.
    pub(crate) fn dispatch(&self, frame: StepFrame) {
        // One lock for the frame; a slot's own lock is held for one push.
        let mut state = self.state.lock();
        for delta in frame.deltas {
            let handle = delta.handle;
            let Some(slot) = state.slots.get(&handle) else { continue };
            match slot.push(delta) {
                Pushed::Open => {}
                Pushed::Ended => {
                    state.slots.remove(&handle);
                }
                Pushed::Abandoned => {
                    state.slots.remove(&handle);
                    state.send(Message::Cancel(Cancel { handle }));
                }
            }
        }
    }

    /// Fails every live request and refuses new ones.
    pub(crate) fn close(&self, error: &Error) {
        let mut state = self.state.lock();
        state.closed.get_or_insert_with(|| error.clone());
        state.outbound.clear();
        for (_, slot) in state.slots.drain() {
            slot.fail(error.clone());
        }
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
    }
}

impl State {
    fn send(&mut self, message: Message) {
        self.outbound.push_back(AttachRequest { message: Some(message) });
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// The messages of a mux as the stream tonic sends. Ends when the mux is closed.
pub(crate) struct Outbound(pub(crate) Arc<Mux>);

impl Stream for Outbound {
    type Item = AttachRequest;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<AttachRequest>> {
        let mut state = self.0.state.lock();
        if let Some(message) = state.outbound.pop_front() {
            if let Some(Message::Submit(Submit { request: Some(request), .. })) = &message.message {
                state.outbound_tokens -= request.token_ids.len();
            }
            return Poll::Ready(Some(message));
        }
        if state.closed.is_some() {
            return Poll::Ready(None);
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}
