//! Choice of a worker: gathers candidates, asks the index and the policy, and counts the load.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, ErrorCode, WorkerId};
use branchline_prefix::{hash, namespace};
use branchline_routing::{Ask, BLOCK_BYTES, Candidate, Policy, PolicyKind, TextIndex, fork_part};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::adapters::AdapterKey;
use crate::clock::FleetClock;
use crate::health::HealthOptions;
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
    /// The adapter, of which only the digest separates; also who may be chosen at all.
    pub adapter: Option<AdapterKey<'a>>,
}

impl<'a> CacheKey<'a> {
    fn digest(&self) -> Option<&'a str> {
        self.adapter.map(|adapter| adapter.digest)
    }
}

/// What a client says of what is to come. Only a word: it shifts a choice, within bounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hints {
    /// Output tokens that the request is expected to write.
    pub expected_tokens: Option<u32>,
    /// Requests that go on from one prefix at about the same time, this one among them.
    pub fork_width: Option<u32>,
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
    /// Hash of the session or user that the request belongs to.
    pub key: Option<u64>,
    /// What its client expects.
    pub hints: Hints,
    /// The worker that must have it if it can: where its leased pages are.
    pub prefer: Option<WorkerId>,
    /// Workers that must not be chosen, for example those that failed this request.
    pub exclude: &'a [WorkerId],
    /// Only engines that promise these bits.
    pub numerics_id: Option<&'a str>,
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
    /// Why it is this one.
    pub decision: Decision,
}

/// A choice with what it was made of.
#[derive(Debug, Clone)]
pub struct Decision {
    /// The policy that chose.
    pub policy: PolicyKind,
    /// Who could have been chosen.
    pub candidates: Vec<Candidate>,
    /// Position of the one that was.
    pub chosen: usize,
    /// Prompt tokens, estimated for HTTP workers.
    pub prompt_tokens: u64,
    /// Workers of the model that were left out: not ready, failing, in doubt, resting, full or tried before.
    pub left_out: Vec<WorkerId>,
}

impl Decision {
    /// Prompt tokens that the chosen worker would have to compute.
    pub fn uncached_tokens(&self) -> u64 {
        self.candidates.get(self.chosen).map_or(self.prompt_tokens, |chosen| chosen.uncached_tokens)
    }
}

/// A worker as whoever chooses sees it.
#[derive(Debug, Clone)]
pub struct Look {
    /// Who.
    pub worker: Arc<Worker>,
    /// Requests it serves now.
    pub running: u64,
    /// Prompt tokens that wait there.
    pub queued_tokens: u64,
    /// Prompt tokens of the request that it is predicted to have.
    pub cached_tokens: u64,
}

/// Bytes of prompt text that pass for one token where nothing tokenises.
const BYTES_PER_TOKEN: u64 = 4;
/// Tokens of a block of the approximate index.
const BLOCK_TOKENS: usize = BLOCK_BYTES / BYTES_PER_TOKEN as usize;
/// How much of a prompt's beginning names it for `prefix_hash`.
const PREFIX_TOKENS: usize = 256;
const PREFIX_BYTES: usize = PREFIX_TOKENS * BYTES_PER_TOKEN as usize;
/// Learnt speeds within this factor of the fleet's are noise, and no worker counts as more than twice as fast.
const SPEED_NOISE: f64 = 1.33;
const SPEED_MOST: f64 = 2.0;

/// The policies with what they draw on.
pub(crate) struct Router {
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) by_model: HashMap<String, Box<dyn Policy>>,
    pub(crate) random: Mutex<StdRng>,
    pub(crate) index: Arc<Index>,
    pub(crate) clock: FleetClock,
    pub(crate) health: HealthOptions,
}

/// Block hashes of the prompt for workers that cut and name blocks alike.
struct Hashed {
    namespace: Vec<u8>,
    page: usize,
    hashes: Arc<[u64]>,
}

/// Candidates with what is known of each.
pub(crate) struct Weighed {
    policy: PolicyKind,
    pub(crate) candidates: Vec<Candidate>,
    predictions: Vec<Prediction>,
    /// The text's hashes, if any HTTP worker is among them.
    text_hashes: Option<Vec<u64>>,
}

/// Prompt tokens, estimated for HTTP workers.
fn prompt_tokens(worker: &Worker, query: &RouteQuery<'_>) -> u64 {
    match worker.transport() {
        Transport::Grpc => query.token_ids.len() as u64,
        Transport::Http => query.text.len() as u64 / BYTES_PER_TOKEN,
    }
}

/// What a candidate is predicted to have.
#[derive(Debug, Clone, Default)]
struct Prediction {
    cached: u64,
    /// What others have of it and it lacks, by use.
    copied: u64,
    /// Blocks of it.
    blocks: usize,
    /// For a reservation; empty for HTTP workers.
    hashes: Arc<[u64]>,
}

