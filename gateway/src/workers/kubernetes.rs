//! Workers that Kubernetes says are there: carries out discovery's changes on the fleet.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::Result;
use branchline_discovery::{Applied, Change, Member, Sink, connect, run};
use branchline_telemetry::Metrics;
use branchline_worker::{Fleet, Source, Worker, WorkerPatch, WorkerSpec};

use super::{Workers, key};
use crate::config::{Options, plan};

/// Starts discovery if the options ask for it.
///
/// # Errors
/// If there is no API server to ask, or this build can't ask one.
pub(super) async fn watch(
    workers: &Arc<Workers>,
    options: &Options,
    fleet: &Arc<Fleet>,
    metrics: &Arc<Metrics>,
) -> Result<()> {
    let Some(plan) = plan(options) else { return Ok(()) };
    let api = connect().await?;
    let keeper = Keeper {
        owner: Arc::clone(workers),
        fleet: Arc::clone(fleet),
        grace: options.drain_timeout,
        default: WorkerSpec::default(),
    };
    let (metrics, stop) = (Arc::clone(metrics), workers.stop.clone());
    workers.tracker.spawn(async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = run(plan, api, &keeper, metrics) => {}
        }
    });
    Ok(())
}

struct Keeper {
    owner: Arc<Workers>,
    fleet: Arc<Fleet>,
    /// For workers whose pods say nothing of how long they may end.
    grace: Duration,
    default: WorkerSpec,
}

impl Keeper {
    fn find(&self, member: &Member) -> Option<Arc<Worker>> {
        self.fleet.workers().iter().find(|worker| key(&worker.url) == member.address).cloned()
    }

    fn spec(&self, member: &Member) -> WorkerSpec {
        let traits = &member.traits;
        let url = match traits.protocol {
            Some(protocol) => format!("{}://{}", protocol.scheme(), member.address),
            None => member.address.clone(),
        };
        WorkerSpec {
            url,
            model_id: traits.model.clone(),
            worker_type: member.role.name().to_owned(),
            bootstrap_port: traits.bootstrap_port,
            group: traits.group.clone(),
            dp_size: traits.dp_size.unwrap_or(self.default.dp_size),
            kv_connector: traits.kv_connector.clone(),
            runtime_type: traits.runtime.clone(),
            labels: member.labels.clone(),
            priority: member.priority.unwrap_or(self.default.priority),
            cost: member.cost.unwrap_or(self.default.cost),
            source: Source::Kubernetes(member.namespace.clone(), member.name.clone(), member.uid.clone()),
            ..self.default.clone()
        }
    }

    /// Ready or not; a worker that has not told yet what it speaks is asked again once it is ready.
    fn hold(&self, member: &Member, held: bool) -> Applied {
        match self.find(member) {
            Some(worker) => {
                self.fleet.hold(worker.id, held);
                Applied::Done
            }
            None => {
                self.owner.cancel(&member.address);
                Applied::Dropped
            }
        }
    }

    fn remove(&self, member: &Member, grace: Option<Duration>) {
        self.owner.cancel(&member.address);
        if let Some(worker) = self.find(member) {
            let drained = self.fleet.retire(worker.id, grace.unwrap_or(self.grace));
            self.owner.tracker.spawn(drained);
        }
    }

    fn update(&self, member: &Member) -> std::result::Result<Applied, String> {
        let Some(worker) = self.find(member) else {
            self.owner.cancel(&member.address);
            return Ok(Applied::Dropped);
        };
        let spec = self.spec(member);
        let patch = WorkerPatch {
            priority: Some(spec.priority),
            cost: Some(spec.cost),
            labels: Some(spec.labels),
            ..WorkerPatch::default()
        };
        self.fleet.patch(worker.id, &patch).map(|_| Applied::Done).map_err(|error| error.message)
    }
}

impl Sink for Keeper {
    fn apply(&self, change: &Change) -> std::result::Result<Applied, String> {
        match change {
            Change::Add(member) => {
                self.owner.admit(&self.fleet, self.spec(member)).map_err(|error| error.message)?;
            }
            Change::Remove(member, _, grace) => self.remove(member, *grace),
            Change::Hold(member) => return Ok(self.hold(member, true)),
            Change::Resume(member) => return Ok(self.hold(member, false)),
            Change::Update(member) => return self.update(member),
        }
        Ok(Applied::Done)
    }

