//! Stored responses: in memory, bounded by bytes, the oldest forgotten first. Only who made one can see it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use axum::extract::{Path, Query, State};
use axum::response::Response;
use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::responses::message_of;
use http::StatusCode;
use http::request::Parts;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::super::answer::{json as reply, refuse};
use super::super::intake::{settle, tenant_of};
use super::super::relay;
use super::not_stored;
use crate::app::App;

/// What is known of a response before its answer.
#[derive(Debug, Clone)]
pub(super) struct Kept {
    owner: String,
    items: Vec<Value>,
    /// Chat messages up to and with the input.
    conversation: Vec<Value>,
    /// An earlier state of it is stored; if that is gone, so is this.
    pub(super) again: bool,
}

/// One response.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    kept: Kept,
    response: Value,
    /// While it runs in the background.
    cancel: Option<CancellationToken>,
    bytes: usize,
}

impl Kept {
    pub(super) fn new(owner: String, mut items: Vec<Value>, conversation: Vec<Value>) -> Self {
        for item in items.iter_mut().filter(|item| item.get("id").is_none()) {
            item["id"] = format!("msg_{}", uuid::Uuid::new_v4().simple()).into();
        }
        Self { owner, items, conversation, again: false }
    }

    pub(super) fn with(self, response: Value, cancel: Option<CancellationToken>) -> Entry {
        let size = |values: &[Value]| values.iter().map(|value| value.to_string().len()).sum::<usize>();
        let bytes = size(&self.items) + size(&self.conversation) + response.to_string().len() + 256;
        Entry { kept: self, response, cancel, bytes }
    }
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<String, Arc<Entry>>,
    /// Ids in the order in which they came; some may be gone.
    order: VecDeque<String>,
    bytes: usize,
}

/// The stored responses of one gateway.
#[derive(Debug)]
pub struct ResponseStore {
    table: Mutex<Table>,
    limit: usize,
}

impl ResponseStore {
    /// A store of at most so many bytes.
    pub fn new(limit: usize) -> Self {
        Self { table: Mutex::default(), limit }
    }

    /// Keeps a response, in the place of an earlier state of it.
    pub(super) fn put(&self, entry: Entry) {
        let Some(id) = entry.response["id"].as_str().map(str::to_owned) else { return };
        let table = &mut *self.table.lock();
        if entry.kept.again {
            // One that was deleted stays so, and whoever was told that it is cancelled is not told another end.
            let Some(old) = table.entries.get(&id) else { return };
            if old.response["status"] == "cancelled" && entry.response["status"] != "cancelled" {
                return;
            }
        }
        table.insert(id, entry, self.limit);
    }

    /// Ends a response that runs in the background and answers what it is now; one that has ended stays as it is.
    /// Looked at and changed under one lock, so that neither its end nor its deletion falls between.
    fn cancel(&self, id: &str, owner: &str) -> Result<Value> {
        let table = &mut *self.table.lock();
        let found = table.entries.get(id).filter(|entry| entry.kept.owner == owner);
        let entry = Arc::clone(found.ok_or_else(|| not_stored(id))?);
        if entry.response["background"] != true {
            let message =
                "only a response made with `background` can be cancelled; close the connection of another";
            return Err(Error::invalid("response_id", message));
        }
        let mut response = entry.response.clone();
        if let Some(cancel) = &entry.cancel {
            cancel.cancel();
            response["status"] = "cancelled".into();
            table.insert(id.to_owned(), entry.kept.clone().with(response.clone(), None), self.limit);
        }
        Ok(response)
    }

    fn get(&self, id: &str, owner: &str) -> Result<Arc<Entry>> {
        let found = self.table.lock().entries.get(id).cloned();
        found.filter(|entry| entry.kept.owner == owner).ok_or_else(|| not_stored(id))
    }

    /// Chat messages of a response and all before it.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not stored, `Conflict` if it has not ended.
    pub(super) fn conversation(&self, id: &str, owner: &str) -> Result<Vec<Value>> {
        let entry =
            self.get(id, owner).map_err(|error| Error::invalid("previous_response_id", error.message))?;
        if !matches!(entry.response["status"].as_str(), Some("completed" | "incomplete")) {
            let message =
                format!("response {id:?} is {}; go on from one that has ended", entry.response["status"]);
            return Err(Error::new(ErrorCode::Conflict, message).with_field("previous_response_id"));
        }
        let output = entry.response["output"].as_array().into_iter().flatten().filter_map(message_of);
        Ok(entry.kept.conversation.iter().cloned().chain(output).collect())
    }

