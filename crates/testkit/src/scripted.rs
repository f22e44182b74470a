//! An HTTP worker that does what a script says, byte by byte: resets, half events, silence, open sockets.
//!
//! It speaks raw HTTP/1.1 so that it can break it. What it saw is recorded and can be waited for.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

/// One request as it came over the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// As sent.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// In order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// By `content-length`.
    pub body: Vec<u8>,
}

impl Seen {
    /// The target without its query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    /// The first header of that name (in lower case).
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// What to do next on a connection.
#[derive(Debug, Clone)]
pub enum Step {
    /// Write these bytes.
    Send(Vec<u8>),
    /// Write these bytes over and over until the peer stops reading or leaves.
    Flood(Vec<u8>),
    /// Wait, watching whether the peer leaves.
    Pause(Duration),
    /// Wait until the peer leaves.
    Hold,
    /// Wait until the test gives a permit, and take it.
    Turn(Arc<Semaphore>),
    /// End the connection by a TCP reset.
    Reset,
    /// End the connection in order.
    Close,
}

/// What happened so far.
#[derive(Debug, Clone, Default)]
pub struct Record {
    /// Requests other than GET, in order.
    pub seen: Vec<Seen>,
    /// Connections that the peer ended while a script was still running.
    pub left: usize,
    /// Bytes written by [`Step::Flood`].
    pub flooded: usize,
    /// Connections open now.
    pub open: usize,
    /// Connections accepted.
    pub accepted: usize,
    /// Whether the port is open.
    pub listening: bool,
}

impl Record {
    /// Requests for `path` (query left out) so far, in order.
    pub fn requests(&self, path: &str) -> Vec<&Seen> {
        self.seen.iter().filter(|seen| seen.path() == path).collect()
    }
}

type Script = dyn Fn(&Seen) -> Vec<Step> + Send + Sync;

struct Shared {
    script: Box<Script>,
    /// Answers by path, before the script.
    fixed: Mutex<HashMap<String, Vec<Step>>>,
    record: watch::Sender<Record>,
}

/// The worker; dropping it closes its port and connections.
pub struct ScriptedWorker {
    address: SocketAddr,
    shared: Arc<Shared>,
    running: Mutex<CancellationToken>,
}

impl ScriptedWorker {
    /// Starts one on a free port. `GET /health` answers 200 and `GET /v1/models` 404 unless [`Self::on`] says else.
    ///
    /// # Errors
    /// If no port can be had.
    pub async fn start(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let shared =
            Shared { script: Box::new(script), fixed: Mutex::default(), record: watch::Sender::default() };
        let worker = Self { address, shared: Arc::new(shared), running: Mutex::default() };
        worker.on("/health", vec![Step::Send(response(200, &[], b""))]);
        worker.on("/v1/models", vec![Step::Send(response(404, &[], b"{}"))]);
        worker.serve(listener);
        Ok(worker)
    }

    /// Its address as a worker URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Answers requests for `path` (without query) like this from now on, in place of the script.
    pub fn on(&self, path: &str, steps: Vec<Step>) {
        self.shared.fixed.lock().insert(path.to_owned(), steps);
    }

    /// Lists these models at `/v1/models`.
    pub fn serve_models(&self, names: &[&str]) {
        let rows: Vec<_> =
            names.iter().map(|name| serde_json::json!({"id": name, "object": "model"})).collect();
        let list = serde_json::json!({"object": "list", "data": rows}).to_string();
        let headers = [("content-type", "application/json")];
        self.on("/v1/models", vec![Step::Send(response(200, &headers, list.as_bytes()))]);
    }

    /// What happened so far.
    pub fn record(&self) -> Record {
        self.shared.record.borrow().clone()
    }

    /// Waits until the record satisfies a condition; answers it, or `None` after ten seconds.
    pub async fn wait_for(&self, condition: impl Fn(&Record) -> bool) -> Option<Record> {
        let mut record = self.shared.record.subscribe();
        let waited =
            tokio::time::timeout(Duration::from_secs(10), record.wait_for(|record| condition(record))).await;
        waited.ok()?.ok().map(|record| record.clone())
    }

    /// Waits until no flooded byte has been taken for `silence`; answers all that were taken.
    pub async fn wait_for_still(&self, silence: Duration) -> usize {
        let mut record = self.shared.record.subscribe();
        let mut taken = record.borrow_and_update().flooded;
        loop {
            let more = record.wait_for(|record| record.flooded > taken);
            match tokio::time::timeout(silence, more).await {
                Ok(Ok(record)) => taken = record.flooded,
                Ok(Err(_)) | Err(_) => return taken,
            }
        }
    }

