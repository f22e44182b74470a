//! The life of one engine's connection: connect, read what it serves, attach, follow, fail what hangs on it, again.
//!
//! When the stream breaks, the engine aborts its requests and they fail here at once; nothing is adopted by the
//! next stream. A broken event stream alone costs no request: it is opened again.

use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result};
use branchline_text::{ChatTemplate, SpecialTokens};
use hyper_util::rt::TokioIo;
use socket2::TcpKeepalive;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tonic::{Code, Response, Status, Streaming};

use super::mux::{Mux, Outbound};
use super::vitals::{self, Vitals};
use super::{Client, Engine, Token};
use crate::convert::error_from_status;
use crate::fleet::Shared;
use crate::model::Model;
use crate::proto::engine_client::EngineClient;
use crate::proto::{
    AttachResponse, GetLoadRequest, GetModelInfoRequest, GetModelInfoResponse, GetTokenizerRequest, Hello,
    SubscribeKvEventsRequest, TokenizerManifest, Welcome, attach_response::Message,
};
use crate::tls::Wire;
use crate::worker::Worker;

/// Revision of the contract that this gateway speaks.
const CONTRACT_REVISION: u32 = 1;
/// Largest message taken from an engine.
const MESSAGE_BYTES: usize = 64 << 20;
/// Flow-control windows: a stream's, and the connection's, which must hold a lagging event stream and the rest.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Silence of a connection after which the system asks whether the other end is there.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Polls of the load that may fail in a row before the connection counts as lost.
const LOAD_FAILURES: u32 = 10;

/// Keeps the engine attached until cancelled.
pub(crate) async fn supervise(worker: &Worker, engine: &Engine, shared: &Shared, cancel: &CancellationToken) {
    let mut backoff = shared.options.backoff_min;
    loop {
        let mut attached = false;
        let outcome = tokio::select! {
            () = cancel.cancelled() => break,
            outcome = attach(engine, shared) => outcome,
        };
        let error = match outcome {
            Ok(session) => {
                attached = true;
                session.run(worker, engine, shared, cancel).await
            }
            Err(error) => error,
        };
        worker.status.set_down(&error.message);
        if cancel.is_cancelled() {
            break;
        }
        backoff = if attached { shared.options.backoff_min } else { backoff };
        tokio::select! {
            () = cancel.cancelled() => break,
            () = tokio::time::sleep(backoff) => {}
        }
        backoff = (backoff * 2).min(shared.options.backoff_max);
    }
}

/// An attached engine.
struct Session {
    client: Client,
    vitals: Vitals,
    model: Arc<Model>,
    mux: Arc<Mux>,
    inbound: Streaming<AttachResponse>,
    engine_id: String,
}

async fn attach(engine: &Engine, shared: &Shared) -> Result<Session> {
    let (mut client, vitals) = connect(engine, shared).await?;
    let calls = Calls { engine, limit: shared.options.connect_timeout };
    let info = calls.run("GetModelInfo", client.get_model_info(GetModelInfoRequest {})).await?;
    let stream = calls.run("GetTokenizer", client.get_tokenizer(GetTokenizerRequest {})).await?;
    let (manifest, tokenizer) = shared.tokenizers.fetch(stream).await?;
    let mut model = describe(info, manifest, tokenizer);
    // A worker that came back unchanged keeps its model object, and with it what others cached beside it.
    if let Some(old) = engine.model()
        && old.is_same(&model)
    {
        model = old;
    }
    let listed = tokio::time::timeout(calls.limit, engine.read_adapters(&mut client)).await;
    let listed = listed.map_err(|_| calls.late("ListAdapters"))?;
    listed.map_err(|status| error_from_status(&engine.url, "ListAdapters", &status))?;
    let mux = Mux::new(Hello {
        gateway_id: shared.options.gateway_id.clone(),
        contract_revision: CONTRACT_REVISION,
    });
    let mut inbound = calls.run("Attach", client.attach(Outbound(mux.clone()))).await?;
    let Welcome { engine_id, contract_revision } = calls.welcome(&mut inbound).await?;
    tracing::info!(worker = %engine.url, engine_id, contract_revision, models = ?model.names, "attached");
    Ok(Session { client, vitals, model, mux, inbound, engine_id })
}

