//! Who gets a request: readiness, draining, priority, breakers, doubts, limits, warm-up, names. Real sockets, and time
//! moved by hand where it is the subject.
#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use branchline_core::{Clock, ErrorCode, WorkerId};
use branchline_telemetry::Metrics;
use branchline_testkit::{EngineSetup, FakeEngine, ScriptedWorker, Step, response, within};
use branchline_worker::{
    BreakerOptions, Choice, Fleet, FleetClock, FleetOptions, HealthOptions, Hints, Judgement, ModelCard,
    ModelName, PolicyKind, RouteQuery, Transport, Verdict, Worker, WorkerPatch, WorkerSpec, speaks,
};

const QUERY: RouteQuery<'static> = RouteQuery {
    token_ids: &[],
    text: &[b'x'; 4000],
    namespace: branchline_worker::CacheKey { cache_salt: None, extra_key: None, adapter: None },
    key: None,
    hints: Hints { expected_tokens: None, fork_width: None },
    prefer: None,
    engine_id: None,
    exclude: &[],
    numerics_id: None,
    transport: Some(Transport::Http),
};

/// A clock that is moved by hand.
#[derive(Default)]
struct Hand(AtomicU64);

impl Hand {
    fn step(&self, by: Duration) {
        self.0.fetch_add(by.as_micros() as u64, Ordering::SeqCst);
    }
}

impl Clock for Hand {
    fn now(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::SeqCst))
    }
}

/// A fleet of HTTP workers that are ready and answer nothing that matters.
struct Herd {
    fleet: Arc<Fleet>,
    workers: Vec<Arc<Worker>>,
    _servers: Vec<ScriptedWorker>,
}

async fn herd(count: usize, options: FleetOptions) -> Herd {
    let fleet = Fleet::new(options, Arc::new(Metrics::default()));
    let (mut workers, mut servers) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let server = ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.unwrap();
        workers.push(fleet.add(&server.url()).unwrap());
        servers.push(server);
    }
    within("readiness", fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready())))
        .await;
    Herd { fleet, workers, _servers: servers }
}

fn random() -> FleetOptions {
    let health = HealthOptions { slow_start: Duration::ZERO, ..HealthOptions::default() };
    FleetOptions { policy: PolicyKind::RoundRobin, seed: Some(1), health, ..FleetOptions::default() }
}

impl Herd {
    fn choose(&self) -> branchline_core::Result<Choice> {
        self.fleet.choose(None, &QUERY)
    }

    /// Choices of each worker in so many draws, each given back at once.
    fn spread(&self, draws: usize) -> Vec<usize> {
        let mut counts = vec![0; self.workers.len()];
        for _ in 0..draws {
            let choice = self.choose().unwrap();
            counts[self.workers.iter().position(|worker| worker.id == choice.worker.id).unwrap()] += 1;
        }
        counts
    }

    fn fail(&self, at: usize, times: usize) {
        for _ in 0..times {
            let exclude: Vec<WorkerId> =
                self.workers.iter().map(|worker| worker.id).filter(|id| *id != self.workers[at].id).collect();
            let query = RouteQuery { exclude: &exclude, ..QUERY };
            self.fleet.choose(None, &query).unwrap().guard.settle(Verdict::Failure);
        }
    }
}

#[tokio::test]
async fn a_held_worker_gets_nothing_until_it_is_resumed_whatever_else_is_said_of_it() {
    let herd = herd(2, random()).await;
    let id = herd.workers[0].id;
    assert!(herd.fleet.hold(id, true));
    assert_eq!(herd.spread(10), [0, 10]);
    let info = herd.workers[0].info();
    assert_eq!((info.ready, info.draining, info.reason.as_str()), (false, false, "its pod is not ready"));
    // What an operator says of it is another matter.
    herd.fleet.patch(id, &WorkerPatch { draining: Some(false), ..WorkerPatch::default() }).unwrap();
    assert_eq!(herd.spread(10), [0, 10]);
    assert!(herd.fleet.hold(id, false));
    assert_eq!(herd.spread(10), [5, 5]);
    assert!(!herd.fleet.hold(WorkerId(99), true));
}

#[tokio::test]
async fn an_engine_answers_to_the_name_that_its_operator_gives_it_and_to_no_other() {
    let engine = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let fleet = Fleet::new(random(), Arc::new(Metrics::default()));
    let spec = WorkerSpec { model_id: Some("canary".to_owned()), ..WorkerSpec::new(engine.url()) };
    let worker = fleet.register(spec).unwrap();
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
    let own = worker.model().unwrap().name.clone();
    assert_eq!(fleet.transport(Some("canary")), Ok(Transport::Grpc));
    assert_eq!(fleet.model("canary").unwrap().name, own, "its tokenizer is found by that name");
    assert!(fleet.transport(Some(&own)).is_err() && fleet.model(&own).is_none());
}