    /// Closes the port and every connection, as a dead process does.
    pub fn stop(&self) {
        self.running.lock().cancel();
    }

    /// Listens on the same port again once every connection is closed.
    ///
    /// # Errors
    /// If the port can't be had again.
    pub async fn restart(&self) -> std::io::Result<()> {
        self.stop();
        self.wait_for(|record| record.open == 0 && !record.listening).await;
        let listener = TcpListener::bind(self.address).await?;
        self.serve(listener);
        Ok(())
    }

    fn serve(&self, listener: TcpListener) {
        let token = CancellationToken::new();
        *self.running.lock() = token.clone();
        let shared = Arc::clone(&self.shared);
        shared.record.send_modify(|record| record.listening = true);
        tokio::spawn(async move {
            accept(listener, &shared, &token).await;
            shared.record.send_modify(|record| record.listening = false);
        });
    }
}

impl Drop for ScriptedWorker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Takes connections until stopped; the port is closed when this returns.
async fn accept(listener: TcpListener, shared: &Arc<Shared>, token: &CancellationToken) {
    loop {
        let accepted = tokio::select! {
            () = token.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let Ok((stream, _)) = accepted else { continue };
        shared.record.send_modify(|record| {
            record.open += 1;
            record.accepted += 1;
        });
        let (shared, token) = (Arc::clone(shared), token.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = token.cancelled() => {}
                _ = serve(stream, &shared) => {}
            }
            shared.record.send_modify(|record| record.open -= 1);
        });
    }
}

async fn serve(mut stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::new();
    while let Some(seen) = read_request(&mut stream, &mut buffer).await? {
        let fixed = shared.fixed.lock().get(seen.path()).cloned();
        let steps = fixed.unwrap_or_else(|| (shared.script)(&seen));
        // Polls of health and models would only be in the way.
        if seen.method != "GET" {
            shared.record.send_modify(|record| record.seen.push(seen));
        }
        for step in steps {
            if !take(step, &mut stream, shared).await? {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Does one step; false ends the connection.
async fn take(step: Step, stream: &mut TcpStream, shared: &Shared) -> std::io::Result<bool> {
    let mut byte = [0; 1];
    let left = || shared.record.send_modify(|record| record.left += 1);
    match step {
        Step::Send(bytes) => stream.write_all(&bytes).await.inspect_err(|_| left())?,
        Step::Flood(bytes) => {
            // A write may be cut anywhere; the next one goes on there, so that the framing holds.
            let mut at = 0;
            loop {
                let written = stream.write(&bytes[at..]).await.inspect_err(|_| left())?;
                at = (at + written) % bytes.len();
                shared.record.send_modify(|record| record.flooded += written);
            }
        }
        Step::Pause(time) => {
            if tokio::time::timeout(time, stream.read(&mut byte)).await.is_ok() {
                left();
                return Ok(false);
            }
        }
        Step::Hold => {
            drop(stream.read(&mut byte).await);
            left();
            return Ok(false);
        }
        Step::Turn(turns) => match turns.acquire().await {
            Ok(turn) => turn.forget(),
            Err(_) => return Ok(false),
        },
        Step::Reset => {
            stream.set_zero_linger()?;
            return Ok(false);
        }
        Step::Close => return Ok(false),
    }
    Ok(true)
}

/// The next request, `None` if the peer ended the connection between two.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<Option<Seen>> {
    let end = loop {
        if let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let (method, target) =
        (first.next().unwrap_or_default().to_owned(), first.next().unwrap_or_default().to_owned());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length =
        headers.iter().find(|(name, _)| name == "content-length").and_then(|(_, value)| value.parse().ok());
    let total = end + 4 + length.unwrap_or(0);
    while buffer.len() < total {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    let body = buffer[end + 4..total].to_vec();
    buffer.drain(..total);
    Ok(Some(Seen { method, target, headers, body }))
}

/// A whole answer with `content-length`.
pub fn response(status: u16, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let mut bytes =
        format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{headers}\r\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// The head of an event stream with a chunked body.
pub fn event_stream() -> Step {
    Step::Send(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_vec(),
    )
}

/// One piece of a chunked body.
pub fn chunk(bytes: &[u8]) -> Step {
    let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
    framed.extend_from_slice(bytes);
    framed.extend_from_slice(b"\r\n");
    Step::Send(framed)
}

/// The end of a chunked body.
pub fn last_chunk() -> Step {
    Step::Send(b"0\r\n\r\n".to_vec())
}
