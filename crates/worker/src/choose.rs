//! Who of the fleet may have a request, what becomes of one that waits, and what retries cost.
//!
//! The policy chooses among those that are fit; who is fit is decided here, from readiness, health and priority.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use branchline_core::{Error, Result};

use crate::fleet::Fleet;
use crate::health::{Health, Stand, review};
use crate::load::Watch;
use crate::route::{Choice, Look, RouteQuery, unavailable};
use crate::worker::Worker;

/// What is said of a request that waits for its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// Ask again after this long.
    Wait(Duration),
    /// The worker is silent while its peers go on: send the request to another one beside it.
    Stuck,
}

impl Fleet {
    /// Chooses a ready worker for `model` (absent: any) and counts the request on it.
    ///
    /// `Unavailable` with a retry hint if the model is known but nobody can serve it now; `NotFound`, naming the known
    /// models, if it is not.
    pub fn choose(&self, model: Option<&str>, query: &RouteQuery<'_>) -> Result<Choice> {
        let workers = self.workers.load();
        let serving = serving(&workers, model, query);
        if serving.is_empty() {
            let half = workers.iter().any(|worker| !worker.serves_alone() && worker.can_serve(model));
            return Err(match (model, query.namespace.adapter) {
                _ if half => self.no_pair(model),
                (Some(name), Some(adapter)) if self.model(name).is_some() => {
                    self.no_adapter(name, adapter.name)
                }
                _ => self.unknown(model),
            });
        }
        // A probe that another request took in this very moment makes its worker unfit: look again.
        for _ in 0..=serving.len() {
            let fit = self.open_to(&serving, query);
            if fit.is_empty() {
                break;
            }
            if let Some(mut choice) = self.shared.router.choose(model, &fit, query) {
                let left_out = serving.iter().filter(|worker| !fit.iter().any(|fit| fit.id == worker.id));
                choice.decision.left_out = left_out.map(|worker| worker.id).collect();
                return Ok(choice);
            }
        }
        Err(self.nobody(model, &serving, query))
    }

    /// Who could be chosen for a request now, with what is known of each.
    pub fn candidates(&self, model: Option<&str>, query: &RouteQuery<'_>) -> Vec<Look> {
        let workers = self.workers.load();
        let serving = serving(&workers, model, query);
        self.shared.router.look(model, &self.open_to(&serving, query), query)
    }

