//! Answers of HTTP workers on their way to the client: bytes untouched, pulled only as fast as the client reads.
//!
//! Dropping a body drops the worker's connection, which is how a client's leaving reaches the worker.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use branchline_core::{Error, ErrorCode};
use branchline_worker::{LoadGuard, ResponseBody, Verdict};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};

use super::splice::Meeting;
use super::split::Beside;
use crate::app::App;

/// Limits of an answer that has begun.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Longest silence.
    pub(super) idle: Option<Duration>,
    /// When the whole request must be over.
    pub(super) deadline: Option<Instant>,
}

/// A worker's body with its limits and its place on the worker's load.
pub(super) struct Upstream {
    inner: Option<ResponseBody>,
    guard: Option<LoadGuard>,
    /// What a whole answer says of the worker.
    good: Verdict,
    limits: Limits,
    /// When the worker last sent something; the timer is only moved when it fires.
    heard: Instant,
    timer: Option<Pin<Box<Sleep>>>,
    begun: bool,
    /// Kept back for a better one: nobody has asked for it yet, and perhaps nobody will.
    held: bool,
    /// Data that was read to see whether there is any; comes first.
    unread: Option<Bytes>,
    /// The other half of a split request: it ends with this one, and its room is free then.
    beside: Option<(Beside, Meeting)>,
    app: Arc<App>,
}

impl Upstream {
    pub(super) fn new(
        inner: ResponseBody,
        guard: LoadGuard,
        good: Verdict,
        limits: Limits,
        app: Arc<App>,
    ) -> Self {
        let heard = Instant::now();
        let mut upstream = Self {
            inner: Some(inner),
            guard: Some(guard),
            good,
            limits,
            heard,
            timer: None,
            begun: false,
            held: false,
            unread: None,
            beside: None,
            app,
        };
        upstream.timer = upstream.next_limit().map(|at| Box::pin(sleep_until(at)));
        upstream
    }

    /// The same as an answer that is kept back.
    pub(super) fn hold(self) -> Self {
        let mut held = self;
        held.held = true;
        held
    }

    /// Puts back what was read, and ties the answer's other half to it.
    pub(super) fn unread(&mut self, data: Option<Bytes>, beside: Beside, meeting: Meeting) {
        self.unread = data;
        self.beside = Some((beside, meeting));
    }

    fn next_limit(&self) -> Option<Instant> {
        let idle = self.limits.idle.map(|idle| self.heard + idle);
        [idle, self.limits.deadline].into_iter().flatten().min()
    }

    /// The next piece of data, `None` at a clean end.
    pub(super) fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Error>>> {
        self.held = false;
        if let Some(data) = self.unread.take() {
            return Poll::Ready(Some(Ok(data)));
        }
        loop {
            let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
            match Pin::new(inner).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.heard = Instant::now();
                    // Trailers of a worker are of no use to a client of ours.
                    let Ok(data) = frame.into_data() else { continue };
                    if data.is_empty() {
                        continue;
                    }
                    if let Some(guard) = &mut self.guard {
                        match std::mem::replace(&mut self.begun, true) {
                            true => guard.progressed(),
                            false => guard.prefilled(),
                        }
                    }
                    return Poll::Ready(Some(Ok(data)));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(self.fail(error)))),
                Poll::Ready(None) => {
                    self.inner = None;
                    self.timer = None;
                    return Poll::Ready(None);
                }
                Poll::Pending => {
                    if let Some(guard) = &mut self.guard {
                        guard.awaits();
                    }
                    ready!(self.poll_limit(cx));
                    let error = self.limit_error();
                    return Poll::Ready(Some(Err(self.fail(error))));
                }
            }
        }
    }

    /// Ready once a limit has passed.
    fn poll_limit(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let Some(limit) = self.next_limit() else { return Poll::Pending };
            let Some(timer) = &mut self.timer else { return Poll::Pending };
            ready!(timer.as_mut().poll(cx));
            if Instant::now() >= limit {
                return Poll::Ready(());
            }
            timer.as_mut().reset(limit);
        }
    }

    fn limit_error(&self) -> Error {
        match self.limits.deadline {
            Some(deadline) if Instant::now() >= deadline => {
                let message = "the request took longer than --request-timeout, or its own deadline, allows; ask for \
                               less output or for more time";
                Error::new(ErrorCode::DeadlineExceeded, message)
            }
            _ => {
                let silence = self.limits.idle.unwrap_or_default();
                let message = format!("the worker was silent for {silence:?} (--idle-timeout); try again");
                Error::new(ErrorCode::UpstreamFailed, message)
            }
        }
    }

    /// Counts an error that the client sees in the stream.
    pub(super) fn count_error(&self, code: ErrorCode) {
        self.app.metrics.errors.with([code.name()]).inc();
    }

    fn fail(&mut self, error: Error) -> Error {
        // Time that ran out says nothing: the answer may just have been long.
        let over = error.code == ErrorCode::DeadlineExceeded;
        self.settle(if over { Verdict::Neutral } else { Verdict::Failure });
        tracing::warn!(error = %error, "an answer of a worker broke off");
        error
    }

    /// The answer was whole.
    pub(super) fn succeed(&mut self) {
        self.settle(self.good);
    }

    /// The answer broke off, however tidily the worker closed it.
    pub(super) fn broke(&mut self) {
        self.settle(Verdict::Failure);
    }

    fn settle(&mut self, verdict: Verdict) {
        self.inner = None;
        self.timer = None;
        if let Some(mut guard) = self.guard.take() {
            guard.settle(verdict);
        }
    }

    /// The protocol's end was seen: the client is done, the connection may be used again once the body ends too.
    pub(super) fn finish(&mut self, cx: &mut Context<'_>) {
        if let Some(mut inner) = self.inner.take()
            && Pin::new(&mut inner).poll_frame(cx).is_pending()
        {
            // Mostly the end follows in the next packet; a worker that keeps it open loses the connection.
            self.app.tracker.spawn(async move {
                let end = std::future::poll_fn(move |cx| Pin::new(&mut inner).poll_frame(cx).map(drop));
                drop(tokio::time::timeout(Duration::from_millis(200), end).await);
            });
        }
        self.succeed();
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        // A body whose length is known is not polled for its end.
        if self.inner.as_ref().is_some_and(Body::is_end_stream) {
            self.succeed();
        }
        // Neither ended nor broken: the client left.
        if !self.held && self.inner.as_ref().is_some_and(|inner| !inner.is_end_stream()) {
            self.app.metrics.aborts.with(["client"]).inc();
        }
    }
}

/// A body that is not an event stream. If the worker breaks off, so does the client's connection.
pub(super) struct Plain {
    upstream: Upstream,
    hint: SizeHint,
}

impl Plain {
    pub(super) fn new(upstream: Upstream) -> Self {
        let mut hint = upstream.inner.as_ref().map(Body::size_hint).unwrap_or_default();
        let unread = upstream.unread.as_ref().map_or(0, Bytes::len) as u64;
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + unread);
        }
        hint.set_lower(hint.lower() + unread);
        Self { upstream, hint }
    }
}

impl Body for Plain {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let polled = ready!(self.upstream.poll_data(cx));
        match &polled {
            Some(Err(error)) => self.upstream.count_error(error.code),
            Some(Ok(_)) => {}
            None => self.upstream.succeed(),
        }
        Poll::Ready(polled.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.upstream.unread.is_none() && self.upstream.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.hint
    }
}
