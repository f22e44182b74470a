//! Bytes of all request bodies that are held at once: a small declared length is taken before anything is read, the rest
//! piece by piece, so that nobody fills the room with what he only announces.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use branchline_core::{Error, ErrorCode};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};

/// Bytes of a declared length that are taken before they come.
pub(super) const AHEAD: usize = 1 << 20;

/// The bytes that may be held.
#[derive(Debug)]
pub(super) struct Flight {
    most: usize,
    held: AtomicUsize,
}

/// What one request holds; given back when dropped.
#[derive(Debug)]
pub(super) struct Held {
    flight: Arc<Flight>,
    bytes: AtomicUsize,
    /// Of those, what was taken ahead and has not come.
    ahead: AtomicUsize,
}

impl Flight {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, held: AtomicUsize::new(0) })
    }

    /// Bytes that are held.
    pub(super) fn bytes(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }

    /// Room for a request of so many bytes.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Result<Arc<Held>, Error> {
        if bytes > self.most {
            let message =
                format!("the body is over {} bytes; send less, or raise --max-bytes-in-flight", self.most);
            return Err(Error::new(ErrorCode::PayloadTooLarge, message));
        }
        if self.bytes().saturating_add(bytes) > self.most {
            return Err(full());
        }
        let ahead = bytes.min(AHEAD);
        let held =
            Held { flight: Arc::clone(self), bytes: AtomicUsize::new(0), ahead: AtomicUsize::new(ahead) };
        held.grow(ahead)?;
        Ok(Arc::new(held))
    }
}

impl Held {
    fn grow(&self, more: usize) -> Result<(), Error> {
        let flight = &self.flight;
        let room = |held: usize| held.checked_add(more).filter(|held| *held <= flight.most);
        match flight.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, room) {
            Ok(_) => {
                self.bytes.fetch_add(more, Ordering::AcqRel);
                Ok(())
            }
            Err(_) => Err(full()),
        }
    }

    /// So many bytes have come.
    fn came(&self, bytes: usize) -> Result<(), Error> {
        let known = self.ahead.load(Ordering::Acquire).min(bytes);
        self.ahead.fetch_sub(known, Ordering::AcqRel);
        match bytes - known {
            0 => Ok(()),
            more => self.grow(more),
        }
    }

    /// The body, counted as it comes.
    pub(super) fn count(self: &Arc<Self>, body: Body) -> Body {
        Body::new(Metered { body, held: Arc::clone(self) })
    }
}

fn full() -> Error {
    let message =
        "the bodies of running requests are all that may be held (--max-bytes-in-flight); try again later";
    Error::new(ErrorCode::ResourceExhausted, message).with_retry_after(Duration::from_secs(1))
}

impl Drop for Held {
    fn drop(&mut self) {
        self.flight.held.fetch_sub(*self.bytes.get_mut(), Ordering::AcqRel);
    }
}

/// A body that was not taken whole.
struct Metered {
    body: Body,
    held: Arc<Held>,
}

impl HttpBody for Metered {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        Poll::Ready(match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Ok(frame)) => {
                let more = frame.data_ref().map_or(0, Bytes::len);
                Some(self.held.came(more).map(|()| frame).map_err(Into::into))
            }
            Some(Err(error)) => Some(Err(error.into())),
            None => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt as _;

    #[tokio::test]
    async fn what_is_held_is_bounded_over_all_requests_and_comes_back() {
        let flight = Flight::new(10);
        let first = flight.take(6).expect("room");
        assert_eq!(flight.take(11).expect_err("never any room").code, ErrorCode::PayloadTooLarge);
        assert_eq!(flight.take(5).expect_err("no room").code, ErrorCode::ResourceExhausted);
        let second = flight.take(0).expect("nothing yet");
        let pieces = ["abc", "d", "e"].map(Ok::<_, std::io::Error>);
        let mut body = second.count(Body::from_stream(futures_util::stream::iter(pieces)));
        for _ in 0..2 {
            assert!(body.frame().await.expect("a piece").is_ok());
        }
        let error = body.frame().await.expect("an end").expect_err("no room").into_inner();
        assert!(error.downcast::<Error>().is_ok_and(|error| error.retry_after.is_some()));
        drop((first, body));
        assert_eq!(flight.bytes(), 4);
        drop(second);
        assert_eq!(flight.bytes(), 0);
    }

    #[tokio::test]
    async fn what_is_only_announced_takes_little_room() {
        let flight = Flight::new(10 * AHEAD);
        let held = flight.take(10 * AHEAD).expect("room");
        assert_eq!(flight.bytes(), AHEAD);
        assert_eq!(
            flight.take(10 * AHEAD).expect_err("it could not come whole").code,
            ErrorCode::ResourceExhausted
        );
        let piece = || Ok::<_, std::io::Error>(Bytes::from(vec![0; AHEAD]));
        let mut body = held.count(Body::from_stream(futures_util::stream::iter([piece(), piece()])));
        for seen in [AHEAD, 2 * AHEAD] {
            assert!(body.frame().await.expect("a piece").is_ok());
            assert_eq!(flight.bytes(), seen, "what was taken ahead is not taken twice");
        }
        drop((held, body));
        assert_eq!(flight.bytes(), 0);
    }
}