    fn addresses(&self) -> BTreeSet<String> {
        // In this order: a worker that has just told what it speaks leaves the one for the other under the lock.
        let mut all: BTreeSet<String> = self.owner.pending.lock().keys().cloned().collect();
        all.extend(self.fleet.workers().iter().map(|worker| key(&worker.url).to_owned()));
        all
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use branchline_discovery::{Phase, Protocol, Role, Traits, Why};
    use branchline_worker::FleetOptions;
    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::config::{Outcome, resolve};

    fn keeper() -> Keeper {
        let Outcome::Serve(options) = resolve(&[], std::iter::empty()) else {
            panic!("the defaults are good")
        };
        let fleet = Fleet::new(FleetOptions::default(), Arc::default());
        let owner = Workers::start(&options, &fleet, &TaskTracker::new(), &CancellationToken::new())
            .expect("no sources");
        Keeper { owner, fleet, grace: Duration::ZERO, default: WorkerSpec::default() }
    }

    fn member(address: &str, protocol: Option<Protocol>) -> Arc<Member> {
        Arc::new(Member {
            address: address.to_owned(),
            uid: "u".to_owned(),
            namespace: "n".to_owned(),
            name: "p".to_owned(),
            role: Role::Prefill,
            phase: Phase::Ready,
            traits: Traits { protocol, bootstrap_port: Some(8998), ..Traits::default() },
            priority: None,
            cost: Some(2.0),
            labels: BTreeMap::from([("zone".to_owned(), "a".to_owned())]),
            born: String::new(),
            grace: None,
        })
    }

    #[tokio::test]
    async fn a_member_becomes_a_worker_with_all_that_its_pod_says() {
        let keeper = keeper();
        let member = member("127.0.0.1:9", Some(Protocol::Http));
        assert_eq!(keeper.apply(&Change::Add(Arc::clone(&member))), Ok(Applied::Done));
        let worker = keeper.find(&member).expect("in the fleet");
        let spec = worker.spec();
        assert_eq!((worker.url.as_str(), spec.worker_type.as_str()), ("http://127.0.0.1:9", "prefill"));
        assert_eq!((spec.bootstrap_port, spec.priority, spec.cost), (Some(8998), 50, 2.0));
        assert_eq!(spec.source, Source::Kubernetes("n".to_owned(), "p".to_owned(), "u".to_owned()));
        let mut dear = (*member).clone();
        dear.priority = Some(7);
        assert_eq!(keeper.apply(&Change::Update(Arc::new(dear))), Ok(Applied::Done));
        assert_eq!(worker.spec().priority, 7);
        assert_eq!(keeper.apply(&Change::Hold(Arc::clone(&member))), Ok(Applied::Done));
        assert!(worker.is_held());
        assert_eq!(keeper.apply(&Change::Resume(Arc::clone(&member))), Ok(Applied::Done));
        assert!(!worker.is_held());
        assert_eq!(keeper.apply(&Change::Remove(Arc::clone(&member), Why::Gone, None)), Ok(Applied::Done));
        assert!(!keeper.addresses().contains(&member.address));
    }

    #[tokio::test]
    async fn a_member_that_has_not_told_what_it_speaks_is_dropped_while_it_is_not_ready() {
        let keeper = keeper();
        let member = member("127.0.0.1:9", None);
        assert_eq!(keeper.apply(&Change::Add(Arc::clone(&member))), Ok(Applied::Done));
        assert!(keeper.addresses().contains(&member.address) && keeper.find(&member).is_none());
        assert_eq!(keeper.apply(&Change::Hold(Arc::clone(&member))), Ok(Applied::Dropped));
        assert!(!keeper.addresses().contains(&member.address));
    }

    #[tokio::test]
    async fn an_address_that_somebody_else_named_is_refused_and_left_to_him() {
        let keeper = keeper();
        let member = member("127.0.0.1:9", Some(Protocol::Http));
        keeper.fleet.register(WorkerSpec::new("http://127.0.0.1:9")).expect("a worker");
        let refused = keeper.apply(&Change::Add(Arc::clone(&member))).expect_err("a conflict");
        assert!(refused.contains("in the fleet already"), "{refused}");
        assert_eq!(keeper.fleet.workers()[0].spec().source, Source::Http);
    }
}