impl Router {
    /// The policy of a model.
    pub(crate) fn policy_of(&self, model: Option<&str>) -> &dyn Policy {
        let own = model.and_then(|model| self.by_model.get(model));
        own.map_or(&*self.policy, |policy| &**policy)
    }

    /// Whether any policy needs to know what engines have cached.
    pub(crate) fn needs_index(&self) -> bool {
        let needs = |policy: &dyn Policy| policy.kind().needs_index();
        needs(&*self.policy) || self.by_model.values().any(|policy| needs(&**policy))
    }

    /// Chooses among `eligible`, which serve the model and are ready. `None` if the chosen one has just let in its one
    /// probe: choose again.
    pub(crate) fn choose(
        &self,
        model: Option<&str>,
        eligible: &[&Arc<Worker>],
        query: &RouteQuery<'_>,
    ) -> Option<Choice> {
        let policy = self.policy_of(model);
        let weighed = self.weigh(policy.kind(), eligible, query);
        let ask = Ask { key: query.key, prefix: prefix(policy.kind(), query), now: self.clock.now() };
        let position = policy.choose(&weighed.candidates, &ask, &mut *self.random.lock())?;
        self.take(eligible, weighed, position, query)
    }

    /// What each of `eligible` would have to do for a request.
    pub(crate) fn weigh(
        &self,
        policy: PolicyKind,
        eligible: &[&Arc<Worker>],
        query: &RouteQuery<'_>,
    ) -> Weighed {
        let now = self.clock.now();
        let (predictions, text_hashes) = self.predict(policy, eligible, query);
        let speeds = speeds(eligible, now);
        let recent: SmallVec<[u64; 64]> = eligible.iter().map(|worker| worker.load.recent(now)).collect();
        let least = recent.iter().copied().min().unwrap_or(0);
        let shared_by = query.hints.fork_width.map_or(1, fork_part);
        let candidates: Vec<_> = eligible
            .iter()
            .zip(predictions.iter().zip(speeds).zip(recent))
            .map(|(worker, ((prediction, speed), recent))| Candidate {
                worker: worker.id,
                name: worker.name,
                uncached_tokens: prompt_tokens(worker, query).saturating_sub(prediction.cached),
                copied_tokens: prediction.copied,
                queued_tokens: worker.load.prefill_tokens(),
                hinted_tokens: worker.load.hinted(),
                shared_by,
                surplus_tokens: recent - least,
                running: worker.load.running() + worker.load.foreign(),
                usage: worker.usage(),
                speed,
            })
            .collect();
        Weighed { policy, candidates, predictions, text_hashes }
    }

    /// Counts the request on the one at `position`. `None` if that has just let in its one probe.
    pub(crate) fn take(
        &self,
        eligible: &[&Arc<Worker>],
        weighed: Weighed,
        position: usize,
        query: &RouteQuery<'_>,
    ) -> Option<Choice> {
        let Weighed { policy, candidates, predictions, text_hashes } = weighed;
        let now = self.clock.now();
        let worker = *eligible.get(position)?;
        let Prediction { cached, blocks, hashes, .. } = predictions[position].clone();
        let entry = worker.health().enter(now)?;
        worker.load.sent(prompt_tokens(worker, query), now);
        if let Some(hashes) = text_hashes
            && worker.transport() == Transport::Http
        {
            self.index.texts.lock().insert(worker.id, &hashes, now);
            self.index.uses.note(&hashes, BLOCK_TOKENS);
        }
        if let Some(model) = worker.model().filter(|_| !hashes.is_empty()) {
            self.index.uses.note(&hashes, model.info.page_size as usize);
        }
        let reservation =
            (blocks < hashes.len()).then(|| Reservation::new(&self.index, worker.id, hashes, blocks));
        let uncached = candidates[position].uncached_tokens;
        let patience = self.patience(worker, eligible, worker.load.prefill_tokens() + uncached);
        let mut guard = LoadGuard::new(
            worker.load.clone(),
            worker.record.clone(),
            entry,
            uncached,
            patience,
            reservation,
        );
        if let Some(expected) = query.hints.expected_tokens {
            guard.expects(expected);
        }
        Some(Choice {
            worker: worker.clone(),
            guard,
            predicted_cached_tokens: u32::try_from(cached).unwrap_or(u32::MAX),
            decision: Decision {
                policy,
                prompt_tokens: prompt_tokens(worker, query),
                candidates,
                chosen: position,
                left_out: Vec::new(),
            },
        })
    }

    /// How long the first byte may take before the worker is in doubt; `None` while nobody knows how fast it is.
    fn patience(&self, worker: &Worker, eligible: &[&Arc<Worker>], ahead: u64) -> Option<Duration> {
        let least = self.health.suspect_after?;
        let own = worker.health().pace.predict(ahead);
        // A worker that has not answered yet is as slow as the slowest of its peers, for all that is known.
        let predicted = own.or_else(|| {
            let of = |peer: &&Arc<Worker>| peer.health().pace.predict(ahead);
            eligible.iter().filter_map(of).max()
        })?;
        Some(least + predicted.mul_f64(self.health.suspect_factor))
    }

