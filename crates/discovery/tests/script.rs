//! A scripted API server and a fleet that notes what is done to it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use branchline_discovery::{Api, Applied, Change, Failure, Lines, Plan, Query, Role, Sink, Timing, run};
use branchline_telemetry::Metrics;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream;
use parking_lot::Mutex;
use serde_json::{Value, json};

/// The answer to one call.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    /// Version, objects and where the next page begins.
    List(&'static str, Vec<Value>, &'static str),
    /// Events of a watch, and how it goes on after them.
    Watch(Vec<(&'static str, Value)>, Then),
    /// A status other than 200.
    Status(u16),
    /// No answer for ever.
    Silence,
}

/// How a watch goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// The server ends it in order, after this many milliseconds.
    Ends(u64),
    /// The connection breaks.
    Breaks,
    /// It stays open; what is [sent](Script::send) comes.
    Stays,
}

/// Plays answers in order; when all are played lists are refused, and watches stay open.
#[derive(Default)]
pub(crate) struct Script {
    answers: Mutex<VecDeque<Answer>>,
    /// When, and path with query.
    pub(crate) calls: Mutex<Vec<(Instant, String)>>,
    sent: Mutex<VecDeque<(&'static str, Value)>>,
}

impl Script {
    pub(crate) fn new(answers: impl IntoIterator<Item = Answer>) -> Arc<Self> {
        Arc::new(Self { answers: Mutex::new(answers.into_iter().collect()), ..Self::default() })
    }

    /// One more event of the watch that stays open.
    pub(crate) fn send(&self, kind: &'static str, object: Value) {
        self.sent.lock().push_back((kind, object));
    }

    fn next(&self, uri: &str) -> Option<Answer> {
        self.calls.lock().push((Instant::now(), uri.to_owned()));
        self.answers.lock().pop_front()
    }

    /// Versions that watches started from.
    pub(crate) fn watches(&self) -> Vec<String> {
        let version = |uri: &str| {
            let rest = uri.split("resourceVersion=").nth(1)?;
            rest.split('&').next().map(str::to_owned)
        };
        self.calls.lock().iter().filter_map(|(_, uri)| version(uri)).collect()
    }

    pub(crate) fn lists(&self) -> Vec<Instant> {
        let calls = self.calls.lock();
        calls.iter().filter(|(_, uri)| !uri.contains("watch=true")).map(|(at, _)| *at).collect()
    }
}

/// A script that a watch may outlive.
pub(crate) struct Server(pub Arc<Script>);

#[async_trait]
impl Api for Server {
    async fn get(&self, uri: &str) -> Result<Bytes, Failure> {
        match self.0.next(uri) {
            Some(Answer::List(version, items, next)) => {
                let list =
                    json!({"metadata": {"resourceVersion": version, "continue": next}, "items": items});
                Ok(list.to_string().into())
            }
            Some(Answer::Silence) => std::future::pending().await,
            Some(Answer::Status(status)) => {
                Err(Failure { status: Some(status), message: "scripted".to_owned() })
            }
            Some(Answer::Watch(..)) => {
                Err(Failure { status: Some(500), message: format!("a list is asked for: {uri}") })
            }
            None => Err(Failure { status: Some(500), message: "the script is over".to_owned() }),
        }
    }

