//! Reads a request's body without ever holding more than the limit.

use std::time::Duration;

use axum::body::Body;
use branchline_core::{Error, ErrorCode, Result};
use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tokio::time::{Instant, timeout_at};

/// Bytes a second that a body must bring on average once `stall` has passed: a trickle holds a connection too.
const LEAST_RATE: u64 = 1024;
/// How long, and how many bytes of, a refused body may still arrive.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 4 << 20;

/// How much body a request may have, and how long it may pause.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimit {
    /// Bytes.
    pub bytes: usize,
    /// Longest wait for the next piece, and the time after which the body must have come at a least rate.
    pub stall: Duration,
}

/// One body's clock.
struct Pace {
    limit: BodyLimit,
    started: Instant,
    received: u64,
}

impl Pace {
    /// When the next piece must have come.
    fn deadline(&self) -> Instant {
        let earned = Duration::from_millis(self.received * 1000 / LEAST_RATE);
        (Instant::now() + self.limit.stall).min(self.started + self.limit.stall + earned)
    }
}

/// The whole body. A body in one piece is handed on without a copy.
///
/// # Errors
/// `PayloadTooLarge` past the limit (at once if the length is declared), `DeadlineExceeded` if the client
/// stops sending, `InvalidArgument` if the body breaks off.
pub async fn read_body(mut body: Body, limit: BodyLimit) -> Result<Bytes> {
    let declared = body.size_hint().lower();
    if usize::try_from(declared).map_or(true, |bytes| bytes > limit.bytes) {
        return Err(refused(body, limit.bytes));
    }
    let mut pace = Pace { limit, started: Instant::now(), received: 0 };
    let Some(first) = next_piece(&mut body, &mut pace).await? else { return Ok(Bytes::new()) };
    if first.len() > limit.bytes {
        return Err(refused(body, limit.bytes));
    }
    if body.is_end_stream() {
        return Ok(first);
    }
    // The declared length is a promise of at most `limit` bytes; memory is only touched as they come.
    let mut whole = BytesMut::with_capacity(first.len().max(usize::try_from(declared).unwrap_or(0)));
    whole.extend_from_slice(&first);
    while let Some(piece) = next_piece(&mut body, &mut pace).await? {
        if whole.len() + piece.len() > limit.bytes {
            return Err(refused(body, limit.bytes));
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}

async fn next_piece(body: &mut Body, pace: &mut Pace) -> Result<Option<Bytes>> {
    loop {
        let frame = match timeout_at(pace.deadline(), body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => return Ok(None),
            Ok(Some(Err(error))) => {
                // What counts bytes on their way has words of its own.
                let error = match error.into_inner().downcast::<Error>() {
                    Ok(own) => return Err(*own),
                    Err(other) => other,
                };
                let message = format!("the body broke off ({error}); send all of it");
                return Err(Error::new(ErrorCode::InvalidArgument, message));
            }
            Err(_) => {
                let message =
                    format!("the body came too slowly after {} bytes; send all of it at once", pace.received);
                return Err(Error::new(ErrorCode::DeadlineExceeded, message));
            }
        };
        // Trailers are not part of the body.
        if let Ok(data) = frame.into_data() {
            pace.received += data.len() as u64;
            return Ok(Some(data));
        }
    }
}

/// Says no at once, and lets a little more arrive unread: a connection that is closed on bytes under way is reset, and
/// the client loses the answer with it (RFC 9112, section 9.6).
fn refused(mut body: Body, limit: usize) -> Error {
    tokio::spawn(async move {
        let mut left = LINGER_BYTES;
        let rest = async {
            while let Some(Ok(frame)) = body.frame().await {
                left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
                if left == 0 {
                    break;
                }
            }
        };
        drop(tokio::time::timeout(LINGER, rest).await);
    });
    too_large(limit)
}

fn too_large(limit: usize) -> Error {
    let message = format!("the body is over {limit} bytes; send less, or raise --max-payload-size");
    Error::new(ErrorCode::PayloadTooLarge, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;

    fn pieces(pieces: &[&'static str]) -> Body {
        let pieces: Vec<std::io::Result<&'static str>> = pieces.iter().map(|piece| Ok(*piece)).collect();
        Body::from_stream(stream::iter(pieces))
    }

    fn limit(bytes: usize) -> BodyLimit {
        BodyLimit { bytes, stall: Duration::from_secs(5) }
    }

    #[tokio::test]
    async fn pieces_are_joined_up_to_the_limit_and_refused_past_it() {
        assert_eq!(read_body(pieces(&["ab", "cd"]), limit(4)).await.as_deref(), Ok(&b"abcd"[..]));
        let refusal = read_body(pieces(&["ab", "cd", "e"]), limit(4)).await.expect_err("five bytes");
        assert_eq!(refusal.code, ErrorCode::PayloadTooLarge);
        assert_eq!(read_body(Body::empty(), limit(0)).await.as_deref(), Ok(&b""[..]));
    }

    #[tokio::test]
    async fn a_declared_length_past_the_limit_is_refused_unread() {
        let refusal = read_body(Body::from(vec![0; 5]), limit(4)).await.expect_err("five bytes");
        assert_eq!(refusal.code, ErrorCode::PayloadTooLarge);
    }

    #[tokio::test]
    async fn an_endless_body_is_refused_after_the_limit() {
        let endless = Body::from_stream(stream::repeat_with(|| std::io::Result::Ok("abc")));
        assert_eq!(
            read_body(endless, limit(1000)).await.expect_err("endless").code,
            ErrorCode::PayloadTooLarge
        );
    }

    #[tokio::test]
    async fn a_client_that_stops_sending_is_given_up() {
        let silent = Body::from_stream(stream::pending::<std::io::Result<Bytes>>());
        let limit = BodyLimit { bytes: 10, stall: Duration::from_millis(5) };
        assert_eq!(read_body(silent, limit).await.expect_err("silence").code, ErrorCode::DeadlineExceeded);
    }

    #[tokio::test]
    async fn a_trickle_is_given_up_and_a_slow_line_is_not() {
        let every = |bytes: usize, pause: u64| {
            Body::from_stream(stream::unfold((), move |()| async move {
                tokio::time::sleep(Duration::from_millis(pause)).await;
                Some((std::io::Result::Ok(Bytes::from(vec![b'x'; bytes])), ()))
            }))
        };
        let limit = BodyLimit { bytes: 100_000, stall: Duration::from_millis(200) };
        let started = Instant::now();
        let refusal = read_body(every(1, 20), limit).await.expect_err("fifty bytes a second");
        assert_eq!(refusal.code, ErrorCode::DeadlineExceeded);
        assert!(started.elapsed() >= Duration::from_millis(200), "{:?}", started.elapsed());
        let refusal = read_body(every(2_048, 5), limit).await.expect_err("endless, but not slow");
        assert_eq!(refusal.code, ErrorCode::PayloadTooLarge);
    }

    #[tokio::test]
    async fn a_body_that_breaks_off_is_named() {
        let broken = Body::from_stream(stream::iter([Ok("ab"), Err(std::io::Error::other("reset"))]));
        assert_eq!(read_body(broken, limit(10)).await.expect_err("broken").code, ErrorCode::InvalidArgument);
    }
}
