//! A scripted engine that speaks the contract over a real socket.
//!
//! It runs on a runtime of its own, so that [`FakeEngine::kill`] is as sudden as the death of a process. A test either
//! lets it answer by a script, or drives it frame by frame with [`FakeEngine::emit`].

mod service;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use branchline_core::{Error, Result};
use branchline_worker::proto;
use branchline_worker::proto::engine_server::EngineServer;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::Status;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use crate::byte_tokenizer_json;
use service::Service;

/// One thing an engine does for a request.
#[derive(Debug, Clone)]
pub enum Act {
    /// Sends this news; the handle is filled in.
    Send(Box<proto::SequenceDelta>),
    /// Does nothing for so long.
    Wait(Duration),
    /// Dies with all its connections.
    Die,
}

impl Act {
    /// News of some tokens and their text.
    pub fn tokens(token_ids: &[u32], text: &str) -> Self {
        Self::send(proto::SequenceDelta {
            token_ids: token_ids.to_vec(),
            text: text.into(),
            ..Default::default()
        })
    }

    /// Any news.
    pub fn send(delta: proto::SequenceDelta) -> Self {
        Self::Send(Box::new(delta))
    }

    /// The end of sequence `index`.
    pub fn finish(index: u32, reason: proto::FinishReason, completion_tokens: u32) -> Self {
        let finish = proto::Finish { reason: reason.into(), completion_tokens, ..Default::default() };
        Self::send(proto::SequenceDelta { index, finish: Some(finish), ..Default::default() })
    }
}

/// What a request is answered with.
pub type Script = dyn Fn(&proto::GenerateRequest) -> Vec<Act> + Send + Sync;

/// What the engine says of itself. Changes take effect with the next connection.
#[derive(Debug, Clone)]
pub struct EngineSetup {
    /// Model description.
    pub info: proto::GetModelInfoResponse,
    /// tokenizer.json.
    pub tokenizer_json: Vec<u8>,
    /// Checksum and special tokens; length and checksum are filled in when empty.
    pub manifest: proto::TokenizerManifest,
    /// Bytes a piece of tokenizer.json.
    pub piece_bytes: usize,
    /// Bearer token that each call must carry.
    pub token: Option<String>,
    /// Answers `SubscribeKvEvents` with `UNIMPLEMENTED`.
    pub without_events: bool,
}

impl Default for EngineSetup {
    fn default() -> Self {
        let info = proto::GetModelInfoResponse {
            model_path: "fake".into(),
            served_model_names: vec!["fake".into()],
            architecture: "FakeForCausalLM".into(),
            vocab_size: 258,
            context_length: 2048,
            eos_token_ids: vec![257],
            page_size: 4,
            dtype: "float32".into(),
            weight_version: "0".into(),
            max_request_tokens: 2048,
            executor: "fake".into(),
            ..Default::default()
        };
        let manifest = proto::TokenizerManifest {
            chat_template: Some(CHAT_TEMPLATE.into()),
            eos_token_ids: vec![257],
            bos_token: Some("<|im_start|>".into()),
            eos_token: Some("<|im_end|>".into()),
            ..Default::default()
        };
        Self {
            info,
            tokenizer_json: byte_tokenizer_json(),
            manifest,
            piece_bytes: 1000,
            token: None,
            without_events: false,
        }
    }
}

const CHAT_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

type Frames = mpsc::UnboundedSender<std::result::Result<proto::AttachResponse, Status>>;
type Batches = mpsc::UnboundedSender<std::result::Result<proto::SubscribeKvEventsResponse, Status>>;

/// One step's message.
fn frame(step: u64, deltas: Vec<proto::SequenceDelta>) -> proto::AttachResponse {
    let frame = proto::StepFrame { step, deltas };
    proto::AttachResponse { message: Some(proto::attach_response::Message::Frame(frame)) }
}

