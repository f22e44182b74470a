//! The bytes of one connection: reads requests, plays scripts, notices a client that goes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Recorded, Reply, Step};

/// How an exchange ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The answer is whole; another request may come.
    Next,
    /// The script ended the connection.
    Closed,
    /// The client went before the script's end.
    Aborted,
}

pub(super) struct Exchange {
    stream: TcpStream,
    read: BytesMut,
}

impl Exchange {
    pub(super) fn new(stream: TcpStream) -> Self {
        // Small chunks must leave as they are written.
        let _ = stream.set_nodelay(true);
        Self { stream, read: BytesMut::new() }
    }

    /// The next request; `None` when the client is done or speaks no HTTP.
    pub(super) async fn read_request(&mut self) -> Option<Recorded> {
        let end = loop {
            if let Some(end) = self.read.windows(4).position(|window| window == b"\r\n\r\n") {
                break end;
            }
            self.fill().await?;
        };
        let head = String::from_utf8_lossy(&self.read.split_to(end)).into_owned();
        self.read.advance(4);
        let mut lines = head.split("\r\n");
        let mut first = lines.next()?.split(' ');
        let (method, target) = (first.next()?.to_owned(), first.next()?.to_owned());
        let headers: Vec<(String, String)> =
            lines.filter_map(|line| line.split_once(':')).map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect();
        let mut request = Recorded { method, target, headers, body: Bytes::new() };
        request.body = match (request.header("transfer-encoding"), request.header("content-length")) {
            (Some(_), _) => self.read_chunked().await?,
            (None, Some(length)) => self.read_exact(length.parse().ok()?).await?,
            (None, None) => Bytes::new(),
        };
        Some(request)
    }

    async fn fill(&mut self) -> Option<()> {
        match self.stream.read_buf(&mut self.read).await {
            Ok(0) | Err(_) => None,
            Ok(_) => Some(()),
        }
    }

    async fn read_exact(&mut self, length: usize) -> Option<Bytes> {
        while self.read.len() < length {
            self.fill().await?;
        }
        Some(self.read.split_to(length).freeze())
    }

    async fn read_chunked(&mut self) -> Option<Bytes> {
        let mut body = BytesMut::new();
        loop {
            let end = loop {
                if let Some(end) = self.read.windows(2).position(|window| window == b"\r\n") {
                    break end;
                }
                self.fill().await?;
            };
            let line = self.read.split_to(end);
            let length = usize::from_str_radix(std::str::from_utf8(&line).ok()?.trim(), 16).ok()?;
            self.read.advance(2);
            body.extend_from_slice(&self.read_exact(length + 2).await?[..length]);
            if length == 0 {
                return Some(body.freeze());
            }
        }
    }

    /// Plays a script to its end.
    pub(super) async fn play(&mut self, reply: &Reply, sent: &AtomicU64) -> Ended {
        for step in &reply.delay {
            if let Some(ended) = self.perform(step, sent).await {
                return ended;
            }
        }
        if self.stream.write_all(reply.head().as_bytes()).await.is_err() {
            return Ended::Aborted;
        }
        if let Some(body) = &reply.body {
            sent.fetch_add(body.len() as u64, Ordering::Relaxed);
            return if self.stream.write_all(body).await.is_ok() { Ended::Next } else { Ended::Aborted };
        }
        for step in &reply.steps {
            if let Some(ended) = self.perform(step, sent).await {
                return ended;
            }
        }
        if self.stream.write_all(b"0\r\n\r\n").await.is_ok() { Ended::Next } else { Ended::Aborted }
    }

    /// Does one step; `Some` if it ends the exchange.
    async fn perform(&mut self, step: &Step, sent: &AtomicU64) -> Option<Ended> {
        match step {
            Step::Chunk(bytes) => self.chunk(bytes, sent).await,
            Step::Repeat(bytes, times) => {
                for _ in 0..*times {
                    if let Some(ended) = self.chunk(bytes, sent).await {
                        return Some(ended);
                    }
                }
                None
            }
            Step::Raw(bytes) => self.stream.write_all(bytes).await.is_err().then_some(Ended::Aborted),
            Step::Wait(wait) => self.watch(Some(*wait)).await,
            Step::Hold => self.watch(None).await,
            Step::Cut => {
                let _ = self.stream.shutdown().await;
                Some(Ended::Closed)
            }
            Step::Reset => {
                // Bytes sent before must reach the client; a reset may overtake what is still queued here.
                let _ = self.stream.flush().await;
                tokio::time::sleep(Duration::from_millis(20)).await;
                let _ = self.stream.set_zero_linger();
                Some(Ended::Closed)
            }
        }
    }

    async fn chunk(&mut self, bytes: &Bytes, sent: &AtomicU64) -> Option<Ended> {
        let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
        framed.extend_from_slice(bytes);
        framed.extend_from_slice(b"\r\n");
        if self.stream.write_all(&framed).await.is_err() {
            return Some(Ended::Aborted);
        }
        sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        None
    }

    /// Waits, and notices a client that goes meanwhile.
    async fn watch(&mut self, limit: Option<Duration>) -> Option<Ended> {
        let gone = async { while self.fill().await.is_some() {} };
        match limit {
            None => {
                gone.await;
                Some(Ended::Aborted)
            }
            Some(limit) => tokio::time::timeout(limit, gone).await.is_ok().then_some(Ended::Aborted),
        }
    }
}