#[tokio::test]
async fn a_draining_worker_gets_nothing_until_it_is_taken_back() {
    let herd = herd(2, random()).await;
    let id = herd.workers[0].id;
    herd.fleet.patch(id, &WorkerPatch { draining: Some(true), ..WorkerPatch::default() }).unwrap();
    assert_eq!(herd.spread(10), [0, 10]);
    herd.fleet.patch(id, &WorkerPatch { draining: Some(false), ..WorkerPatch::default() }).unwrap();
    assert_eq!(herd.spread(10), [5, 5]);
    assert_eq!(
        herd.fleet.patch(WorkerId(99), &WorkerPatch::default()).unwrap_err().code,
        ErrorCode::NotFound
    );
}

#[tokio::test]
async fn the_highest_priority_that_is_well_gets_everything() {
    let herd = herd(3, random()).await;
    let rank = |at: usize, priority| {
        let patch = WorkerPatch { priority: Some(priority), ..WorkerPatch::default() };
        herd.fleet.patch(herd.workers[at].id, &patch).unwrap();
    };
    rank(0, 70);
    assert_eq!(herd.spread(6), [6, 0, 0]);
    herd.fail(0, 5);
    assert_eq!(herd.spread(6), [0, 3, 3], "its breaker is open");
    rank(2, 60);
    assert_eq!(herd.spread(6), [0, 0, 6]);
}

#[tokio::test]
async fn when_every_breaker_is_open_the_answer_says_when_the_next_probe_is() {
    let herd = herd(2, random()).await;
    (0..2).for_each(|at| herd.fail(at, 5));
    let error = herd.choose().unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable);
    let wait = error.retry_after.unwrap();
    assert!((Duration::from_secs(9)..=Duration::from_secs(10)).contains(&wait), "{wait:?}");
    assert!(!error.message.contains("127.0.0.1"), "{}", error.message);
}

#[tokio::test]
async fn one_probe_is_let_in_and_given_back_by_a_client_that_leaves() {
    let breaker = BreakerOptions { open: Duration::ZERO, successes: 1, ..BreakerOptions::default() };
    let health = HealthOptions { breaker, ..random().health };
    let herd = herd(1, FleetOptions { health, ..random() }).await;
    herd.fail(0, 5);
    let probe = herd.choose().unwrap();
    assert_eq!(herd.choose().unwrap_err().code, ErrorCode::Unavailable);
    drop(probe);
    let mut probe = herd.choose().unwrap();
    probe.guard.settle(Verdict::Success);
    assert!(herd.choose().is_ok() && herd.choose().is_ok(), "it is closed");
}

#[tokio::test]
async fn an_outlier_is_the_last_choice_and_no_more() {
    let herd = herd(3, random()).await;
    for round in 0..60 {
        let mut choice = herd.choose().unwrap();
        let bad = choice.worker.id == herd.workers[1].id && round % 12 < 3;
        choice.guard.settle(if bad { Verdict::Failure } else { Verdict::Success });
    }
    let spread = herd.spread(12);
    assert_eq!(spread, [6, 0, 6], "{}", herd.workers[1].info().health);
    assert_eq!(herd.workers[1].info().health, "ejected");
    let others = [herd.workers[0].id, herd.workers[2].id];
    let query = RouteQuery { exclude: &others, ..QUERY };
    assert_eq!(herd.fleet.choose(None, &query).unwrap().worker.id, herd.workers[1].id);
}

#[tokio::test]
async fn a_resting_worker_is_asked_only_if_all_rest() {
    let herd = herd(2, random()).await;
    let choice = herd.choose().unwrap();
    choice.guard.rest(Duration::from_secs(5));
    let resting = choice.worker.id;
    drop(choice);
    for _ in 0..6 {
        let choice = herd.choose().unwrap();
        assert_ne!(choice.worker.id, resting);
    }
    herd.choose().unwrap().guard.rest(Duration::from_secs(5));
    assert!(herd.choose().is_ok(), "somebody has to");
}

