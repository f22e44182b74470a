//! Engines over gRPC: one supervised session each, and the calls that go beside it.

mod delta;
mod mux;
mod session;
mod slot;
mod vitals;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use branchline_core::{Error, ErrorCode, Result};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

pub use delta::DeltaStream;
use mux::Mux;
pub(crate) use session::supervise;

use crate::address::Address;
use crate::convert::error_from_status;
use crate::dial::Dialer;
use crate::model::Model;
use crate::options::{FleetOptions, SubmitOptions};
use crate::proto;
use crate::proto::engine_client::EngineClient;

/// The generated client with the token put on each call.
pub(crate) type Client = EngineClient<InterceptedService<Channel, Token>>;

/// Puts the bearer token on each call.
#[derive(Clone)]
pub(crate) struct Token(Option<MetadataValue<Ascii>>);

impl Token {
    pub(crate) fn new(token: Option<&str>) -> Result<Self> {
        let header = token.map(|token| format!("Bearer {token}").parse::<MetadataValue<Ascii>>()).transpose();
        let mut header = header.map_err(|_| {
            Error::invalid("worker_token", "worker_token has characters that no header can carry")
        })?;
        if let Some(header) = &mut header {
            header.set_sensitive(true);
        }
        Ok(Self(header))
    }
}

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> std::result::Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

/// Limit of one call beside the stream.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// What is known of one engine. The session fills it; requests read it.
pub(crate) struct Engine {
    url: Arc<str>,
    dialer: Dialer,
    token: Token,
    options: Arc<FleetOptions>,
    /// The live stream; none while not attached.
    mux: ArcSwapOption<Mux>,
    client: ArcSwapOption<Client>,
    model: ArcSwapOption<Model>,
    report: ArcSwapOption<proto::GetLoadResponse>,
    /// Kept while the engine is away, as the model is.
    adapters: ArcSwapOption<proto::ListAdaptersResponse>,
    /// As the engine greeted; changes at each of its starts. None while not attached.
    engine_id: ArcSwapOption<String>,
}

impl Engine {
    pub(crate) fn new(
        url: &str,
        address: &Address,
        token: Option<&str>,
        options: Arc<FleetOptions>,
    ) -> Result<Self> {
        Ok(Self {
            url: url.into(),
            dialer: Dialer::new(address, &options.tls, b"h2"),
            token: Token::new(token)?,
            options,
            mux: ArcSwapOption::empty(),
            client: ArcSwapOption::empty(),
            model: ArcSwapOption::empty(),
            report: ArcSwapOption::empty(),
            adapters: ArcSwapOption::empty(),
            engine_id: ArcSwapOption::empty(),
        })
    }

    pub(crate) fn model(&self) -> Option<Arc<Model>> {
        self.model.load_full()
    }

    pub(crate) fn load_report(&self) -> Option<Arc<proto::GetLoadResponse>> {
        self.report.load_full()
    }

    pub(crate) fn engine_id(&self) -> Option<Arc<String>> {
        self.engine_id.load_full()
    }

    pub(crate) fn adapters(&self) -> Option<Arc<proto::ListAdaptersResponse>> {
        self.adapters.load_full()
    }

    fn away(&self) -> Error {
        // Clients learn what happened, not where.
        tracing::debug!(worker = %self.url, "the worker is not attached");
        Error::new(ErrorCode::Unavailable, "the worker is not attached; try again")
            .with_retry_after(Duration::from_secs(1))
    }

    /// An error as clients may see it: what was refused, not where.
    fn told(&self, error: Error) -> Error {
        let message = error.message.replace(&format!("worker {}", self.url), "the worker");
        Error { message, ..error }
    }

    pub(crate) fn submit(
        &self,
        mut request: proto::GenerateRequest,
        options: SubmitOptions,
    ) -> Result<DeltaStream> {
        let mux = self.mux.load_full().ok_or_else(|| self.away())?;
        let sequences = self.sequences(&request);
        if let Some(deadline) = options.deadline {
            let ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
            request.deadline_ms = Some(request.deadline_ms.map_or(ms, |own| own.min(ms)));
        }
        let deadline = request.deadline_ms.map(|ms| Box::pin(tokio::time::sleep(Duration::from_millis(ms))));
        let (handle, slot) = mux.submit(request, sequences, options.buffer.unwrap_or(self.options.buffer))?;
        Ok(DeltaStream { slot, mux, handle, deadline, guard: options.guard, done: false })
    }

    /// How many sequences will end. Counts beyond the contract's are left to the engine's refusal.
    fn sequences(&self, request: &proto::GenerateRequest) -> usize {
        let asked = request.sampling.as_ref().and_then(|sampling| sampling.n);
        let model = self.model();
        let usual = model.as_ref().and_then(|model| model.info.default_sampling.as_ref()?.n);
        asked.or(usual).unwrap_or(1).clamp(1, 128) as usize
    }

