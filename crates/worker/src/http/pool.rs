//! Connections to one HTTP worker: opened on demand, kept while idle, given back when an answer has ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result};
use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::dial::Dialer;

/// A connection whose answer has just ended becomes ready within a turn of its task; longer means it is stuck.
const SETTLE: Duration = Duration::from_millis(2);

/// No server closes a connection sooner than this after an answer: a younger one that breaks was broken by the request.
const STALE_AFTER: Duration = Duration::from_secs(1);

/// Idle connections and how to make more.
#[derive(Debug)]
pub(crate) struct Pool {
    pub(crate) dialer: Dialer,
    pub(crate) connect_timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) idle_limit: usize,
    pub(crate) tracker: TaskTracker,
    /// Ends every connection's task.
    pub(crate) cancel: CancellationToken,
    /// Oldest first.
    pub(crate) idle: Mutex<VecDeque<Idle>>,
}

#[derive(Debug)]
pub(crate) struct Idle {
    sender: SendRequest<Full<Bytes>>,
    since: Instant,
}

/// A connection in use by one exchange. Dropping it without `give_back` closes it.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) sender: SendRequest<Full<Bytes>>,
    /// Has carried an exchange before.
    pub(crate) reused: bool,
    /// Was idle for so long that the worker may be closing it just now.
    pub(crate) stale: bool,
    pool: Arc<Pool>,
}

impl Lease {
    /// Makes the connection available to the next exchange.
    pub(crate) fn give_back(self) {
        let mut idle = self.pool.idle.lock();
        self.pool.prune(&mut idle);
        if !self.sender.is_closed() && idle.len() < self.pool.idle_limit {
            idle.push_back(Idle { sender: self.sender, since: Instant::now() });
        }
    }
}

impl Pool {
    /// An idle connection (the most recently used), or a new one.
    pub(crate) async fn checkout(self: &Arc<Self>) -> Result<Lease> {
        loop {
            let Some(Idle { mut sender, since }) = self.pop() else { break };
            if let Ok(Ok(())) = tokio::time::timeout(SETTLE, sender.ready()).await {
                let stale = since.elapsed() >= STALE_AFTER;
                return Ok(Lease { sender, reused: true, stale, pool: self.clone() });
            }
        }
        self.connect().await
    }

    fn pop(&self) -> Option<Idle> {
        let mut idle = self.idle.lock();
        self.prune(&mut idle);
        idle.pop_back()
    }

    /// Closes connections that were idle for too long.
    pub(crate) fn prune(&self, idle: &mut VecDeque<Idle>) {
        while idle
            .front()
            .is_some_and(|oldest| oldest.since.elapsed() > self.idle_timeout || oldest.sender.is_closed())
        {
            idle.pop_front();
        }
    }

    /// A new connection.
    pub(crate) async fn connect(self: &Arc<Self>) -> Result<Lease> {
        let fail = |cause: &dyn std::fmt::Display| {
            // Clients learn what happened, not where.
            tracing::debug!(worker = self.dialer.authority(), %cause, "the worker cannot be reached");
            Error::new(ErrorCode::Unavailable, "the worker cannot be reached; try again")
                .with_retry_after(Duration::from_secs(1))
        };
        let stream = tokio::time::timeout(self.connect_timeout, self.dialer.connect())
            .await
            .map_err(|_| fail(&format!("no connection within {} ms", self.connect_timeout.as_millis())))?
            .map_err(|cause| fail(&cause))?;
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|cause| fail(&cause))?;
        let cancel = self.cancel.clone();
        self.tracker.spawn(async move {
            tokio::select! {
                () = cancel.cancelled() => {}
                // Failures reach the exchange that uses the connection.
                _ = connection => {}
            }
        });
        Ok(Lease { sender, reused: false, stale: false, pool: self.clone() })
    }
}