/// An honest prefill of 20 s beside busy peers, and a stuck worker, on virtual time.
#[tokio::test]
async fn silence_is_judged_by_what_was_predicted_and_by_the_peers() {
    let time = Arc::new(Hand::default());
    let herd = herd(2, FleetOptions { clock: FleetClock::new(time.clone()), ..random() }).await;
    let step = |by: Duration| time.step(by);
    // Both have shown 1,000 tokens a second.
    for _ in 0..2 {
        let mut choice = herd.choose().unwrap();
        step(Duration::from_secs(1));
        choice.guard.prefilled();
        choice.guard.settle(Verdict::Success);
    }
    let long = vec![b'x'; 80_000];
    let mut honest = herd.fleet.choose(None, &RouteQuery { text: &long, ..QUERY }).unwrap();
    let watch = honest.guard.watch().expect("its pace is known");
    assert!(watch.patience() > Duration::from_secs(20), "{:?}", watch.patience());
    for second in 0..20 {
        assert!(matches!(herd.fleet.judge(&watch), Judgement::Wait(_)), "second {second}");
        step(Duration::from_secs(1));
        let query = RouteQuery { exclude: &[honest.worker.id], ..QUERY };
        herd.fleet.choose(None, &query).unwrap().guard.prefilled();
    }
    honest.guard.prefilled();
    assert_eq!(honest.worker.info().health, "well");
    assert!(honest.guard.watch().is_none(), "once it has begun, nobody asks");

    let mut stuck = herd.fleet.choose(None, &QUERY).unwrap();
    let watch = stuck.guard.watch().unwrap();
    step(watch.patience() + Duration::from_millis(1));
    assert!(matches!(herd.fleet.judge(&watch), Judgement::Wait(_)), "nobody else moved either");
    let query = RouteQuery { exclude: &[stuck.worker.id], ..QUERY };
    herd.fleet.choose(None, &query).unwrap().guard.prefilled();
    step(watch.patience());
    assert_eq!(herd.fleet.judge(&watch), Judgement::Stuck);
    assert_eq!(stuck.worker.info().health, "suspected");
    for _ in 0..6 {
        assert_ne!(herd.choose().unwrap().worker.id, stuck.worker.id);
    }
    stuck.guard.progressed();
    assert_eq!(stuck.worker.info().health, "well", "any byte clears it");
}

#[tokio::test]
async fn nobody_is_judged_before_a_pace_is_known() {
    let herd = herd(2, random()).await;
    assert!(herd.choose().unwrap().guard.watch().is_none());
    let health = HealthOptions { suspect_after: None, ..random().health };
    let herd = self::herd(1, FleetOptions { health, ..random() }).await;
    herd.choose().unwrap().guard.prefilled();
    assert!(herd.choose().unwrap().guard.watch().is_none(), "it is switched off");
}

#[tokio::test]
async fn load_across_a_flap_goes_back_to_the_counter_it_was_taken_from() {
    let herd = herd(1, random()).await;
    let first = herd.choose().unwrap();
    let url = herd.workers[0].url.clone();
    herd.fleet.forget(first.worker.id);
    assert!(herd.fleet.workers().is_empty());
    let again = herd.fleet.add(&url).unwrap();
    within("readiness", herd.fleet.wait_until(|_| again.is_ready())).await;
    assert_eq!(again.in_flight(), 0);
    let second = herd.choose().unwrap();
    assert_eq!(again.in_flight(), 1);
    drop(first);
    assert_eq!(again.in_flight(), 1);
    drop(second);
    assert_eq!(again.in_flight(), 0);
}

#[tokio::test]
async fn models_and_aliases_that_the_operator_names_come_before_what_the_worker_says() {
    let server = ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.unwrap();
    server.serve_models(&["own"]);
    let aliases = HashMap::from([("short".to_owned(), "told".to_owned())]);
    let fleet = Fleet::new(FleetOptions { model_aliases: aliases, ..random() }, Arc::new(Metrics::default()));
    let card = ModelCard { id: "told".into(), aliases: vec!["gpt".into()] };
    let spec = WorkerSpec { models: vec![ModelName::Card(card)], ..WorkerSpec::new(server.url()) };
    let worker = fleet.register(spec).unwrap();
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
    assert_eq!(worker.served(), Some(vec!["told".to_owned()]));
    assert_eq!(fleet.canonical("gpt").as_deref(), Some("told"));
    assert_eq!(fleet.canonical("short").as_deref(), Some("told"));
    assert_eq!(fleet.canonical("told"), None);
    assert_eq!(fleet.aliases().len(), 2);
    assert!(fleet.choose(Some("told"), &QUERY).is_ok());
    assert_eq!(fleet.choose(Some("own"), &QUERY).unwrap_err().code, ErrorCode::NotFound);
}

#[tokio::test]
async fn a_model_may_have_its_own_policy() {
    let by_model = HashMap::from([("m".to_owned(), PolicyKind::Sticky)]);
    let herd = herd(2, FleetOptions { model_policies: by_model, ..random() }).await;
    assert!(herd.fleet.needs_key(Some("m")) && !herd.fleet.needs_key(Some("n")));
    let ask = |model| {
        let query = RouteQuery { key: Some(7), ..QUERY };
        herd.fleet.choose(Some(model), &query).unwrap().worker.id
    };
    let home = ask("m");
    assert!((0..8).all(|_| ask("m") == home));
    let spread: Vec<_> = (0..8).map(|_| ask("n")).collect();
    assert!(spread.iter().filter(|id| **id == home).count() == 4, "{spread:?}");
}