    /// Those of `serving` that the policy may choose from.
    fn open_to<'a>(&self, serving: &[&'a Arc<Worker>], query: &RouteQuery<'_>) -> Vec<&'a Arc<Worker>> {
        match self.holder(serving, query) {
            Some(holder) => vec![holder],
            None => self.fit(serving, query),
        }
    }

    /// The worker that holds the request's lease, unless it is away, failing or was tried: what the lease promises is
    /// only to be had there, so doubt, rest and priority do not count.
    fn holder<'a>(&self, serving: &[&'a Arc<Worker>], query: &RouteQuery<'_>) -> Option<&'a Arc<Worker>> {
        let is_meant = |worker: &Worker| query.prefer == Some(worker.id) || worker.is_engine(query.engine_id);
        let now = self.shared.clock.now();
        serving.iter().copied().find(|worker| {
            is_meant(worker)
                && worker.is_ready()
                && !query.exclude.contains(&worker.id)
                && worker.health().stand(now) != Stand::Shut
        })
    }

    /// Those of `serving` that should have the request: the well ones of the highest priority, else those put aside.
    pub(crate) fn fit<'a>(
        &self,
        serving: &[&'a Arc<Worker>],
        query: &RouteQuery<'_>,
    ) -> Vec<&'a Arc<Worker>> {
        let now = self.shared.clock.now();
        self.review(serving, now);
        self.doubt_stalled(serving, now);
        let limit = self.shared.options.usage_limit;
        let mut fit = Vec::with_capacity(serving.len());
        let mut best = (Stand::Shut, i64::MIN);
        for worker in serving {
            let open = worker.is_ready()
                && !worker.is_draining()
                && !query.exclude.contains(&worker.id)
                && (limit >= 1.0 || worker.usage() < limit);
            if !open {
                continue;
            }
            let stand = worker.health().stand(now);
            let rank = (stand, worker.spec().priority);
            if stand == Stand::Shut || rank < best {
                continue;
            }
            if rank > best {
                best = rank;
                fit.clear();
            }
            fit.push(*worker);
        }
        fit
    }

    /// Ejects outliers, if any worker failed since the last look.
    fn review(&self, serving: &[&Arc<Worker>], now: Duration) {
        if !serving.iter().any(|worker| worker.health().failed.load(Ordering::Acquire)) {
            return;
        }
        let health: Vec<&Health> = serving.iter().map(|worker| &**worker.health()).collect();
        for position in review(&health, now) {
            let worker = serving[position];
            tracing::warn!(worker = %worker.url, "worker ejected: it fails far more often than its peers");
        }
    }

    /// Puts workers in doubt whose streams stand still for far longer than predicted while a peer goes on.
    fn doubt_stalled(&self, serving: &[&Arc<Worker>], now: Duration) {
        for worker in serving {
            let health = worker.health();
            if worker.load.awaited() == 0 || health.is_in_doubt() {
                continue;
            }
            let Some(limit) = health.stall_limit(worker.load.prefill_tokens()) else { continue };
            let peer_moves = |peer: &&Arc<Worker>| peer.id != worker.id && peer.health().silence(now) < limit;
            let silence = health.silence(now).min(worker.load.awaited_for(now));
            if silence > limit && serving.iter().any(peer_moves) && health.suspect(limit, now) {
                tracing::warn!(worker = %worker.url, ?limit, "worker is suspected: its streams stand still while others go on");
                self.shared.metrics.worker_suspected.with([worker.url.clone()]).inc();
            }
        }
    }

    /// Why none of `serving` may have the request.
    fn nobody(&self, model: Option<&str>, serving: &[&Arc<Worker>], query: &RouteQuery<'_>) -> Error {
        let now = self.shared.clock.now();
        let ready =
            || serving.iter().filter(|worker| worker.is_ready() && !query.exclude.contains(&worker.id));
        let named = model.map(|name| format!(" for model '{name}'")).unwrap_or_default();
        let limit = self.shared.options.usage_limit;
        if limit < 1.0 && ready().count() > 0 && ready().all(|worker| worker.usage() >= limit) {
            return unavailable(format!("every worker{named} is full; try again"));
        }
        let waits = ready().map(|worker| worker.health().breaker.wait(now));
        match waits.min() {
            Some(wait) => unavailable(format!("every worker{named} fails or is leaving; try again"))
                .with_retry_after(wait.max(Duration::from_secs(1))),
            None => unavailable(format!("no worker{named} is ready; try again")),
        }
    }

    /// What to do about a request that waits for its first byte.
    ///
    /// Its worker is in doubt if it was silent for longer than predicted by a wide margin while a peer went on.
    pub fn judge(&self, watch: &Watch) -> Judgement {
        let now = self.shared.clock.now();
        let health = &watch.record.health;
        let left = health.patience_left(watch.chosen, watch.patience, now);
        if !left.is_zero() {
            return Judgement::Wait(left);
        }
        if health.is_in_doubt() {
            return Judgement::Stuck;
        }
        let workers = self.workers.load();
        let peer_moves = |worker: &Arc<Worker>| {
            !Arc::ptr_eq(worker.health(), health) && worker.health().has_moved(watch.chosen)
        };
        if !workers.iter().any(peer_moves) {
            return Judgement::Wait(watch.patience / 4 + Duration::from_millis(1));
        }
        if health.suspect(watch.patience, now) {
            tracing::warn!(worker = %watch.record.url, patience = ?watch.patience, "worker is suspected: it is silent while others go on");
            self.shared.metrics.worker_suspected.with([watch.record.url.to_string()]).inc();
        }
        Judgement::Stuck
    }

    /// Notes a new request, which earns its share of a retry.
    pub fn earn_retry(&self) {
        self.shared.budget.earn();
    }

    /// Takes a retry from the budget; false if it is spent.
    pub fn spend_retry(&self) -> bool {
        let granted = self.shared.budget.spend(self.shared.clock.now());
        if !granted {
            self.shared.metrics.retries_refused.with([""; 0]).inc();
        }
        granted
    }

    /// The name that workers know for what a client calls `name`, if that is an alias.
    pub fn canonical(&self, name: &str) -> Option<String> {
        if let Some(own) = self.shared.options.model_aliases.get(name) {
            return Some(own.clone());
        }
        let workers = self.workers.load();
        workers.iter().find_map(|worker| {
            let spec = worker.spec();
            spec.aliases().find(|(alias, _)| *alias == name).map(|(_, own)| own.to_owned())
        })
    }

    /// Further names and what they stand for.
    pub fn aliases(&self) -> Vec<(String, String)> {
        let given = self.shared.options.model_aliases.iter().map(|(alias, own)| (alias.clone(), own.clone()));
        let mut all: Vec<_> = given.collect();
        for worker in self.workers.load().iter() {
            let spec = worker.spec();
            all.extend(spec.aliases().map(|(alias, own)| (alias.to_owned(), own.to_owned())));
        }
        all.sort();
        all.dedup();
        all
    }

    /// Whether choices for `model` need to know the request's session.
    pub fn needs_key(&self, model: Option<&str>) -> bool {
        self.shared.router.policy_of(model).kind().needs_key()
    }

    /// How many blocks the exact index holds, what they take in bytes, and how many it had no room for.
    pub fn block_index(&self) -> (usize, usize, u64) {
        let blocks = self.shared.router.index.blocks.read();
        (blocks.len(), blocks.memory(), blocks.dropped())
    }
}

/// Workers of the model, of the kind that the request needs.
fn serving<'a>(
    workers: &'a [Arc<Worker>],
    model: Option<&str>,
    query: &RouteQuery<'_>,
) -> Vec<&'a Arc<Worker>> {
    let kind = |worker: &&Arc<Worker>| {
        worker.serves_alone()
            && worker.holds(query.namespace.adapter)
            && query.transport.is_none_or(|transport| worker.transport() == transport)
            && query
                .numerics_id
                .is_none_or(|bits| worker.model().is_some_and(|model| model.info.numerics_id == bits))
    };
    workers.iter().filter(kind).filter(|worker| worker.can_serve(model)).collect()
}
