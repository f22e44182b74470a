//! A client's connection as the HTTP server reads it: heads come whole, in time and with one reading, or not at all.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use super::framing::Framing;

/// Bytes read at a time while they are looked at.
const PIECE: usize = 8 << 10;
/// Pieces thrown away at a time behind a refused request.
const AWAY: usize = 32;

/// Wraps a client's stream.
pub(super) struct Screen<S> {
    inner: S,
    framing: Framing,
    /// Bytes that were read; those before `good` may be handed on, those before `given` have been.
    held: Vec<u8>,
    good: usize,
    given: usize,
    patience: Duration,
    /// Armed while a head is awaited: from the connection's start, and from the first byte of each later head.
    limit: Option<Pin<Box<Sleep>>>,
    fresh: bool,
    /// The client has ended, or brought no head in time.
    over: bool,
    /// A request was refused: what comes after it is thrown away.
    refused: bool,
}

impl<S> Screen<S> {
    /// A screen that waits `patience` for a head of at most `most` bytes.
    pub(super) fn new(inner: S, patience: Duration, most: usize) -> Self {
        Self {
            inner,
            framing: Framing::new(most),
            held: Vec::new(),
            good: 0,
            given: 0,
            patience,
            limit: None,
            fresh: true,
            over: false,
            refused: false,
        }
    }

    /// Hands on what is known to be good.
    fn give(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        let count = (self.good - self.given).min(buffer.remaining());
        buffer.put_slice(&self.held[self.given..self.given + count]);
        self.given += count;
        if self.given == self.held.len() {
            self.held.clear();
            (self.good, self.given) = (0, 0);
        }
        count > 0
    }

    /// Looks at what is held.
    fn look(&mut self) {
        loop {
            match self.framing.take(&self.held[self.good..]) {
                Ok(0) => break,
                Ok(count) => self.good += count,
                Err(fault) => {
                    tracing::debug!(?fault, "a request was refused");
                    self.held.truncate(self.good);
                    self.held.extend_from_slice(&fault.stand_in());
                    self.good = self.held.len();
                    self.refused = true;
                    break;
                }
            }
            if self.good == self.held.len() {
                break;
            }
        }
        self.fresh &= self.good == 0;
    }

    fn poll_limit(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let awaited = self.framing.in_head() && (self.fresh || self.held.len() > self.good);
        if !awaited {
            self.limit = None;
            return Poll::Pending;
        }
        let patience = self.patience;
        let limit = self.limit.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        ready!(limit.as_mut().poll(cx));
        self.over = true;
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "no whole head came in time")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Screen<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.give(buffer) || this.over {
                return Poll::Ready(Ok(()));
            }
            if this.refused {
                return this.poll_away(cx);
            }
            let unseen = this.framing.unseen();
            if this.held.is_empty() && unseen != Some(0) {
                return this.poll_through(cx, buffer, unseen);
            }
            let mut piece = [std::mem::MaybeUninit::uninit(); PIECE];
            let mut piece = ReadBuf::uninit(&mut piece);
            match Pin::new(&mut this.inner).poll_read(cx, &mut piece) {
                Poll::Pending => return this.poll_limit(cx),
                Poll::Ready(outcome) => outcome?,
            }
            if piece.filled().is_empty() {
                this.over = true;
                continue;
            }
            this.held.extend_from_slice(piece.filled());
            this.look();
        }
    }
}

impl<S: AsyncRead + Unpin> Screen<S> {
    /// Never ends by itself: the server would take an end for a client that does not wait for its answer. What is left
    /// unread would make the system reset the connection, and the answer might be lost with it.
    fn poll_away(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut piece = [std::mem::MaybeUninit::uninit(); PIECE];
        for _ in 0..AWAY {
            let mut piece = ReadBuf::uninit(&mut piece);
            match Pin::new(&mut self.inner).poll_read(cx, &mut piece) {
                Poll::Ready(Ok(())) if !piece.filled().is_empty() => {}
                _ => break,
            }
        }
        Poll::Pending
    }

    /// A body is read where it belongs, without a copy; what comes after its end is held.
    fn poll_through(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
        most: Option<u64>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buffer))?;
        let count = buffer.filled().len() - before;
        self.over |= count == 0;
        let own = most.map_or(count, |most| count.min(usize::try_from(most).unwrap_or(usize::MAX)));
        self.framing.passed(own as u64);
        if own < count {
            self.held.extend_from_slice(&buffer.filled()[before + own..]);
            buffer.set_filled(before + own);
            self.look();
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Screen<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