#[tokio::test]
async fn a_leased_prefix_is_served_where_it_is() {
    let herd = herd(3, random()).await;
    let at = herd.workers[2].id;
    for _ in 0..5 {
        let query = RouteQuery { prefer: Some(at), ..QUERY };
        let choice = herd.fleet.choose(None, &query).unwrap();
        assert_eq!((choice.worker.id, choice.decision.left_out.len()), (at, 2));
    }
    herd.fail(2, 5);
    let query = RouteQuery { prefer: Some(at), ..QUERY };
    assert_ne!(
        herd.fleet.choose(None, &query).unwrap().worker.id,
        at,
        "a broken worker can't hold its leases"
    );
}

#[tokio::test]
async fn an_address_tells_what_it_speaks_or_that_nobody_is_there() {
    let engine = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let server = ScriptedWorker::start(|_| vec![Step::Hold]).await.unwrap();
    let bare = |url: String| url.split_once("://").unwrap().1.to_owned();
    let limit = Duration::from_secs(5);
    assert_eq!(speaks(&bare(engine.url()), limit).await, Ok(Transport::Grpc));
    assert_eq!(speaks(&bare(server.url()), limit).await, Ok(Transport::Http));
    server.stop();
    server.wait_for(|record| !record.listening).await.unwrap();
    assert_eq!(speaks(&bare(server.url()), limit).await.unwrap_err().code, ErrorCode::Unavailable);
}

#[tokio::test]
async fn least_load_fills_the_idle_and_prefix_hash_keeps_a_beginning_together() {
    let herd = herd(3, FleetOptions { policy: PolicyKind::LeastLoad, ..random() }).await;
    let held: Vec<Choice> = (0..30).map(|_| herd.choose().unwrap()).collect();
    for worker in &herd.workers {
        assert_eq!(worker.in_flight(), 10);
    }
    drop(held);
    assert!(herd.workers.iter().all(|worker| worker.in_flight() == 0));
    let herd = self::herd(3, FleetOptions { policy: PolicyKind::PrefixHash, ..random() }).await;
    let ask = |begin: u8, rest: u8| {
        let text = [[begin; 1024].as_slice(), &[rest; 500]].concat();
        herd.fleet.choose(None, &RouteQuery { text: &text, ..QUERY }).unwrap().worker.id
    };
    for begin in 0..20 {
        let home = ask(begin, 0);
        assert!((1..5).all(|rest| ask(begin, rest) == home), "{begin}");
    }
}

#[tokio::test]
async fn a_retired_worker_is_out_at_once_and_drains_what_it_has() {
    let herd = herd(2, random()).await;
    let choice = herd.choose().unwrap();
    let drained = herd.fleet.retire(choice.worker.id, Duration::from_secs(60));
    assert_eq!(herd.fleet.workers().len(), 1);
    assert!((0..4).all(|_| herd.choose().unwrap().worker.id != choice.worker.id));
    let task = tokio::spawn(drained);
    assert!(!task.is_finished());
    drop(choice);
    within("the drain", task).await.unwrap();
}

#[tokio::test]
async fn what_a_client_expects_counts_until_its_request_ends() {
    let herd = herd(2, FleetOptions { policy: PolicyKind::LeastLoad, ..FleetOptions::default() }).await;
    let ids = [herd.workers[0].id, herd.workers[1].id];
    // Without a prompt only what runs counts.
    let query = RouteQuery { text: &[], ..QUERY };
    let but = |other: usize, expected_tokens| {
        let hints = Hints { expected_tokens, ..Hints::default() };
        herd.fleet.choose(None, &RouteQuery { hints, exclude: &ids[other..=other], ..query }).unwrap()
    };
    let long = but(1, Some(4000));
    let _short = [but(0, None), but(0, None)];
    let next = || herd.fleet.choose(None, &query).unwrap().worker.id;
    assert_eq!(next(), ids[1], "two usual ones are less than one that writes for long");
    drop(long);
    assert_eq!(next(), ids[0]);
}

#[tokio::test]
async fn branches_of_a_fork_wider_than_a_worker_part_at_once_and_others_stay_together() {
    for (fork_width, parts) in [(None, 1), (Some(64), 1), (Some(96), 2)] {
        let herd = herd(2, FleetOptions::default()).await;
        let query =
            RouteQuery { hints: Hints { fork_width, ..Hints::default() }, text: &[b'x'; 8000], ..QUERY };
        let choices = [herd.fleet.choose(None, &query).unwrap(), herd.fleet.choose(None, &query).unwrap()];
        let ids: std::collections::HashSet<_> = choices.iter().map(|choice| choice.worker.id).collect();
        assert_eq!(ids.len(), parts, "{fork_width:?}");
    }
}
