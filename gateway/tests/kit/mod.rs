//! A gateway on a free port and a client that reads raw answers, for the tests of this folder.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use branchline_gateway::config::resolve_arguments;
use branchline_gateway::lifecycle::Server;
use branchline_gateway::{App, Options};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Longest wait for anything; long, for machines with more to do.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A running gateway; stopped when dropped.
pub struct Gateway {
    pub address: SocketAddr,
    pub metrics_address: Option<SocketAddr>,
    pub admin_address: Option<SocketAddr>,
    pub app: Arc<App>,
    stop: Option<oneshot::Sender<()>>,
    running: JoinHandle<()>,
}

pub fn options(given: &[(&str, &str)], workers: &[String]) -> Options {
    let mut given: Vec<(String, Vec<String>)> =
        given.iter().map(|(name, value)| ((*name).to_owned(), vec![(*value).to_owned()])).collect();
    given.push(("worker_urls".to_owned(), workers.to_vec()));
    if !given.iter().any(|(name, _)| name == "port") {
        given.push(("port".to_owned(), vec!["0".to_owned()]));
    }
    resolve_arguments(given, None, std::iter::empty()).expect("good options")
}

impl Gateway {
    /// Starts one and waits until every worker is ready.
    pub async fn start(given: &[(&str, &str)], workers: &[String]) -> Self {
        let gateway = Self::start_cold(given, workers).await;
        let all_ready =
            gateway.app.fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready()));
        tokio::time::timeout(PATIENCE, all_ready).await.expect("workers become ready");
        gateway
    }

    /// Starts one whose workers may be away.
    pub async fn start_cold(given: &[(&str, &str)], workers: &[String]) -> Self {
        let server = Server::bind(options(given, workers)).await.expect("a free port");
        let (address, metrics_address) = (server.address().expect("bound"), server.metrics_address());
        let admin_address = server.admin_address();
        let app = Arc::clone(server.app());
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(server.run(async {
            drop(stopped.await);
        }));
        Self { address, metrics_address, admin_address, app, stop: Some(stop), running }
    }

    /// Asks for a stop and waits for its end.
    pub async fn stop(mut self) {
        drop(self.stop.take());
        tokio::time::timeout(PATIENCE, &mut self.running)
            .await
            .expect("it stops")
            .expect("it does not panic");
    }

    /// Asks for a stop without waiting.
    pub fn begin_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until it has ended.
    pub async fn ended(&mut self) {
        tokio::time::timeout(PATIENCE, &mut self.running)
            .await
            .expect("it stops")
            .expect("it does not panic");
    }

    /// Requests on all workers.
    pub fn load(&self) -> u64 {
        self.app.fleet.workers().iter().map(|worker| worker.in_flight()).sum()
    }

    /// Sends a request and reads the answer to its end.
    pub async fn call(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let mut client = self.send(method, path, headers, body).await;
        client.answer().await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, &[], "").await
    }

    pub async fn post(&self, path: &str, body: &str) -> Answer {
        self.call("POST", path, &[], body).await
    }

    /// As [`Self::call`], at the operators' own port.
    pub async fn operate(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let address = self.admin_address.expect("a port for operators");
        send_to(address, method, path, headers, body).await.answer().await
    }

    /// Sends a request without reading.
    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Client {
        send_to(self.address, method, path, headers, body).await
    }

    pub async fn connect(&self) -> Client {
        Client { stream: TcpStream::connect(self.address).await.expect("it listens"), read: Vec::new() }
    }
}

/// A request as HTTP/1.1 spells it.
pub fn spell(host: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut head = format!("{method} {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        head.push_str(&format!("host: {host}\r\n"));
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    format!("{head}content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}

async fn send_to(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Client {
    let stream = TcpStream::connect(address).await.expect("it listens");
    let mut client = Client { stream, read: Vec::new() };
    client.write(spell(&address.to_string(), method, path, headers, body).as_bytes()).await;
    client
}

/// One client connection.
pub struct Client {
    pub stream: TcpStream,
    read: Vec<u8>,
}

impl Client {
    pub async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.expect("it reads");
    }

    /// Reads until the bytes so far contain `text`.
    pub async fn read_until(&mut self, text: &str) -> String {
        let wait = async {
            while !String::from_utf8_lossy(&self.read).contains(text) {
                let count = self.stream.read_buf(&mut self.read).await.expect("it answers");
                assert!(count > 0, "closed before {text:?}: {}", String::from_utf8_lossy(&self.read));
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("it answers in time");
        String::from_utf8_lossy(&self.read).into_owned()
    }

    /// Reads to the connection's end.
    pub async fn answer(&mut self) -> Answer {
        let outcome = tokio::time::timeout(PATIENCE, self.stream.read_to_end(&mut self.read)).await;
        // A reset still leaves what came before.
        drop(outcome.expect("it answers in time"));
        Answer::parse(&self.read)
    }
}

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    /// Chunk framing removed.
    pub body: Vec<u8>,
    /// The body ended as its framing says.
    pub complete: bool,
}

impl Answer {
    pub fn parse(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap_or_else(|| {
            panic!("no head: {:?}", String::from_utf8_lossy(bytes));
        });
        let head = String::from_utf8_lossy(&bytes[..end]);
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|code| code.parse().ok());
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        let rest = &bytes[end + 4..];
        let chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        let length = headers
            .iter()
            .find(|(name, _)| name == "content-length")
            .and_then(|(_, value)| value.parse().ok());
        let (body, complete) = match chunked {
            true => unchunk(rest),
            false => (rest.to_vec(), length.is_none_or(|length: usize| length == rest.len())),
        };
        Self { status: status.expect("a status line"), headers, body, complete }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The data of each event, by a strict reading.
    pub fn events(&self) -> Vec<String> {
        let text = self.text().replace("\r\n", "\n").replace('\r', "\n");
        let data = |event: &str| {
            let lines: Vec<&str> = event
                .lines()
                .filter_map(|line| line.strip_prefix("data:"))
                .map(|d| d.strip_prefix(' ').unwrap_or(d))
                .collect();
            (!lines.is_empty()).then(|| lines.join("\n"))
        };
        text.split("\n\n").filter_map(data).collect()
    }
}

fn unchunk(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let Some(line) = rest.windows(2).position(|window| window == b"\r\n") else { return (body, false) };
        let size =
            std::str::from_utf8(&rest[..line]).ok().and_then(|text| usize::from_str_radix(text, 16).ok());
        let Some(size) = size else { return (body, false) };
        rest = &rest[line + 2..];
        if size == 0 {
            return (body, rest == b"\r\n");
        }
        if rest.len() < size + 2 {
            body.extend_from_slice(&rest[..size.min(rest.len())]);
            return (body, false);
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}
