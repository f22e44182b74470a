//! The contract's calls, answered from a [`State`].

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use branchline_worker::proto::attach_response::Message as Answer;
use branchline_worker::proto::engine_server::Engine;
use branchline_worker::proto::get_tokenizer_response::Part;
use branchline_worker::proto::{self, attach_request::Message};
use futures_util::{Stream, StreamExt, stream};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{Act, Frames, State, frame};

pub(super) struct Service {
    pub(super) state: Arc<State>,
}

type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Service {
    fn admit<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let token = self.state.setup.lock().token.clone();
        let given = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        match token {
            Some(token) if given != Some(&format!("Bearer {token}")) => {
                Err(Status::unauthenticated("wrong or missing token"))
            }
            _ => Ok(()),
        }
    }
}

/// The end that an abort gives a request.
fn aborted_end(handle: u64) -> proto::SequenceDelta {
    let finish = proto::Finish { reason: proto::FinishReason::Abort.into(), ..Default::default() };
    proto::SequenceDelta { handle, finish: Some(finish), ..Default::default() }
}

/// Plays the script for one request, one frame an act.
async fn play(state: Arc<State>, frames: Frames, handle: u64, acts: Vec<Act>) {
    for act in acts {
        match act {
            Act::Wait(wait) => tokio::time::sleep(wait).await,
            Act::Die => {
                state.kill();
                return;
            }
            Act::Send(delta) => {
                let step = state.step.fetch_add(1, Ordering::Relaxed);
                let news = frame(step, vec![proto::SequenceDelta { handle, ..*delta }]);
                if frames.send(Ok(news)).is_err() {
                    return;
                }
            }
        }
    }
}

async fn listen(state: Arc<State>, mut inbound: Streaming<proto::AttachRequest>, frames: Frames) {
    while let Ok(Some(request)) = inbound.message().await {
        match request.message {
            Some(Message::Hello(_)) => {
                let welcome = proto::Welcome {
                    engine_id: format!("fake-{}", state.attached.load(Ordering::Relaxed)),
                    contract_revision: 1,
                };
                let _ = frames.send(Ok(proto::AttachResponse { message: Some(Answer::Welcome(welcome)) }));
                *state.frames.lock() = Some(frames.clone());
                state.attached.fetch_add(1, Ordering::Release);
            }
            Some(Message::Submit(submit)) => {
                let script = state.script.lock().clone();
                if let (Some(script), Some(request)) = (script, &submit.request) {
                    tokio::spawn(play(state.clone(), frames.clone(), submit.handle, script(request)));
                }
                state.submits.lock().push(submit);
            }
            Some(Message::Cancel(cancel)) => state.cancels.lock().push(cancel.handle),
            None => {}
        }
        state.changed();
    }
}

#[tonic::async_trait]
impl Engine for Service {
    type AttachStream = Out<proto::AttachResponse>;
    type GenerateStream = Out<proto::GenerateResponse>;
    type GetTokenizerStream = Out<proto::GetTokenizerResponse>;
    type SubscribeKvEventsStream = Out<proto::SubscribeKvEventsResponse>;
    type PullKvStream = Out<proto::PullKvResponse>;

    async fn attach(
        &self,
        request: Request<Streaming<proto::AttachRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        self.admit(&request)?;
        let (frames, outbound) = mpsc::unbounded_channel();
        tokio::spawn(listen(self.state.clone(), request.into_inner(), frames));
        Ok(Response::new(UnboundedReceiverStream::new(outbound).boxed()))
    }

    async fn generate(
        &self,
        request: Request<proto::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        self.admit(&request)?;
        let script = self.state.script.lock().clone();
        let (frames, outbound) = mpsc::unbounded_channel();
        match script {
            Some(script) => {
                drop(tokio::spawn(play(self.state.clone(), frames, 0, script(request.get_ref()))))
            }
            None => self.state.singles.lock().push(frames),
        }
        self.state.changed();
        let answers = UnboundedReceiverStream::new(outbound).map(|answer| {
            answer.map(|answer| match answer.message {
                Some(Answer::Frame(step)) => proto::GenerateResponse { deltas: step.deltas },
                _ => proto::GenerateResponse::default(),
            })
        });
        Ok(Response::new(answers.boxed()))
    }