    async fn call<T>(
        &self,
        name: &str,
        call: impl AsyncFnOnce(Client) -> std::result::Result<Response<T>, Status>,
    ) -> Result<T> {
        let client = self.client.load_full().ok_or_else(|| self.away())?;
        match tokio::time::timeout(CALL_TIMEOUT, call((*client).clone())).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(error_from_status(&self.url, name, &status)),
            Err(_) => Err(Error::new(
                ErrorCode::DeadlineExceeded,
                format!("worker {} did not answer {name} within {} s", self.url, CALL_TIMEOUT.as_secs()),
            )),
        }
    }

    pub(crate) async fn abort(&self, request: proto::AbortRequest) -> Result<u32> {
        Ok(self.call("Abort", async |mut client| client.abort(request).await).await?.aborted)
    }

    pub(crate) async fn server_info(&self) -> Result<proto::GetServerInfoResponse> {
        self.call("GetServerInfo", async |mut client| {
            client.get_server_info(proto::GetServerInfoRequest {}).await
        })
        .await
    }

    pub(crate) async fn flush_cache(&self) -> Result<proto::FlushCacheResponse> {
        self.call("FlushCache", async |mut client| client.flush_cache(proto::FlushCacheRequest {}).await)
            .await
    }

    pub(crate) async fn cache_tree(
        &self,
        request: proto::GetCacheTreeRequest,
    ) -> Result<proto::GetCacheTreeResponse> {
        self.call("GetCacheTree", async |mut client| client.get_cache_tree(request).await).await
    }

    pub(crate) async fn renew_lease(
        &self,
        request: proto::RenewLeaseRequest,
    ) -> Result<proto::RenewLeaseResponse> {
        let answer = self.call("RenewLease", async |mut client| client.renew_lease(request).await).await;
        answer.map_err(|error| self.told(error))
    }

    pub(crate) async fn release_lease(&self, request: proto::ReleaseLeaseRequest) -> Result<bool> {
        let answer = self.call("ReleaseLease", async |mut client| client.release_lease(request).await).await;
        answer.map(|answer| answer.released).map_err(|error| self.told(error))
    }

    /// Waits as long as it takes: the request has its own deadline.
    pub(crate) async fn score(&self, request: proto::ScoreRequest) -> Result<proto::ScoreResponse> {
        let client = self.client.load_full().ok_or_else(|| self.told(self.away()))?;
        let answer = (*client).clone().score(request).await;
        let error = |status| self.told(error_from_status(&self.url, "Score", &status));
        answer.map(Response::into_inner).map_err(error)
    }

    /// As [`Self::score`]: waits as long as it takes.
    pub(crate) async fn embed(&self, request: proto::EmbedRequest) -> Result<proto::EmbedResponse> {
        let client = self.client.load_full().ok_or_else(|| self.told(self.away()))?;
        let answer = (*client).clone().embed(request).await;
        let error = |status| self.told(error_from_status(&self.url, "Embed", &status));
        answer.map(Response::into_inner).map_err(error)
    }

    /// Reads the list of adapters anew. An engine without the call has none.
    pub(crate) async fn read_adapters(&self, client: &mut Client) -> std::result::Result<(), Status> {
        let listed = match client.list_adapters(proto::ListAdaptersRequest {}).await {
            Ok(listed) => listed.into_inner(),
            Err(status) if status.code() == Code::Unimplemented => proto::ListAdaptersResponse::default(),
            Err(status) => return Err(status),
        };
        self.adapters.store(Some(Arc::new(listed)));
        Ok(())
    }

    /// As [`Self::score`]: waits as long as it takes.
    pub(crate) async fn load_adapter(&self, request: proto::LoadAdapterRequest) -> Result<proto::Adapter> {
        let client = self.client.load_full().ok_or_else(|| self.told(self.away()))?;
        let mut client = (*client).clone();
        let told = |status| self.told(error_from_status(&self.url, "LoadAdapter", &status));
        let loaded = client.load_adapter(request).await.map_err(told)?;
        self.read_adapters(&mut client).await.map_err(told)?;
        Ok(loaded.into_inner().adapter.unwrap_or_default())
    }

    pub(crate) async fn unload_adapter(&self, request: proto::UnloadAdapterRequest) -> Result<u32> {
        let answer = self
            .call("UnloadAdapter", async |mut client| {
                let answer = client.unload_adapter(request).await?;
                self.read_adapters(&mut client).await?;
                Ok(answer)
            })
            .await;
        answer.map(|answer| answer.running).map_err(|error| self.told(error))
    }

    pub(crate) async fn load(&self) -> Result<proto::GetLoadResponse> {
        self.call("GetLoad", async |mut client| client.get_load(proto::GetLoadRequest {}).await).await
    }
}
