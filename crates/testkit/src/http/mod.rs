//! An HTTP worker whose answers are scripts of raw pieces.

mod reply;
mod wire;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use branchline_core::{Error, Result};
use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use reply::Reply;
use reply::Step;
use wire::{Ended, Exchange};

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// Method.
    pub method: String,
    /// Path with query.
    pub target: String,
    /// Headers in order, names as sent.
    pub headers: Vec<(String, String)>,
    /// Whole body.
    pub body: Bytes,
}

impl Recorded {
    /// The first header of this name, whatever its case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(own, _)| own.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// What has happened so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    requests: usize,
    finished: usize,
    aborted: usize,
    open: usize,
}

#[derive(Debug)]
struct Shared {
    replies: Mutex<HashMap<String, Reply>>,
    requests: Mutex<Vec<Recorded>>,
    counts: watch::Sender<Counts>,
    /// Body bytes written, over all exchanges.
    sent: std::sync::atomic::AtomicU64,
}

/// A scripted HTTP worker on a port of its own. Answers `/health` with 200 and anything unknown with 404.
#[derive(Debug)]
pub struct ScriptedWorker {
    address: SocketAddr,
    shared: Arc<Shared>,
    running: Mutex<CancellationToken>,
}

impl ScriptedWorker {
    /// Listens on a free port of the loopback address.
    pub async fn start() -> Result<Self> {
        let listener = bind("127.0.0.1:0").await?;
        let address = listener.local_addr().map_err(|cause| Error::internal(cause.to_string()))?;
        let shared = Shared {
            replies: Mutex::new(HashMap::from([("/health".to_owned(), Reply::new(200).body("ok"))])),
            requests: Mutex::default(),
            counts: watch::Sender::default(),
            sent: Default::default(),
        };
        let worker = Self { address, shared: Arc::new(shared), running: Mutex::default() };
        worker.serve(listener);
        Ok(worker)
    }

    /// `http://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Answers each request for `path` (query left out) like this from now on.
    pub fn on(&self, path: &str, reply: Reply) {
        self.shared.replies.lock().insert(path.to_owned(), reply);
    }

    /// Lists these models at `/v1/models`.
    pub fn serve_models(&self, names: &[&str]) {
        let rows: Vec<_> = names.iter().map(|name| serde_json::json!({"id": name, "object": "model"})).collect();
        let list = serde_json::json!({"object": "list", "data": rows});
        self.on("/v1/models", Reply::new(200).header("content-type", "application/json").body(list.to_string()));
    }

    /// Requests for `path` so far, in order.
    pub fn requests(&self, path: &str) -> Vec<Recorded> {
        let is_same = |request: &&Recorded| request.target.split('?').next() == Some(path);
        self.shared.requests.lock().iter().filter(is_same).cloned().collect()
    }

    /// Body bytes written so far.
    pub fn bytes_sent(&self) -> u64 {
        self.shared.sent.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Exchanges whose client went before the script's end.
    pub fn aborted(&self) -> usize {
        self.shared.counts.borrow().aborted
    }

    /// Connections open now.
    pub fn connections(&self) -> usize {
        self.shared.counts.borrow().open
    }

    /// Completes when `path` has been asked for `count` times.
    pub async fn wait_for_requests(&self, path: &str, count: usize) {
        self.wait(|_| self.requests(path).len() >= count).await;
    }

    /// Completes when `count` clients have gone before their script's end.
    pub async fn wait_for_aborts(&self, count: usize) {
        self.wait(|counts| counts.aborted >= count).await;
    }

    /// Completes when at most `count` connections are open.
    pub async fn wait_for_connections(&self, count: usize) {
        self.wait(|counts| counts.open <= count).await;
    }

    async fn wait(&self, condition: impl FnMut(&Counts) -> bool) {
        // The sender lives in `self`.
        let _ = self.shared.counts.subscribe().wait_for(condition).await;
    }

    /// Closes the port and every connection, as a dead process does.
    pub fn stop(&self) {
        self.running.lock().cancel();
    }

    /// Listens on the same port again.
    pub async fn restart(&self) -> Result<()> {
        self.stop();
        self.wait(|counts| counts.open == 0).await;
        let listener = loop {
            match bind(&self.address.to_string()).await {
                Ok(listener) => break listener,
                // The stopped listener's task has not run yet.
                Err(_) => tokio::task::yield_now().await,
            }
        };
        self.serve(listener);
        Ok(())
    }

    fn serve(&self, listener: TcpListener) {
        let cancel = CancellationToken::new();
        *self.running.lock() = cancel.clone();
        let shared = self.shared.clone();
        tokio::spawn(async move {
            loop {
                let stream = tokio::select! {
                    () = cancel.cancelled() => return,
                    accepted = listener.accept() => accepted,
                };
                let Ok((stream, _)) = stream else { return };
                let (shared, cancel) = (shared.clone(), cancel.clone());
                tokio::spawn(async move {
                    shared.counts.send_modify(|counts| counts.open += 1);
                    tokio::select! {
                        () = cancel.cancelled() => {}
                        () = converse(&shared, stream) => {}
                    }
                    shared.counts.send_modify(|counts| counts.open -= 1);
                });
            }
        });
    }
}

impl Drop for ScriptedWorker {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn bind(address: &str) -> Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|cause| Error::internal(format!("cannot listen on {address}: {cause}")))
}

/// Serves one connection until either side ends it.
async fn converse(shared: &Shared, stream: TcpStream) {
    let mut exchange = Exchange::new(stream);
    while let Some(request) = exchange.read_request().await {
        let path = request.target.split('?').next().unwrap_or_default().to_owned();
        let reply = shared.replies.lock().get(&path).cloned().unwrap_or_else(|| Reply::new(404).body("not found"));
        shared.requests.lock().push(request);
        shared.counts.send_modify(|counts| counts.requests += 1);
        let ended = exchange.play(&reply, &shared.sent).await;
        shared.counts.send_modify(|counts| match ended {
            Ended::Aborted => counts.aborted += 1,
            Ended::Next | Ended::Closed => counts.finished += 1,
        });
        if ended != Ended::Next {
            return;
        }
    }
}
