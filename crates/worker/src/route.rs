//! Choice of a worker: gathers candidates, asks the index and the policy, and counts the load.

use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_prefix::{hash, namespace};
use branchline_routing::{BLOCK_BYTES, Candidate, Policy, TextIndex};
use parking_lot::Mutex;
use rand::rngs::StdRng;

use crate::index::{Index, Reservation};
use crate::load::LoadGuard;
use crate::worker::{Transport, Worker};

/// What separates cached prefixes, as the request has it; the worker's weight version is added here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheKey<'a> {
    /// Secret of the tenant.
    pub cache_salt: Option<&'a str>,
    /// Free key of the caller.
    pub extra_key: Option<&'a str>,
    /// Adapter name.
    pub adapter: Option<&'a str>,
}

/// What is known of a request when its worker is chosen.
#[derive(Debug, Clone, Copy, Default)]
pub struct RouteQuery<'a> {
    /// The prompt for engines; empty if not tokenised.
    pub token_ids: &'a [u32],
    /// The prompt for HTTP workers; empty if unknown.
    pub text: &'a [u8],
    /// Separates cached prefixes.
    pub namespace: CacheKey<'a>,
    /// Workers that must not be chosen, for example those that failed this request.
    pub exclude: &'a [WorkerId],
    /// Only workers of this kind; absent for any.
    pub transport: Option<Transport>,
    /// The engine to prefer to all others, by what it called itself: it holds a lease of the request.
    pub engine_id: Option<&'a str>,
}

/// A chosen worker.
#[derive(Debug)]
pub struct Choice {
    /// Who.
    pub worker: Arc<Worker>,
    /// Keeps the request on the worker's load; hold it to the last byte.
    pub guard: LoadGuard,
    /// Prompt tokens that the index believes to be cached there, or to be by then. For HTTP workers estimated.
    pub predicted_cached_tokens: u32,
}

/// Bytes of prompt text that pass for one token where nothing tokenises.
const BYTES_PER_TOKEN: u64 = 4;

/// The policy with what it draws on.
pub(crate) struct Router {
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) random: Mutex<StdRng>,
    pub(crate) index: Arc<Index>,
}

/// Block hashes of the prompt for workers that cut and name blocks alike.
struct Hashed {
    namespace: Vec<u8>,
    page: usize,
    hashes: Arc<[u64]>,
}

/// What a candidate is predicted to have.
#[derive(Debug, Clone, Default)]
struct Prediction {
    cached: u64,
    /// For a reservation; empty for HTTP workers.
    hashes: Arc<[u64]>,
}

impl Router {
    /// Chooses among `eligible`, which serve the model and are ready.
    pub(crate) fn choose(&self, eligible: &[&Arc<Worker>], query: &RouteQuery<'_>) -> Result<Choice> {
        let prompt = |worker: &Worker| match worker.transport() {
            Transport::Grpc => query.token_ids.len() as u64,
            Transport::Http => query.text.len() as u64 / BYTES_PER_TOKEN,
        };
        let (predictions, text_hashes) = self.predict(eligible, query);
        let candidates: Vec<_> = eligible
            .iter()
            .zip(&predictions)
            .map(|(worker, prediction)| Candidate {
                worker: worker.id,
                uncached_tokens: prompt(worker).saturating_sub(prediction.cached),
                queued_tokens: worker.load.prefill_tokens(),
                running: worker.load.running(),
            })
            .collect();
        let position = self.policy.choose(&candidates, &mut *self.random.lock());
        let Some((position, worker)) =
            position.and_then(|position| Some((position, *eligible.get(position)?)))
        else {
            return Err(unavailable("no worker is ready; try again"));
        };
        let Prediction { cached, hashes } = predictions[position].clone();
        if let Some(hashes) = text_hashes
            && worker.transport() == Transport::Http
        {
            self.index.texts.lock().insert(worker.id, &hashes);
        }
        let reservation = (!hashes.is_empty()).then(|| Reservation::new(&self.index, worker.id, hashes));
        let guard = LoadGuard::new(worker.load.clone(), candidates[position].uncached_tokens, reservation);
        Ok(Choice {
            worker: worker.clone(),
            guard,
            predicted_cached_tokens: u32::try_from(cached).unwrap_or(u32::MAX),
        })
    }

    /// Per eligible worker, what it has of the prompt; and the text's hashes, if any HTTP worker is among them.
    fn predict(
        &self,
        eligible: &[&Arc<Worker>],
        query: &RouteQuery<'_>,
    ) -> (Vec<Prediction>, Option<Vec<u64>>) {
        let mut predictions = vec![Prediction::default(); eligible.len()];
        if !self.policy.kind().needs_index() {
            return (predictions, None);
        }
        self.predict_engines(eligible, query, &mut predictions);
        let http: Vec<_> =
            (0..eligible.len()).filter(|at| eligible[*at].transport() == Transport::Http).collect();
        if http.is_empty() || query.text.is_empty() {
            return (predictions, None);
        }
        let key = query.namespace;
        let root = hash::root(&namespace::encode(key.cache_salt, key.extra_key, key.adapter, ""));
        let hashes = TextIndex::hashes(root, query.text);
        let ids: Vec<_> = http.iter().map(|at| eligible[*at].id).collect();
        let found = self.index.texts.lock().matches(&hashes, &ids);
        for (at, blocks) in http.into_iter().zip(found) {
            predictions[at].cached = (blocks * BLOCK_BYTES) as u64 / BYTES_PER_TOKEN;
        }
        (predictions, Some(hashes))
    }

    fn predict_engines(
        &self,
        eligible: &[&Arc<Worker>],
        query: &RouteQuery<'_>,
        predictions: &mut [Prediction],
    ) {
        // At least one token is always computed.
        let Some(limit) = query.token_ids.len().checked_sub(1) else { return };
        let mut groups: Vec<(Hashed, Vec<usize>)> = Vec::new();
        for (at, worker) in eligible.iter().enumerate() {
            let Some(model) = worker.model() else { continue };
            let page = model.info.page_size as usize;
            if page == 0 {
                continue;
            }
            let key = query.namespace;
            let space =
                namespace::encode(key.cache_salt, key.extra_key, key.adapter, &model.info.weight_version);
            match groups.iter_mut().find(|(group, _)| group.page == page && group.namespace == space) {
                Some((_, members)) => members.push(at),
                None => {
                    let hashes = hash::chain_all(&space, query.token_ids, page).into();
                    groups.push((Hashed { namespace: space, page, hashes }, vec![at]));
                }
            }
        }
        let blocks = self.index.blocks.read();
        for (Hashed { page, hashes, .. }, members) in groups {
            let ids: Vec<_> = members.iter().map(|at| eligible[*at].id).collect();
            let found = blocks.matches(&hashes[..(limit / page).min(hashes.len())], &ids);
            for (at, found) in members.into_iter().zip(found) {
                predictions[at] = Prediction { cached: (found * page) as u64, hashes: hashes.clone() };
            }
        }
    }
}

/// Nobody can serve now, but soon someone may.
pub(crate) fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorCode::Unavailable, message).with_retry_after(Duration::from_secs(1))
}