    /// What is known of each eligible worker.
    pub(crate) fn look(
        &self,
        model: Option<&str>,
        eligible: &[&Arc<Worker>],
        query: &RouteQuery<'_>,
    ) -> Vec<Look> {
        let (predictions, _) = self.predict(self.policy_of(model).kind(), eligible, query);
        let looks = eligible.iter().zip(predictions).map(|(worker, prediction)| Look {
            worker: Arc::clone(worker),
            running: worker.load.running() + worker.load.foreign(),
            queued_tokens: worker.load.prefill_tokens(),
            cached_tokens: prediction.cached,
        });
        looks.collect()
    }

    /// Per eligible worker, what it has of the prompt; and the text's hashes, if any HTTP worker is among them.
    fn predict(
        &self,
        policy: PolicyKind,
        eligible: &[&Arc<Worker>],
        query: &RouteQuery<'_>,
    ) -> (Vec<Prediction>, Option<Vec<u64>>) {
        let mut predictions = vec![Prediction::default(); eligible.len()];
        if !policy.needs_index() {
            return (predictions, None);
        }
        self.predict_engines(eligible, query, &mut predictions);
        let http: Vec<_> =
            (0..eligible.len()).filter(|at| eligible[*at].transport() == Transport::Http).collect();
        if http.is_empty() || query.text.is_empty() {
            return (predictions, None);
        }
        let key = query.namespace;
        let root = hash::root(&namespace::encode(key.cache_salt, key.extra_key, key.digest(), ""));
        let hashes = TextIndex::hashes(root, query.text);
        let ids: Vec<_> = http.iter().map(|at| eligible[*at].id).collect();
        let found = self.index.texts.lock().matches(&hashes, &ids, self.clock.now());
        let copied = self.copies(&hashes, &found, BLOCK_TOKENS);
        for (at, (blocks, copied)) in http.into_iter().zip(found.into_iter().zip(copied)) {
            predictions[at].cached = (blocks * BLOCK_TOKENS) as u64;
            predictions[at].copied = copied;
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
                namespace::encode(key.cache_salt, key.extra_key, key.digest(), &model.info.weight_version);
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
            let copied = self.copies(&hashes, &found, page);
            for (at, (found, copied)) in members.into_iter().zip(found.into_iter().zip(copied)) {
                let cached = (found * page) as u64;
                predictions[at] = Prediction { cached, copied, blocks: found, hashes: hashes.clone() };
            }
        }
    }

    /// For each worker with so many leading blocks, what it lacks of what another one has.
    fn copies(&self, hashes: &[u64], found: &[usize], block_tokens: usize) -> SmallVec<[u64; 64]> {
        let most = found.iter().copied().max().unwrap_or(0);
        if found.iter().all(|found| *found == most) {
            return SmallVec::from_elem(0, found.len());
        }
        let cost = self.index.uses.copy_cost(&hashes[..most], block_tokens);
        found.iter().map(|found| cost.of(*found) as u64).collect()
    }
}

/// How much each worker gets done beside a usual one: less while it warms up beside warm ones, if it is dear, or if it
/// has shown to be slower.
fn speeds(workers: &[&Arc<Worker>], now: Duration) -> SmallVec<[f64; 64]> {
    let shares: SmallVec<[f64; 64]> = workers.iter().map(|worker| worker.health().share(now)).collect();
    let warmest = shares.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let known = || workers.iter().filter_map(|worker| worker.health().pace.usual());
    let count = known().count();
    let usual = known().sum::<f64>() / count.max(1) as f64;
    let speed = |(worker, share): (&&Arc<Worker>, f64)| {
        let learnt = worker.health().pace.usual().map_or(1.0, |own| usual / own);
        let learnt = match learnt {
            ratio if (1.0 / SPEED_NOISE..SPEED_NOISE).contains(&ratio) => 1.0,
            ratio => ratio.clamp(1.0 / SPEED_MOST, SPEED_MOST),
        };
        share / warmest * learnt / worker.spec().cost
    };
    workers.iter().zip(shares).map(speed).collect()
}

/// The hash of the prompt's beginning, if the policy needs it.
fn prefix(policy: PolicyKind, query: &RouteQuery<'_>) -> Option<u64> {
    if !policy.needs_prefix() {
        return None;
    }
    if !query.token_ids.is_empty() {
        let head = &query.token_ids[..query.token_ids.len().min(PREFIX_TOKENS)];
        return Some(xxh3_64(&head.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>()));
    }
    (!query.text.is_empty()).then(|| xxh3_64(&query.text[..query.text.len().min(PREFIX_BYTES)]))
}

/// Nobody can serve now, but soon someone may.
pub(crate) fn unavailable(message: impl Into<String>) -> Error {
    Error::new(ErrorCode::Unavailable, message).with_retry_after(Duration::from_secs(1))
}