    async fn watch(&self, uri: &str) -> Result<Lines, Failure> {
        let (events, then) = match self.0.next(uri) {
            Some(Answer::Watch(events, then)) => (events, then),
            Some(Answer::Silence) => std::future::pending().await,
            Some(Answer::Status(status)) => {
                return Err(Failure { status: Some(status), message: "scripted".to_owned() });
            }
            Some(Answer::List(..)) => {
                return Err(Failure { status: Some(500), message: format!("a watch is asked for: {uri}") });
            }
            None => (Vec::new(), Then::Stays),
        };
        let line = |(kind, object): (&str, Value)| json!({"type": kind, "object": object}).to_string();
        let script = Arc::clone(&self.0);
        let rest = stream::unfold(script, move |script| async move {
            match then {
                Then::Ends(wait) => {
                    tokio::time::sleep(ms(wait)).await;
                    None
                }
                Then::Breaks => Some((Err(Failure::broken("scripted")), script)),
                Then::Stays => loop {
                    let next = script.sent.lock().pop_front();
                    if let Some(event) = next {
                        return Some((Ok(line(event)), script));
                    }
                    tokio::time::sleep(ms(5)).await;
                },
            }
        });
        let events: Vec<_> = events.into_iter().map(|event| Ok(line(event))).collect();
        Ok(Box::pin(stream::iter(events).chain(rest)))
    }
}

/// A pod that is ready, as the API server tells it.
pub(crate) fn pod(name: &str, uid: &str, ip: &str, version: u64) -> Value {
    json!({
        "metadata": {
            "name": name, "namespace": "n", "uid": uid, "resourceVersion": version.to_string(),
            "labels": {"app": "w"},
        },
        "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

/// The same pod, not ready.
pub(crate) fn unready(mut pod: Value) -> Value {
    pod["status"]["conditions"][0]["status"] = "False".into();
    pod
}

/// A fleet of addresses with the pods behind them.
#[derive(Default)]
pub(crate) struct Recorder {
    /// Address → uid and whether it is held.
    pub(crate) fleet: Mutex<BTreeMap<String, (String, bool)>>,
    /// Every change, as `word address`.
    pub(crate) log: Mutex<Vec<String>>,
    /// Addresses that can't be added.
    pub(crate) barred: Mutex<Vec<String>>,
    pub(crate) tries: Mutex<usize>,
}

impl Recorder {
    /// Addresses that take requests.
    pub(crate) fn routable(&self) -> Vec<String> {
        let fleet = self.fleet.lock();
        fleet.iter().filter(|(_, (_, held))| !held).map(|(address, _)| address.clone()).collect()
    }
}

impl Sink for Recorder {
    fn apply(&self, change: &Change) -> Result<Applied, String> {
        let (mut fleet, member) = (self.fleet.lock(), change.member());
        let address = member.address.clone();
        match change {
            Change::Add(_) => {
                *self.tries.lock() += 1;
                if self.barred.lock().contains(&address) {
                    return Err("scripted".to_owned());
                }
                assert!(fleet.insert(address.clone(), (member.uid.clone(), false)).is_none());
            }
            Change::Remove(..) => assert!(fleet.remove(&address).is_some()),
            Change::Hold(_) | Change::Resume(_) => {
                fleet.get_mut(&address).expect("it is there").1 = matches!(change, Change::Hold(_));
            }
            Change::Update(_) => {}
        }
        self.log.lock().push(format!("{} {address}", change.word()));
        Ok(Applied::Done)
    }

    fn addresses(&self) -> BTreeSet<String> {
        self.fleet.lock().keys().cloned().collect()
    }
}

/// Pauses of milliseconds, all else as usual.
pub(crate) fn quick() -> Timing {
    Timing { pause: (ms(1), ms(4)), confirm: ms(20), level: ms(20), ..Timing::default() }
}

/// Discovery in a task of its own until it is dropped.
pub(crate) struct Running {
    pub(crate) script: Arc<Script>,
    pub(crate) sink: Arc<Recorder>,
    pub(crate) metrics: Arc<Metrics>,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(timing: Timing, answers: impl IntoIterator<Item = Answer>) -> Self {
        let plan = Plan {
            queries: vec![Query::pods(
                Some("n".to_owned()),
                "app=w".parse().expect("a selector"),
                Role::Regular,
            )],
            port: 80,
            model_from: None,
            bootstrap_annotation: "sglang.ai/bootstrap-port".to_owned(),
            protocol: None,
            timing,
        };
        let script = Script::new(answers);
        let (sink, metrics) = (Arc::<Recorder>::default(), Arc::new(Metrics::default()));
        let (api, theirs, counted) =
            (Arc::new(Server(Arc::clone(&script))), Arc::clone(&sink), Arc::clone(&metrics));
        let task = tokio::spawn(async move { run(plan, api, &*theirs, counted).await });
        Self { script, sink, metrics, task }
    }

    /// Waits for a condition.
    pub(crate) async fn when(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
            assert!(!self.task.is_finished(), "discovery ended");
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{what}: {:?} {:?}",
                self.sink.log.lock(),
                self.script.calls.lock()
            );
            tokio::time::sleep(ms(2)).await;
        }
    }

    /// Waits until exactly these take requests.
    pub(crate) async fn until(&self, right: &[&str]) {
        self.when(&format!("{right:?} routable"), |one| one.sink.routable() == right).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) const fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}
