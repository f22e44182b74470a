//! Event streams: what every family's stream has in common.
//!
//! The status is held back until the first piece or the first silence of a keep-alive interval, so that a refusal
//! has its own status; afterwards a failure is one error event and the end. Pulled only as fast as the client
//! reads; dropped with the connection, which cancels the jobs at once.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use branchline_core::{Error, Result};
use branchline_protocol::{ErrorBody, sse};
use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _, stream};
use http::{HeaderValue, header};
use serde::Serialize;
use tokio::time::{Instant, timeout_at};

use crate::app::App;
use crate::dispatch::{self, Batch, Item, Running};

/// Pieces that are ready are sent together up to about this many bytes.
const COALESCE_BYTES: usize = 32 * 1024;

/// How a family writes its events.
pub(super) trait Family: Send + 'static {
    /// Writes what a piece says; possibly nothing.
    fn piece(&mut self, item: Item, out: &mut Out) -> Result<()>;

    /// Writes what comes after the last piece, the end mark included.
    fn finish(&mut self, out: &mut Out) -> Result<()>;

    /// Writes that the answer failed: one event, no finish reason, no end mark.
    fn fail(&mut self, error: &Error, out: &mut Out) {
        out.raw(b"data: ");
        out.raw(&ErrorBody::from(error).to_json());
        out.raw(b"\n\n");
    }
}

/// Events on their way out.
#[derive(Debug, Default)]
pub(super) struct Out(Vec<u8>);

impl Out {
    /// Adds one event.
    pub(super) fn json(&mut self, value: &impl Serialize) -> Result<()> {
        let event = sse::json(value)
            .map_err(|error| Error::internal(format!("an event could not be written: {error}")))?;
        self.raw(&event);
        Ok(())
    }

    /// Adds one event with a name.
    pub(super) fn named(&mut self, event: &str, value: &impl Serialize) -> Result<()> {
        let event = sse::named(event, value)
            .map_err(|error| Error::internal(format!("an event could not be written: {error}")))?;
        self.raw(&event);
        Ok(())
    }

    /// Adds the end mark.
    pub(super) fn done(&mut self) {
        self.raw(&sse::DONE);
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn take(&mut self) -> Bytes {
        std::mem::take(&mut self.0).into()
    }
}

struct Events<F> {
    app: Arc<App>,
    batch: Batch,
    family: F,
    out: Out,
    over: bool,
}

/// Starts the stream of an answer.
///
/// # Errors
/// The failure of a job before its first piece, if it comes within one keep-alive interval.
pub(super) async fn respond<F: Family>(app: &Arc<App>, jobs: Vec<Running>, family: F) -> Result<Response> {
    let mut events =
        Events { app: Arc::clone(app), batch: Batch::new(jobs), family, out: Out::default(), over: false };
    match events.next_item().await {
        Some(Some(item)) => events.family.piece(item?, &mut events.out)?,
        Some(None) => events.finish(),
        None => events.out.raw(&sse::KEEP_ALIVE),
    }
    let body = Body::from_stream(stream::unfold(events, async |mut events| {
        let bytes = events.step().await?;
        Some((Ok::<_, Infallible>(bytes), events))
    }));
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks nginx not to collect the stream.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

impl<F: Family> Events<F> {
    /// The next bytes; `None` at the end.
    async fn step(&mut self) -> Option<Bytes> {
        loop {
            self.drain();
            if !self.out.0.is_empty() {
                return Some(self.out.take());
            }
            if self.over {
                return None;
            }
            match self.next_item().await {
                Some(item) => self.accept(item),
                None => self.out.raw(&sse::KEEP_ALIVE),
            }
        }
    }

    /// `None` after a keep-alive interval without news.
    async fn next_item(&mut self) -> Option<Option<Result<Item>>> {
        match self.app.options.keep_alive_interval {
            Some(interval) => timeout_at(Instant::now() + interval, self.batch.next()).await.ok(),
            None => Some(self.batch.next().await),
        }
    }

    /// Takes what is ready without waiting.
    fn drain(&mut self) {
        while !self.over && self.out.0.len() < COALESCE_BYTES {
            let Some(item) = self.batch.next().now_or_never() else { return };
            self.accept(item);
        }
    }

    fn accept(&mut self, item: Option<Result<Item>>) {
        match item {
            Some(Ok(item)) => {
                if let Err(error) = self.family.piece(item, &mut self.out) {
                    self.fail(&error);
                }
            }
            Some(Err(error)) => self.fail(&error),
            None => self.finish(),
        }
    }

    fn finish(&mut self) {
        self.over = true;
        if let Err(error) = self.family.finish(&mut self.out) {
            self.fail(&error);
        }
    }

    /// The family's own error event, and the end.
    fn fail(&mut self, error: &Error) {
        self.over = true;
        dispatch::failed(&self.app.metrics, error);
        self.family.fail(error, &mut self.out);
        // The other jobs of the batch are of no use to anybody now.
        self.batch = Batch::new(Vec::new());
    }
}
