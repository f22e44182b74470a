//! An HTTP worker that does what a script says, byte by byte: resets, half events, silence, open sockets.
//!
//! It speaks raw HTTP/1.1 so that it can break it. What it saw is recorded and can be waited for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

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
    /// The first header of that name.
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
    /// End the connection by a TCP reset.
    Reset,
    /// End the connection in order.
    Close,
}

/// What happened so far.
#[derive(Debug, Clone, Default)]
pub struct Record {
    /// Requests other than probes, in order.
    pub seen: Vec<Seen>,
    /// Connections that the peer ended while a script was still running.
    pub left: usize,
    /// Bytes written by [`Step::Flood`].
    pub flooded: usize,
    /// Connections open now.
    pub open: usize,
    /// Connections accepted.
    pub accepted: usize,
}

type Script = dyn Fn(&Seen) -> Vec<Step> + Send + Sync;

struct Shared {
    script: Box<Script>,
    record: watch::Sender<Record>,
}

/// The worker; dropping it closes its port and connections.
pub struct ScriptedWorker {
    address: SocketAddr,
    record: watch::Receiver<Record>,
    _stop: DropGuard,
}

impl ScriptedWorker {
    /// Starts one on a free port. `GET /health` answers 200 and `GET /v1/models` 404 without asking the script.
    ///
    /// # Errors
    /// If no port can be had.
    pub async fn start(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (sender, record) = watch::channel(Record::default());
        let shared = Arc::new(Shared { script: Box::new(script), record: sender });
        let stop = CancellationToken::new();
        let token = stop.clone();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    () = token.cancelled() => return,
                    accepted = listener.accept() => {
                        let Ok((stream, _)) = accepted else { continue };
                        let (shared, token) = (Arc::clone(&shared), token.clone());
                        tokio::spawn(async move {
                            shared.record.send_modify(|record| { record.open += 1; record.accepted += 1; });
                            tokio::select! {
                                () = token.cancelled() => {}
                                _ = serve(stream, &shared) => {}
                            }
                            shared.record.send_modify(|record| record.open -= 1);
                        });
                    }
                }
            }
        });
        Ok(Self { address, record, _stop: stop.drop_guard() })
    }

    /// Its address as a worker URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What happened so far.
    pub fn record(&self) -> Record {
        self.record.borrow().clone()
    }

    /// Waits until the record satisfies a condition; answers it, or `None` after ten seconds.
    pub async fn wait_for(&self, condition: impl Fn(&Record) -> bool) -> Option<Record> {
        let mut record = self.record.clone();
        let waited = tokio::time::timeout(Duration::from_secs(10), record.wait_for(|record| condition(record))).await;
        waited.ok()?.ok().map(|record| record.clone())
    }
}

async fn serve(mut stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = Vec::new();
    while let Some(seen) = read_request(&mut stream, &mut buffer).await? {
        let steps = match (seen.method.as_str(), seen.target.as_str()) {
            ("GET", "/health") => vec![Step::Send(response(200, &[], b""))],
            ("GET", "/v1/models") => vec![Step::Send(response(404, &[], b"{}"))],
            _ => {
                let steps = (shared.script)(&seen);
                shared.record.send_modify(|record| record.seen.push(seen));
                steps
            }
        };
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
        Step::Flood(bytes) => loop {
            let written = stream.write(&bytes).await.inspect_err(|_| left())?;
            shared.record.send_modify(|record| record.flooded += written);
        },
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
    let (method, target) = (first.next().unwrap_or_default().to_owned(), first.next().unwrap_or_default().to_owned());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length").and_then(|(_, value)| value.parse().ok());
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
    let mut bytes = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n{headers}\r\n", body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// The head of an event stream with a chunked body.
pub fn event_stream() -> Step {
    Step::Send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_vec())
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