    /// How many are stored.
    pub fn len(&self) -> usize {
        self.table.lock().entries.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Table {
    /// Stores an entry, in the place of an earlier one; the oldest make room.
    fn insert(&mut self, id: String, entry: Entry, limit: usize) {
        self.bytes += entry.bytes;
        match self.entries.insert(id.clone(), Arc::new(entry)) {
            Some(old) => self.bytes -= old.bytes,
            None => self.order.push_back(id),
        }
        while self.bytes > limit {
            let Some(oldest) = self.order.pop_front() else { break };
            self.drop_entry(&oldest);
        }
    }

    fn drop_entry(&mut self, id: &str) {
        if let Some(gone) = self.entries.remove(id) {
            self.bytes -= gone.bytes;
            // Nobody could ask for its answer any more.
            if let Some(cancel) = &gone.cancel {
                cancel.cancel();
            }
        }
    }
}

/// Ours, or what the HTTP worker says that has it.
async fn ours_or_theirs(app: &Arc<App>, head: &Parts, ours: Result<Value>) -> Response {
    match ours {
        Err(error) if error.code == ErrorCode::NotFound => match relay::ask_all(app, head).await {
            Ok(Some(theirs)) => theirs,
            Ok(None) => refuse(&error),
            Err(unsure) => refuse(&unsure),
        },
        ours => settle(ours.map(|value| reply(StatusCode::OK, &value))),
    }
}

/// `GET /v1/responses/{id}`.
pub(super) async fn show(State(app): State<Arc<App>>, Path(id): Path<String>, head: Parts) -> Response {
    let entry = app.responses.get(&id, &tenant_of(&head.extensions));
    ours_or_theirs(&app, &head, entry.map(|entry| entry.response.clone())).await
}

/// `DELETE /v1/responses/{id}`; one that still runs is cancelled.
pub(super) async fn forget(State(app): State<Arc<App>>, Path(id): Path<String>, head: Parts) -> Response {
    let forgotten = app.responses.get(&id, &tenant_of(&head.extensions)).map(|_| {
        let table = &mut *app.responses.table.lock();
        table.drop_entry(&id);
        table.order.retain(|known| *known != id);
        json!({"id": id, "object": "response", "deleted": true})
    });
    ours_or_theirs(&app, &head, forgotten).await
}

/// `POST /v1/responses/{id}/cancel`: one that runs in the background ends; one that has ended stays as it is.
pub(super) async fn cancel(State(app): State<Arc<App>>, Path(id): Path<String>, head: Parts) -> Response {
    let cancelled = app.responses.cancel(&id, &tenant_of(&head.extensions));
    ours_or_theirs(&app, &head, cancelled).await
}

/// `GET /v1/responses/{id}/input_items`, the newest first unless asked otherwise.
pub(super) async fn input_items(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Query(query): Query<HashMap<String, String>>,
    head: Parts,
) -> Response {
    let found = app.responses.get(&id, &tenant_of(&head.extensions));
    ours_or_theirs(&app, &head, found.and_then(|entry| page(&entry.kept.items, &query))).await
}

fn page(items: &[Value], query: &HashMap<String, String>) -> Result<Value> {
    let mut items: Vec<&Value> = items.iter().collect();
    match query.get("order").map_or("desc", String::as_str) {
        "asc" => {}
        "desc" => items.reverse(),
        other => {
            return Err(Error::invalid("order", format!("`order` is {other:?}; use \"asc\" or \"desc\"")));
        }
    }
    let limit = match query.get("limit") {
        None => 20,
        Some(text) => {
            text.parse::<usize>().ok().filter(|limit| (1..=100).contains(limit)).ok_or_else(|| {
                Error::invalid("limit", format!("`limit` is {text:?}; give a number from 1 to 100"))
            })?
        }
    };
    if let Some(after) = query.get("after") {
        let at = items.iter().position(|item| item["id"] == after.as_str());
        let at =
            at.ok_or_else(|| Error::invalid("after", format!("`after` names {after:?}, which is no item")))?;
        items.drain(..=at);
    }
    let more = items.len() > limit;
    items.truncate(limit);
    Ok(json!({
        "object": "list",
        "data": items,
        "first_id": items.first().map(|item| &item["id"]),
        "last_id": items.last().map(|item| &item["id"]),
        "has_more": more,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: &str, owner: &str, text: &str) -> Entry {
        let kept = Kept::new(
            owner.to_owned(),
            vec![json!({"type": "message"})],
            vec![json!({"role": "user", "content": "x"})],
        );
        let output = json!([{"type": "message", "role": "assistant", "content": [{"text": text}]}]);
        kept.with(json!({"id": id, "status": "completed", "output": output}), None)
    }

    #[test]
    fn only_its_owner_sees_a_response() {
        let store = ResponseStore::new(10_000);
        store.put(entry("a", "one", "hi"));
        assert!(store.get("a", "one").is_ok());
        assert_eq!(store.get("a", "two").unwrap_err().code, ErrorCode::NotFound);
    }

    /// A response in the background, and its later end.
    fn in_background(store: &ResponseStore) -> (CancellationToken, Entry) {
        let cancel = CancellationToken::new();
        let state = |status: &str| json!({"id": "a", "status": status, "background": true, "output": []});
        let kept = Kept::new("one".to_owned(), Vec::new(), Vec::new());
        store.put(kept.clone().with(state("in_progress"), Some(cancel.clone())));
        (cancel, Kept { again: true, ..kept }.with(state("completed"), None))
    }

    #[test]
    fn a_cancel_and_an_end_or_a_deletion_leave_what_came_first() {
        let store = ResponseStore::new(10_000);
        let (cancel, end) = in_background(&store);
        assert_eq!(store.cancel("a", "two").unwrap_err().code, ErrorCode::NotFound);
        assert_eq!(store.cancel("a", "one").unwrap()["status"], "cancelled");
        assert!(cancel.is_cancelled());
        store.put(end);
        assert_eq!(store.get("a", "one").unwrap().response["status"], "cancelled");

        let store = ResponseStore::new(10_000);
        let (cancel, end) = in_background(&store);
        store.put(end);
        assert_eq!(store.cancel("a", "one").unwrap()["status"], "completed");
        assert!(!cancel.is_cancelled());

        let store = ResponseStore::new(10_000);
        let (_, end) = in_background(&store);
        store.table.lock().drop_entry("a");
        assert!(store.cancel("a", "one").is_err());
        store.put(end);
        assert!(store.is_empty() && store.table.lock().bytes == 0);
    }

    #[test]
    fn the_oldest_are_forgotten_past_the_limit() {
        let one = entry("0", "", &"x".repeat(500)).bytes;
        let store = ResponseStore::new(3 * one);
        for id in 0..10 {
            store.put(entry(&id.to_string(), "", &"x".repeat(500)));
        }
        assert_eq!(store.len(), 3);
        assert!(store.get("6", "").is_err() && store.get("7", "").is_ok());
        store.put(entry("9", "", "less"));
        assert_eq!(store.len(), 3);
        assert!(store.table.lock().bytes < 3 * one);
    }

    #[test]
    fn a_conversation_has_the_answer_at_its_end() {
        let store = ResponseStore::new(10_000);
        store.put(entry("a", "", "hi"));
        let messages = store.conversation("a", "").unwrap();
        assert_eq!(
            messages,
            [json!({"role": "user", "content": "x"}), json!({"role": "assistant", "content": "hi"})]
        );
        assert_eq!(store.conversation("b", "").unwrap_err().field.as_deref(), Some("previous_response_id"));
    }

    #[test]
    fn pages_of_items_follow_each_other() {
        let items: Vec<Value> = (0..5).map(|id| json!({"id": id.to_string()})).collect();
        let query = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect::<HashMap<_, _>>()
        };
        let first = page(&items, &query(&[("limit", "2")])).unwrap();
        assert_eq!(
            (&first["first_id"], &first["last_id"], &first["has_more"]),
            (&json!("4"), &json!("3"), &json!(true))
        );
        let rest = page(&items, &query(&[("after", "3")])).unwrap();
        assert_eq!((rest["data"].as_array().unwrap().len(), &rest["has_more"]), (3, &json!(false)));
        for bad in [("limit", "0"), ("order", "up"), ("after", "9")] {
            assert_eq!(page(&items, &query(&[bad])).unwrap_err().field.as_deref(), Some(bad.0));
        }
    }
}