/// What was received, and the streams to answer on.
struct State {
    setup: Mutex<EngineSetup>,
    script: Mutex<Option<Arc<Script>>>,
    submits: Mutex<Vec<proto::Submit>>,
    cancels: Mutex<Vec<u64>>,
    aborts: Mutex<Vec<proto::AbortRequest>>,
    frames: Mutex<Option<Frames>>,
    /// `Generate` streams without a script, in order of arrival.
    singles: Mutex<Vec<Frames>>,
    /// Messages with news sent so far.
    messages: AtomicU64,
    batches: Mutex<Option<Batches>>,
    /// Blocks in the opening snapshot of the next subscription.
    snapshot: Mutex<Vec<u64>>,
    subscriptions: AtomicU64,
    adapters: Mutex<proto::ListAdaptersResponse>,
    attached: AtomicU64,
    step: AtomicU64,
    /// Counts whatever is received, for those who wait.
    changes: watch::Sender<u64>,
    /// What its health service says; none while it is dead.
    vitals: Mutex<Option<HealthReporter>>,
    /// Where the engine lives; none while it is dead.
    runtime: Mutex<Option<Runtime>>,
}

impl State {
    /// Sends a frame on the present stream.
    fn send(&self, deltas: Vec<proto::SequenceDelta>) {
        let step = self.step.fetch_add(1, Ordering::Relaxed);
        if let Some(frames) = &*self.frames.lock() {
            self.messages.fetch_add(1, Ordering::Relaxed);
            let _ = frames.send(Ok(frame(step, deltas)));
        }
    }

    fn changed(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    fn kill(&self) {
        *self.frames.lock() = None;
        *self.batches.lock() = None;
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_background();
        }
    }
}

/// A scripted engine on a port of its own.
pub struct FakeEngine {
    address: SocketAddr,
    state: Arc<State>,
}

impl FakeEngine {
    /// Listens on a free port of the loopback address.
    pub async fn start(setup: EngineSetup) -> Result<Self> {
        let state = State {
            setup: Mutex::new(setup),
            script: Mutex::default(),
            submits: Mutex::default(),
            cancels: Mutex::default(),
            aborts: Mutex::default(),
            frames: Mutex::default(),
            singles: Mutex::default(),
            messages: AtomicU64::new(0),
            batches: Mutex::default(),
            snapshot: Mutex::default(),
            subscriptions: AtomicU64::new(0),
            adapters: Mutex::new(proto::ListAdaptersResponse { limit: 8, ..Default::default() }),
            attached: AtomicU64::new(0),
            step: AtomicU64::new(0),
            changes: watch::Sender::new(0),
            vitals: Mutex::default(),
            runtime: Mutex::default(),
        };
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut engine = Self { address, state: Arc::new(state) };
        engine.address = engine.listen().await?;
        Ok(engine)
    }