    async fn abort(
        &self,
        request: Request<proto::AbortRequest>,
    ) -> Result<Response<proto::AbortResponse>, Status> {
        self.admit(&request)?;
        let request = request.into_inner();
        let is_meant = |submit: &proto::Submit| {
            request.abort_all
                || submit.request.as_ref().is_some_and(|own| own.request_id == request.request_id)
        };
        let meant: Vec<u64> = self
            .state
            .submits
            .lock()
            .iter()
            .filter(|submit| is_meant(submit))
            .map(|submit| submit.handle)
            .collect();
        let aborted = meant.len() as u32;
        // Ends of requests that are over already are for nobody.
        self.state.send(meant.into_iter().map(aborted_end).collect());
        self.state.aborts.lock().push(request);
        self.state.changed();
        Ok(Response::new(proto::AbortResponse { aborted }))
    }

    async fn get_model_info(
        &self,
        request: Request<proto::GetModelInfoRequest>,
    ) -> Result<Response<proto::GetModelInfoResponse>, Status> {
        self.admit(&request)?;
        Ok(Response::new(self.state.setup.lock().info.clone()))
    }

    async fn get_server_info(
        &self,
        request: Request<proto::GetServerInfoRequest>,
    ) -> Result<Response<proto::GetServerInfoResponse>, Status> {
        self.admit(&request)?;
        let cache = proto::CacheStats {
            page_size: self.state.setup.lock().info.page_size,
            pages_total: 64,
            pages_free: 64,
            ..Default::default()
        };
        Ok(Response::new(proto::GetServerInfoResponse {
            version: "0".into(),
            engine_id: "fake".into(),
            options_json: "{}".into(),
            cache: Some(cache),
            load: Some(proto::GetLoadResponse::default()),
            ..Default::default()
        }))
    }

    async fn get_tokenizer(
        &self,
        request: Request<proto::GetTokenizerRequest>,
    ) -> Result<Response<Self::GetTokenizerStream>, Status> {
        self.admit(&request)?;
        let setup = self.state.setup.lock().clone();
        let mut manifest = setup.manifest;
        if manifest.tokenizer_json_sha256.is_empty() {
            manifest.tokenizer_json_sha256 = Sha256::digest(&setup.tokenizer_json).to_vec();
        }
        if manifest.tokenizer_json_bytes == 0 {
            manifest.tokenizer_json_bytes = setup.tokenizer_json.len() as u64;
        }
        let pieces: Vec<_> = setup
            .tokenizer_json
            .chunks(setup.piece_bytes.max(1))
            .map(|piece| Part::TokenizerJson(piece.to_vec()))
            .collect();
        let parts = std::iter::once(Part::Manifest(manifest)).chain(pieces);
        let parts = stream::iter(parts.map(|part| Ok(proto::GetTokenizerResponse { part: Some(part) })));
        Ok(Response::new(parts.boxed()))
    }

    async fn get_load(
        &self,
        request: Request<proto::GetLoadRequest>,
    ) -> Result<Response<proto::GetLoadResponse>, Status> {
        self.admit(&request)?;
        let running = self.state.submits.lock().len() as u32;
        let adapters_version = self.state.adapters.lock().version;
        Ok(Response::new(proto::GetLoadResponse {
            running,
            pages_total: 64,
            adapters_version,
            ..Default::default()
        }))
    }

    async fn subscribe_kv_events(
        &self,
        request: Request<proto::SubscribeKvEventsRequest>,
    ) -> Result<Response<Self::SubscribeKvEventsStream>, Status> {
        self.admit(&request)?;
        if self.state.setup.lock().without_events {
            return Err(Status::unimplemented("no events"));
        }
        let (batches, outbound) = mpsc::unbounded_channel();
        let epoch = self.state.subscriptions.fetch_add(1, Ordering::AcqRel) + 1;
        let hashes = self.state.snapshot.lock().clone();
        let stored = proto::BlocksStored { block_hashes: hashes, ..Default::default() };
        let change = Some(proto::kv_event::Change::Stored(stored));
        let opening = proto::SubscribeKvEventsResponse {
            epoch,
            sequence: 0,
            snapshot: true,
            snapshot_end: true,
            events: vec![proto::KvEvent { change }],
            page_size: self.state.setup.lock().info.page_size,
        };
        let _ = batches.send(Ok(opening));
        *self.state.batches.lock() = Some(batches);
        self.state.changed();
        Ok(Response::new(UnboundedReceiverStream::new(outbound).boxed()))
    }

