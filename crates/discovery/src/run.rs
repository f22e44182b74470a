//! Keeps a fleet at what Kubernetes says: follows every query and carries out the difference after each change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use branchline_telemetry::Metrics;
use futures_util::future::join_all;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::api::Api;
use crate::follow::{Board, follow};
use crate::member::{Member, Phase};
use crate::plan::Plan;
use crate::settle::{Change, Members, merge, settle};

/// What became of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// It is so now.
    Done,
    /// The worker is not in the fleet after all; it is added when it takes requests.
    Dropped,
}

/// A fleet that discovery keeps.
pub trait Sink: Send + Sync {
    /// Carries out a change.
    ///
    /// # Errors
    /// Why it can't be; it is tried again.
    fn apply(&self, change: &Change) -> Result<Applied, String>;

    /// Addresses of all workers that are there or on their way: an operator may have taken one out.
    fn addresses(&self) -> BTreeSet<String>;
}

/// Keeps `sink` at what `api` says; never ends.
pub async fn run(plan: Plan, api: Arc<dyn Api>, sink: &dyn Sink, metrics: Arc<Metrics>) {
    let level = plan.timing.level;
    let board = Board::new(plan, metrics);
    let follows = join_all((0..board.plan.queries.len()).map(|at| follow(&board, &*api, at)));
    let keep = async {
        let mut keeper = Keeper::default();
        let mut tick = interval(level);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = board.changed.notified() => {}
                _ = tick.tick() => {}
            }
            keeper.look(&board, sink);
        }
    };
    tokio::join!(follows, keep);
}

/// What this gateway has done so far.
#[derive(Default)]
struct Keeper {
    known: Members,
    /// Pod and address of workers that an operator took out: they stay out as long as the pod lives.
    dismissed: BTreeSet<(String, String)>,
    /// Why a worker could not be added.
    refused: BTreeMap<String, String>,
}

impl Keeper {
    fn look(&mut self, board: &Board, sink: &dyn Sink) {
        let start = Instant::now();
        let all: Vec<Arc<Member>> = board
            .stores
            .lock()
            .iter()
            .flat_map(|store| store.members().cloned().collect::<Vec<_>>())
            .collect();
        self.mind_operator(&all, sink);
        let is_dismissed =
            |member: &Member| self.dismissed.contains(&(member.uid.clone(), member.address.clone()));
        let wanted = merge(all.into_iter().filter(|member| !is_dismissed(member)));
        self.refused.retain(|address, _| wanted.contains_key(address));
        let changes = settle(&self.known, &wanted);
        if changes.is_empty() {
            return;
        }
        for change in changes {
            self.carry_out(&change, board, sink);
        }
        let metrics = &board.metrics;
        for (state, phase) in [("ready", Phase::Ready), ("unready", Phase::Unready)] {
            let count = self.known.values().filter(|member| member.phase == phase).count();
            metrics.discovery_workers.with([state]).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        metrics.discovery_settle_seconds.with([""; 0]).observe(start.elapsed().as_secs_f64());
    }

    /// Notes what an operator has taken out since the last look.
    fn mind_operator(&mut self, all: &[Arc<Member>], sink: &dyn Sink) {
        if self.known.is_empty() {
            return;
        }
        let there = sink.addresses();
        let missing: Vec<Arc<Member>> =
            self.known.values().filter(|member| !there.contains(&member.address)).cloned().collect();
        for member in missing {
            tracing::info!(
                worker = member.address,
                pod = member.name,
                "removed on request: it stays out while its pod lives"
            );
            self.known.remove(&member.address);
            self.dismissed.insert((member.uid.clone(), member.address.clone()));
        }
        if !self.dismissed.is_empty() {
            let alive: BTreeSet<&str> = all.iter().map(|member| member.uid.as_str()).collect();
            self.dismissed.retain(|(uid, _)| alive.contains(uid.as_str()));
        }
    }

    fn carry_out(&mut self, change: &Change, board: &Board, sink: &dyn Sink) {
        let member = change.member();
        let address = member.address.clone();
        match sink.apply(change) {
            Ok(applied) => {
                board.metrics.discovery_changes.with([change.word()]).inc();
                tracing::info!(
                    worker = address,
                    pod = format!("{}/{}", member.namespace, member.name),
                    role = member.role.name(),
                    "kubernetes: {}",
                    change.word()
                );
                self.refused.remove(&address);
                match (change, applied) {
                    (Change::Remove(..), _) | (_, Applied::Dropped) => self.known.remove(&address),
                    _ => self.known.insert(address, Arc::clone(member)),
                };
            }
            Err(why) => {
                board.metrics.discovery_changes.with(["refused"]).inc();
                if self.refused.get(&address) != Some(&why) {
                    tracing::warn!(
                        worker = address,
                        pod = member.name,
                        "a pod's worker was not added: {why}"
                    );
                    self.refused.insert(address, why);
                }
            }
        }
    }
}