async fn connect(engine: &Engine, shared: &Shared) -> Result<(Client, Vitals)> {
    let fail = |cause: &dyn std::fmt::Display| {
        Error::new(ErrorCode::UpstreamFailed, format!("worker {} cannot be reached: {cause}", engine.url))
    };
    let limit = shared.options.connect_timeout;
    let endpoint = Endpoint::from_shared(format!("http://{}", engine.dialer.authority()))
        .map_err(|cause| fail(&cause))?
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    let dialer = engine.dialer.clone();
    let dial = tower::service_fn(move |_| {
        let dialer = dialer.clone();
        async move { dialer.connect().await.and_then(kept_alive).map(TokioIo::new) }
    });
    let channel = tokio::time::timeout(limit, endpoint.connect_with_connector(dial))
        .await
        .map_err(|_| fail(&format!("no connection within {} ms", limit.as_millis())))?
        .map_err(|cause| fail(&root_cause(&cause)))?;
    let token: Token = engine.token.clone();
    let vitals = vitals::client(channel.clone(), token.clone());
    let client = EngineClient::with_interceptor(channel, token);
    Ok((client.max_decoding_message_size(MESSAGE_BYTES), vitals))
}

/// A machine that is gone answers no probe of the system's, and its streams end.
fn kept_alive(wire: Wire) -> std::io::Result<Wire> {
    let stream = match &wire {
        Wire::Plain(stream) => stream,
        Wire::Tls(stream) => stream.get_ref().0,
    };
    socket2::SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEP_ALIVE))?;
    Ok(wire)
}

/// The innermost cause: transport errors hide "connection refused" behind "transport error".
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// Set-up calls with their limit.
struct Calls<'a> {
    engine: &'a Engine,
    limit: Duration,
}

impl Calls<'_> {
    async fn run<T>(
        &self,
        name: &str,
        call: impl Future<Output = std::result::Result<Response<T>, Status>>,
    ) -> Result<T> {
        let answer = tokio::time::timeout(self.limit, call).await.map_err(|_| self.late(name))?;
        answer.map(Response::into_inner).map_err(|status| error_from_status(&self.engine.url, name, &status))
    }

    async fn welcome(&self, inbound: &mut Streaming<AttachResponse>) -> Result<Welcome> {
        let first =
            tokio::time::timeout(self.limit, inbound.message()).await.map_err(|_| self.late("Attach"))?;
        match first.map_err(|status| error_from_status(&self.engine.url, "Attach", &status))? {
            Some(AttachResponse { message: Some(Message::Welcome(welcome)) }) => Ok(welcome),
            _ => Err(Error::new(
                ErrorCode::UpstreamFailed,
                format!("worker {} did not answer the greeting", self.engine.url),
            )),
        }
    }

    fn late(&self, name: &str) -> Error {
        let text =
            format!("worker {} did not answer {name} within {} ms", self.engine.url, self.limit.as_millis());
        Error::new(ErrorCode::UpstreamFailed, text)
    }
}

fn describe(
    info: GetModelInfoResponse,
    manifest: TokenizerManifest,
    tokenizer: Arc<branchline_text::Tokenizer>,
) -> Arc<Model> {
    let names = match info.served_model_names.is_empty() {
        true => vec![info.model_path.clone()],
        false => info.served_model_names.clone(),
    };
    let special = SpecialTokens {
        bos: manifest.bos_token.clone(),
        eos: manifest.eos_token.clone(),
        pad: manifest.pad_token.clone(),
    };
    let template = manifest.chat_template.as_deref().map(|source| ChatTemplate::new(source, special));
    let (chat_template, chat_template_error) = match template {
        None => (None, None),
        Some(Ok(template)) => (Some(Arc::new(template)), None),
        Some(Err(cause)) => (None, Some(cause.to_string())),
    };
    if let Some(cause) = &chat_template_error {
        tracing::warn!(model = %names[0], cause, "the chat template cannot be compiled; chat requests will be refused");
    }
    let add_special_tokens = manifest.add_special_tokens;
    Arc::new(Model {
        name: names[0].clone(),
        names,
        tokenizer,
        chat_template,
        chat_template_error,
        add_special_tokens,
        info,
        manifest,
    })
}