    async fn pull_kv(
        &self,
        _: Request<Streaming<proto::PullKvRequest>>,
    ) -> Result<Response<Self::PullKvStream>, Status> {
        Err(Status::unimplemented("engines pull from engines, and none of these has pages"))
    }

    async fn acquire_lease(
        &self,
        _: Request<proto::AcquireLeaseRequest>,
    ) -> Result<Response<proto::AcquireLeaseResponse>, Status> {
        Err(Status::unimplemented("gateways plant leases over Attach"))
    }

    async fn renew_lease(
        &self,
        _: Request<proto::RenewLeaseRequest>,
    ) -> Result<Response<proto::RenewLeaseResponse>, Status> {
        Err(Status::not_found("no lease"))
    }

    async fn release_lease(
        &self,
        _: Request<proto::ReleaseLeaseRequest>,
    ) -> Result<Response<proto::ReleaseLeaseResponse>, Status> {
        Ok(Response::new(proto::ReleaseLeaseResponse { released: false }))
    }

    async fn score(&self, _: Request<proto::ScoreRequest>) -> Result<Response<proto::ScoreResponse>, Status> {
        Err(Status::unimplemented("nothing to score with"))
    }

    async fn load_adapter(
        &self,
        request: Request<proto::LoadAdapterRequest>,
    ) -> Result<Response<proto::LoadAdapterResponse>, Status> {
        let proto::LoadAdapterRequest { name, path } = request.into_inner();
        let adapter = proto::Adapter { name, digest: format!("digest of {path}"), path, rank: 8, running: 0 };
        if adapter.path == "missing" {
            return Err(Status::invalid_argument("adapter missing: there is no adapter_config.json in it"));
        }
        let mut listed = self.state.adapters.lock();
        listed.adapters.retain(|own| own.name != adapter.name);
        listed.adapters.push(adapter.clone());
        listed.version += 1;
        Ok(Response::new(proto::LoadAdapterResponse { adapter: Some(adapter) }))
    }

    async fn unload_adapter(
        &self,
        request: Request<proto::UnloadAdapterRequest>,
    ) -> Result<Response<proto::UnloadAdapterResponse>, Status> {
        let name = request.into_inner().name;
        let mut listed = self.state.adapters.lock();
        let before = listed.adapters.len();
        listed.adapters.retain(|own| own.name != name);
        if listed.adapters.len() == before {
            return Err(Status::not_found(format!("adapter '{name}' is not loaded")));
        }
        listed.version += 1;
        Ok(Response::new(proto::UnloadAdapterResponse { running: 0 }))
    }

    async fn list_adapters(
        &self,
        _: Request<proto::ListAdaptersRequest>,
    ) -> Result<Response<proto::ListAdaptersResponse>, Status> {
        Ok(Response::new(self.state.adapters.lock().clone()))
    }

    /// A vector of each text's length, or a score that grows with it: what routes and shapes are tested with.
    async fn embed(
        &self,
        request: Request<proto::EmbedRequest>,
    ) -> Result<Response<proto::EmbedResponse>, Status> {
        self.admit(&request)?;
        let request = request.into_inner();
        let size = if request.task() == proto::EmbedTask::Rank { 1 } else { request.dimensions.unwrap_or(4) };
        let values = |input: &proto::EmbedInput| vec![input.token_ids.len() as f32; size as usize];
        let results = request.inputs.iter().map(|input| proto::EmbedResult { values: values(input) });
        Ok(Response::new(proto::EmbedResponse { results: results.collect() }))
    }

    async fn get_cache_tree(
        &self,
        _: Request<proto::GetCacheTreeRequest>,
    ) -> Result<Response<proto::GetCacheTreeResponse>, Status> {
        Ok(Response::new(proto::GetCacheTreeResponse::default()))
    }

    async fn flush_cache(
        &self,
        request: Request<proto::FlushCacheRequest>,
    ) -> Result<Response<proto::FlushCacheResponse>, Status> {
        self.admit(&request)?;
        Ok(Response::new(proto::FlushCacheResponse { flushed_pages: 64, held_pages: 0 }))
    }
}