    /// `grpc://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("grpc://{}", self.address)
    }

    /// Answers each request like this from now on; without a script, requests wait for [`Self::emit`].
    pub fn script(&self, script: impl Fn(&proto::GenerateRequest) -> Vec<Act> + Send + Sync + 'static) {
        *self.state.script.lock() = Some(Arc::new(script));
    }

    /// Changes what the engine says of itself from the next connection on.
    pub fn change(&self, change: impl FnOnce(&mut EngineSetup)) {
        change(&mut self.state.setup.lock());
    }

    /// Sends a frame on the present stream. Nothing happens while no gateway is attached.
    pub fn emit(&self, deltas: Vec<proto::SequenceDelta>) {
        self.state.send(deltas);
    }

    /// Sends each delta on the `Generate` stream whose place of arrival (from 0) is its handle.
    pub fn emit_singly(&self, deltas: Vec<proto::SequenceDelta>) {
        let singles = self.state.singles.lock();
        for delta in deltas {
            if let Some(stream) = singles.get(delta.handle as usize) {
                self.state.messages.fetch_add(1, Ordering::Relaxed);
                let _ = stream.send(Ok(frame(0, vec![delta])));
            }
        }
    }

    /// `Generate` streams waiting for [`Self::emit_singly`].
    pub fn singles(&self) -> usize {
        self.state.singles.lock().len()
    }

    /// Forgets the `Generate` streams, which ends them.
    pub fn end_singles(&self) {
        self.state.singles.lock().clear();
    }

    /// Messages sent by [`Self::emit`] and [`Self::emit_singly`].
    pub fn messages(&self) -> u64 {
        self.state.messages.load(Ordering::Relaxed)
    }

    /// Sends a batch on the present event stream.
    pub fn publish(&self, batch: proto::SubscribeKvEventsResponse) {
        if let Some(batches) = &*self.state.batches.lock() {
            let _ = batches.send(Ok(batch));
        }
    }

    /// Blocks that the opening snapshot of later subscriptions holds.
    pub fn set_snapshot(&self, hashes: &[u64]) {
        *self.state.snapshot.lock() = hashes.to_vec();
    }

    /// Ends the attach stream with an error, the process living on.
    pub fn break_stream(&self) {
        if let Some(frames) = self.state.frames.lock().take() {
            let _ = frames.send(Err(Status::internal("scripted break")));
        }
    }

    /// Loads an adapter by nobody's call, as another gateway's would.
    pub fn hold_adapter(&self, name: &str, digest: &str) {
        let mut listed = self.state.adapters.lock();
        listed.adapters.push(proto::Adapter {
            name: name.into(),
            digest: digest.into(),
            ..Default::default()
        });
        listed.version += 1;
    }

    /// Requests received, in order.
    pub fn submits(&self) -> Vec<proto::Submit> {
        self.state.submits.lock().clone()
    }

    /// Handles cancelled, in order.
    pub fn cancels(&self) -> Vec<u64> {
        self.state.cancels.lock().clone()
    }

    /// Abort calls received, in order.
    pub fn aborts(&self) -> Vec<proto::AbortRequest> {
        self.state.aborts.lock().clone()
    }

    /// Subscriptions to cache events so far.
    pub fn subscriptions(&self) -> u64 {
        self.state.subscriptions.load(Ordering::Acquire)
    }

    /// Attach streams so far.
    pub fn attached(&self) -> u64 {
        self.state.attached.load(Ordering::Acquire)
    }

    /// Completes when `condition` holds; looked at after each thing received.
    pub async fn wait_until(&self, mut condition: impl FnMut(&Self) -> bool) {
        let mut changes = self.state.changes.subscribe();
        while !condition(self) {
            // The sender lives in `self`.
            let _ = changes.changed().await;
        }
    }

    /// Says by its health service whether it can serve. A new engine can.
    pub async fn can_serve(&self, can: bool) {
        let reporter = self.state.vitals.lock().clone();
        if let Some(reporter) = reporter {
            let status = if can { ServingStatus::Serving } else { ServingStatus::NotServing };
            reporter.set_service_status("", status).await;
        }
    }

    /// Dies: the port and every connection close, nothing is said.
    pub fn kill(&self) {
        self.state.kill();
    }

    /// Comes back on the same port with a new engine id.
    pub async fn restart(&self) -> Result<()> {
        self.kill();
        loop {
            match self.listen().await {
                Ok(_) => return Ok(()),
                // The dead runtime has not closed its sockets yet.
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }

    async fn listen(&self) -> Result<SocketAddr> {
        let fail = |cause: std::io::Error| Error::internal(format!("the fake engine cannot listen: {cause}"));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .map_err(fail)?;
        let (state, address) = (self.state.clone(), self.address);
        let (reporter, health) = health_reporter();
        *self.state.vitals.lock() = Some(reporter);
        let bound = runtime.spawn(async move {
            let listener = TcpListener::bind(address).await?;
            let address = listener.local_addr()?;
            let service = EngineServer::new(Service { state }).max_decoding_message_size(64 << 20);
            let server = tonic::transport::Server::builder().tcp_nodelay(true).add_service(service);
            let server = server.add_service(health);
            tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
            Ok(address)
        });
        let outcome = bound.await.unwrap_or_else(|cause| Err(std::io::Error::other(cause))).map_err(fail);
        match outcome {
            Ok(address) => {
                *self.state.runtime.lock() = Some(runtime);
                Ok(address)
            }
            Err(error) => {
                runtime.shutdown_background();
                Err(error)
            }
        }
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        self.kill();
    }
}