impl Session {
    /// Runs until the stream or the engine is lost; says why. Every request of the stream has an end when this returns.
    async fn run(
        self,
        worker: &Worker,
        engine: &Engine,
        shared: &Shared,
        cancel: &CancellationToken,
    ) -> Error {
        let Self { client, vitals, model, mux, inbound, engine_id } = self;
        let stop = cancel.child_token();
        engine.model.store(Some(model));
        engine.client.store(Some(Arc::new(client.clone())));
        engine.mux.store(Some(mux.clone()));
        engine.engine_id.store(Some(Arc::new(engine_id)));
        // What its last process did says nothing of this one.
        worker.health().renew();
        worker.status.set_ready();
        if shared.router.needs_index() {
            // On its own task: a large snapshot must not delay tokens.
            shared.tracker.spawn(follow(
                worker.id,
                engine.url.clone(),
                client.clone(),
                shared.router.index.clone(),
                stop.clone(),
            ));
        }
        let error = tokio::select! {
            () = cancel.cancelled() => Error::new(ErrorCode::UpstreamFailed, format!("worker {} was removed from the fleet", engine.url)),
            error = receive(engine, &mux, inbound) => error,
            error = poll(worker, engine, client, shared.options.load_interval) => error,
            never = vitals::follow(worker, vitals) => match never {},
        };
        stop.cancel();
        worker.status.set_down(&error.message);
        engine.mux.store(None);
        engine.engine_id.store(None);
        engine.client.store(None);
        engine.report.store(None);
        // Clients learn what happened, not where: the address and the cause are for the log.
        let told = match cancel.is_cancelled() {
            true => "the worker left the fleet while it answered; try again",
            false => "the worker died while it answered; try again",
        };
        mux.close(&Error::new(error.code, told));
        shared.router.index.purge(worker.id);
        error
    }
}

/// Hands out frames until the stream breaks. Never waits for a reader.
async fn receive(engine: &Engine, mux: &Mux, mut inbound: Streaming<AttachResponse>) -> Error {
    loop {
        match inbound.message().await {
            Ok(Some(AttachResponse { message: Some(Message::Frame(frame)) })) => mux.dispatch(frame),
            Ok(Some(_)) => {}
            Ok(None) => {
                return Error::new(
                    ErrorCode::UpstreamFailed,
                    format!("worker {} closed its stream", engine.url),
                );
            }
            Err(status) => {
                let text = format!("worker {} died: {:?}: {}", engine.url, status.code(), status.message());
                return Error::new(ErrorCode::UpstreamFailed, text);
            }
        }
    }
}

/// Polls the load until it is refused, or unanswered for too long (a host that vanished breaks no stream).
async fn poll(worker: &Worker, engine: &Engine, mut client: Client, interval: Duration) -> Error {
    let mut failures = 0;
    loop {
        let error = match tokio::time::timeout(
            interval.max(Duration::from_secs(1)),
            client.get_load(GetLoadRequest {}),
        )
        .await
        {
            Ok(Ok(report)) => {
                let report = report.into_inner();
                let known = engine.adapters().map_or(0, |listed| listed.version);
                if report.adapters_version != known
                    && let Err(status) = engine.read_adapters(&mut client).await
                {
                    tracing::warn!(worker = %engine.url, cause = status.message(), "the adapters can't be read");
                }
                worker.load.reported(u64::from(report.running) + u64::from(report.waiting));
                engine.report.store(Some(Arc::new(report)));
                failures = 0;
                None
            }
            Ok(Err(status)) => Some(error_from_status(&engine.url, "GetLoad", &status)),
            Err(_) => Some(Error::new(
                ErrorCode::DeadlineExceeded,
                format!("worker {} does not answer GetLoad", engine.url),
            )),
        };
        if let Some(error) = error {
            failures += 1;
            if failures >= LOAD_FAILURES {
                return Error { code: ErrorCode::UpstreamFailed, ..error };
            }
        }
        tokio::time::sleep(interval).await;
    }
}

/// Mirrors the engine's cache into the index; subscribes again after a gap or a broken stream.
async fn follow(
    worker: branchline_core::WorkerId,
    url: Arc<str>,
    mut client: Client,
    index: Arc<crate::index::Index>,
    stop: CancellationToken,
) {
    let mut wait = Duration::from_millis(20);
    loop {
        let run = async {
            let mut batches = client
                .subscribe_kv_events(SubscribeKvEventsRequest { include_token_ids: false })
                .await?
                .into_inner();
            while let Some(batch) = batches.message().await? {
                if stop.is_cancelled() {
                    break;
                }
                if let Err(gap) = index.apply(worker, &batch) {
                    return Err(Status::data_loss(gap.to_string()));
                }
            }
            Ok(())
        };
        let outcome = tokio::select! {
            () = stop.cancelled() => Ok(()),
            outcome = run => outcome,
        };
        index.purge(worker);
        if stop.is_cancelled() {
            return;
        }
        if let Err(status) = &outcome
            && status.code() == Code::Unimplemented
        {
            tracing::info!(worker = %url, "the worker sends no cache events; its cache is unknown");
            return;
        }
        tracing::debug!(worker = %url, ?outcome, "cache events are subscribed again");
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
        wait = (wait * 2).min(Duration::from_secs(2));
    }
}
