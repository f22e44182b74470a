//! Lists one query and watches it, for ever. A watch that expired, broke or fell silent is followed by a new list; one
//! that the server ended in order goes on from where it was.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use branchline_telemetry::Metrics;
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::api::{Api, Failure, Lines};
use crate::member::{Member, members};
use crate::object::{Event, List, Object};
use crate::pause::Pause;
use crate::plan::{Plan, Query};
use crate::refusal::Said;
use crate::store::Store;

/// What the queries find, and what is known of the server.
pub(crate) struct Board {
    pub(crate) plan: Plan,
    pub(crate) stores: Mutex<Vec<Store>>,
    /// Woken after each change of a store.
    pub(crate) changed: Notify,
    pub(crate) said: Mutex<Said>,
    pub(crate) metrics: Arc<Metrics>,
    heard: Mutex<Vec<i64>>,
}

/// Why a watch is over.
enum End {
    /// The server ended it in order.
    Closed,
    /// Its version is gone.
    Expired(Failure),
    /// It broke or was refused.
    Broken(Failure),
    /// Nothing came for too long.
    Silent,
}

impl Board {
    pub(crate) fn new(plan: Plan, metrics: Arc<Metrics>) -> Self {
        let count = plan.queries.len();
        Self {
            stores: Mutex::new((0..count).map(|_| Store::default()).collect()),
            changed: Notify::new(),
            said: Mutex::default(),
            heard: Mutex::new(vec![0; count]),
            metrics,
            plan,
        }
    }

    /// The server said something of a query: a list, an event or a bookmark.
    fn heard(&self, at: usize) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut heard = self.heard.lock();
        heard[at] = i64::try_from(now).unwrap_or(i64::MAX);
        // The most silent query counts: one that works hides none that does not.
        let oldest = heard.iter().copied().min().unwrap_or_default();
        self.metrics.discovery_heard.with([""; 0]).set(oldest);
    }

    fn failed(&self, at: usize, query: &Query, verb: &str, failure: &Failure) {
        self.metrics.discovery_failures.with([failure.kind()]).inc();
        self.said.lock().failure(at, query, verb, failure);
    }

    fn read(&self, query: &Query, object: &Object) -> Vec<Arc<Member>> {
        match members(object, query, &self.plan) {
            Ok(found) => found.into_iter().map(Arc::new).collect(),
            Err(sentence) => {
                self.said.lock().object(sentence);
                Vec::new()
            }
        }
    }

    fn put(&self, at: usize, object: &Object) {
        let found = self.read(&self.plan.queries[at], object);
        self.stores.lock()[at].put(object, found);
    }
}

/// Follows the query at this place of the plan; never ends.
pub(crate) async fn follow(board: &Board, api: &dyn Api, at: usize) {
    let (query, timing) = (&board.plan.queries[at], board.plan.timing);
    let mut pause = Pause::new(timing.pause);
    let mut reason = "start";
    loop {
        board.metrics.discovery_lists.with([reason]).inc();
        let mut version = match list_sure(board, api, at).await {
            Ok(version) => version,
            Err(failure) => {
                reason = "broken";
                board.failed(at, query, "list", &failure);
                sleep(pause.take(rand::random())).await;
                continue;
            }
        };
        let began = Instant::now();
        let mut heard = began;
        let end = loop {
            let opened = Instant::now();
            match watch(board, api, at, &mut version, &mut heard).await {
                // A server that ends each watch at once is not asked in a circle.
                End::Closed if opened.elapsed() < timing.pause.0 => {
                    break End::Broken(Failure::broken("the watch ended as soon as it began"));
                }
                End::Closed if heard.elapsed() < timing.stale => {}
                End::Closed => break End::Silent,
                end => break end,
            }
        };
        if began.elapsed() > timing.pause.1 * 2 {
            pause.reset();
        }
        reason = match &end {
            End::Closed => continue,
            End::Silent => {
                tracing::warn!(%query, "nothing was heard of the API server for {:?}, listing again", timing.stale);
                "stale"
            }
            End::Expired(failure) => {
                board.failed(at, query, "watch", failure);
                "expired"
            }
            End::Broken(failure) => {
                board.failed(at, query, "watch", failure);
                "broken"
            }
        };
        if !matches!(end, End::Silent) {
            sleep(pause.take(rand::random())).await;
        }
    }
}

/// Lists; when all are gone at once the server is asked again before it is believed: one that has just started and has
/// read nothing yet must not empty a fleet.
async fn list_sure(board: &Board, api: &dyn Api, at: usize) -> Result<String, Failure> {
    let (mut objects, mut version) = list(board, api, at).await?;
    if objects.is_empty() && board.stores.lock()[at].len() > 0 {
        sleep(board.plan.timing.confirm).await;
        board.metrics.discovery_lists.with(["confirm"]).inc();
        (objects, version) = list(board, api, at).await?;
    }
    let query = &board.plan.queries[at];
    let found = objects.into_iter().map(|object| {
        let found = board.read(query, &object);
        (object, found)
    });
    let found = found.collect();
    board.stores.lock()[at].replace(found);
    board.heard(at);
    board.changed.notify_one();
    Ok(version)
}

/// All pages of a list, and its version.
async fn list(board: &Board, api: &dyn Api, at: usize) -> Result<(Vec<Object>, String), Failure> {
    let (query, timing) = (&board.plan.queries[at], board.plan.timing);
    let (mut objects, mut next) = (Vec::new(), String::new());
    loop {
        let asked = timeout(timing.answer, api.get(&query.list(&next))).await;
        let body = asked.map_err(|_| Failure::broken(format!("no answer within {:?}", timing.answer)))??;
        let page: List = serde_json::from_slice(&body)
            .map_err(|cause| Failure::broken(format!("a list that can't be read: {cause}")))?;
        objects.extend(page.items);
        next = page.metadata.next;
        if next.is_empty() {
            return Ok((objects, page.metadata.resource_version));
        }
    }
}

/// One watch from `version` on, which is moved along with `heard`.
async fn watch(board: &Board, api: &dyn Api, at: usize, version: &mut String, heard: &mut Instant) -> End {
    let (query, timing) = (&board.plan.queries[at], board.plan.timing);
    // The server ends the watch, and says how far it is, before the silence is taken for a fault.
    let seconds = (timing.stale.as_secs() * 2 / 3).max(1);
    let opened = timeout(timing.answer, api.watch(&query.watch(version, seconds))).await;
    let mut lines: Lines = match opened {
        Ok(Ok(lines)) => lines,
        Ok(Err(failure)) if failure.is_expired() => return End::Expired(failure),
        Ok(Err(failure)) => return End::Broken(failure),
        Err(_) => return End::Broken(Failure::broken(format!("no answer within {:?}", timing.answer))),
    };
    let _open = Open::new(board, at, query);
    loop {
        let line = match timeout_at(*heard + timing.stale, lines.next()).await {
            Err(_) => return End::Silent,
            Ok(None) => return End::Closed,
            Ok(Some(Err(failure))) => return End::Broken(failure),
            Ok(Some(Ok(line))) => line,
        };
        let event = match Event::parse(&line) {
            Ok(event) => event,
            Err(cause) => {
                return End::Broken(Failure::broken(format!("an event that can't be read: {cause}")));
            }
        };
        match event {
            Some(Event::Is(object)) => {
                board.put(at, &object);
                *version = object.metadata.resource_version;
                board.changed.notify_one();
            }
            Some(Event::Gone(object)) => {
                board.stores.lock()[at].delete(&object);
                *version = object.metadata.resource_version;
                board.changed.notify_one();
            }
            Some(Event::Bookmark(reached)) => *version = reached,
            Some(Event::Error(status, message)) => {
                let failure = Failure { status: Some(status), message };
                return if failure.is_expired() { End::Expired(failure) } else { End::Broken(failure) };
            }
            None => {}
        }
        *heard = Instant::now();
        board.heard(at);
    }
}

/// Counts a watch while it is open.
struct Open<'a>(&'a Board);

impl<'a> Open<'a> {
    fn new(board: &'a Board, at: usize, query: &Query) -> Self {
        board.said.lock().success(at, query);
        board.metrics.discovery_watches.with([""; 0]).inc();
        Self(board)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.metrics.discovery_watches.with([""; 0]).dec();
    }
}
