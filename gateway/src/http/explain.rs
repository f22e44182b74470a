//! Why a request went where it went: `x-branchline-explain` on an answer, `GET /explain/{request}` afterwards, and
//! `GET /explain` for the latest choices of all.
//!
//! The latest choices are kept in a ring, by the request's id; it is bounded and holds no prompt.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::response::Response;
use axum::routing::get;
use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{Decision, Fleet};
use http::{StatusCode, Uri};
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Refusal, json as answer};
use crate::app::App;

/// Choices kept.
const KEPT: usize = 4096;
/// Candidates in a header and in the list, the cheapest first.
const IN_HEADER: usize = 8;
/// Choices that the list shows unasked, and at most.
const LISTED: usize = 50;
const MOST_LISTED: usize = 500;
/// Longest id that is kept.
const ID_BYTES: usize = 256;

/// The latest choices.
#[derive(Debug, Default)]
pub struct Explanations {
    ring: Mutex<VecDeque<Entry>>,
    asked: AtomicU64,
}

/// In the extensions of a request whose choice goes into the answer's header: tells it from others of the same name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked(u64);

/// What a request is called.
#[derive(Debug, Clone, Copy, Default)]
pub struct Called<'a> {
    /// By the gateway and the workers.
    pub id: &'a str,
    /// By its client.
    pub tag: Option<&'a str>,
    /// If its answer tells of the choice.
    pub asked: Option<Asked>,
}

#[derive(Debug, Clone)]
struct Entry {
    id: String,
    tag: Option<String>,
    asked: Option<Asked>,
    model: Option<String>,
    noted: Instant,
    decision: Decision,
}

impl Explanations {
    /// Keeps a choice; a retry's comes after the first one's.
    pub fn note(&self, called: Called<'_>, model: Option<&str>, decision: Decision) {
        if called.id.len() > ID_BYTES {
            return;
        }
        let entry = Entry {
            id: called.id.to_owned(),
            tag: called.tag.filter(|tag| tag.len() <= ID_BYTES).map(str::to_owned),
            asked: called.asked,
            model: model.map(str::to_owned),
            noted: Instant::now(),
            decision,
        };
        let mut ring = self.ring.lock();
        if ring.len() >= KEPT {
            ring.pop_front();
        }
        ring.push_back(entry);
    }

    /// A mark for a request that is asked about.
    pub fn ask(&self) -> Asked {
        Asked(self.asked.fetch_add(1, Ordering::Relaxed))
    }

    /// All choices made for `id`, in order; `None` if none is kept.
    pub fn find(&self, id: &str, fleet: &Fleet) -> Option<Value> {
        // Written when the lock is free again: every choice takes it.
        let found: Vec<Entry> =
            self.ring.lock().iter().filter(|entry| entry.is_called(id)).cloned().collect();
        let all: Vec<Value> = found.iter().map(|entry| entry.tell(fleet, usize::MAX)).collect();
        (!all.is_empty()).then(|| json!({"request": id, "choices": all}))
    }

    /// The latest `limit` choices, the last one first, each with its request's id and its age.
    pub fn latest(&self, limit: usize, fleet: &Fleet) -> Value {
        let found: Vec<Entry> = self.ring.lock().iter().rev().take(limit).cloned().collect();
        let told = found.iter().map(|entry| {
            let mut told = entry.tell(fleet, IN_HEADER);
            told["request"] = entry.id.as_str().into();
            told["tag"] = entry.tag.as_deref().into();
            told["age_ms"] = u64::try_from(entry.noted.elapsed().as_millis()).unwrap_or(u64::MAX).into();
            told
        });
        json!({"choices": told.collect::<Vec<_>>(), "kept": KEPT})
    }

    /// The last choice made for the request that asked, which its client calls `id`; short enough for a header.
    pub fn header(&self, asked: Asked, id: &str, fleet: &Fleet) -> Option<String> {
        let found = self.ring.lock().iter().rev().find(|entry| entry.asked == Some(asked)).cloned();
        let mut told = found?.tell(fleet, IN_HEADER);
        told["request"] = id.into();
        Some(told.to_string())
    }
}

impl Entry {
    fn is_called(&self, id: &str) -> bool {
        self.id == id || self.tag.as_deref() == Some(id)
    }

    fn tell(&self, fleet: &Fleet, most: usize) -> Value {
        let Decision { policy, candidates, chosen, prompt_tokens, left_out } = &self.decision;
        let url = |id: WorkerId| fleet.worker(id).map(|worker| worker.url.clone());
        let told = |position: &usize| {
            let candidate = &candidates[*position];
            json!({
                "worker": candidate.worker.to_string(),
                "url": url(candidate.worker),
                "chosen": position == chosen,
                "cached_tokens": prompt_tokens.saturating_sub(candidate.uncached_tokens),
                "uncached_tokens": candidate.uncached_tokens,
                "copied_tokens": candidate.copied_tokens,
                "queued_tokens": candidate.queued_tokens,
                "running": candidate.running,
                "hinted_tokens": candidate.hinted_tokens,
                "shared_by": candidate.shared_by,
                "surplus_tokens": candidate.surplus_tokens,
                "kv_usage": candidate.usage,
                "speed": candidate.speed,
                "cost": candidate.cost(),
            })
        };
        let mut order: Vec<usize> = (0..candidates.len()).collect();
        order.sort_by(|a, b| candidates[*a].cost().total_cmp(&candidates[*b].cost()));
        let reason = reason(&self.decision);
        json!({
            "policy": policy.name(),
            "model": self.model,
            "chosen": candidates[*chosen].worker.to_string(),
            "reason": reason,
            "prompt_tokens": prompt_tokens,
            "candidates": order.iter().take(most).map(told).collect::<Vec<_>>(),
            "candidates_in_all": candidates.len(),
            "left_out": left_out.iter().take(most).map(ToString::to_string).collect::<Vec<_>>(),
        })
    }
}

/// The choice in words.
fn reason(decision: &Decision) -> String {
    let own = &decision.candidates[decision.chosen];
    let cached = decision.prompt_tokens.saturating_sub(own.uncached_tokens);
    let others = decision.candidates.len() - 1;
    if others == 0 {
        return "it was the only worker that could take the request".to_owned();
    }
    let cheaper = decision.candidates.iter().filter(|candidate| candidate.cost() < own.cost()).count();
    let place = match cheaper {
        0 => "no other worker was cheaper".to_owned(),
        count => format!(
            "{count} of {others} others would have been cheaper, as good as equal or passed over by the policy"
        ),
    };
    format!(
        "{} chose it: {cached} of {} prompt tokens are cached there, and {place}",
        decision.policy.name(),
        decision.prompt_tokens
    )
}

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/explain", get(list)).route("/explain/{request}", get(one))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    limit: Option<usize>,
}

/// How many choices a query asks for.
fn read_limit(uri: &Uri) -> Result<usize> {
    let Query(wanted) = Query::<Wanted>::try_from_uri(uri).map_err(|error| {
        let message = format!(
            "the query is not what this path takes: {}; give limit or nothing",
            error.body_text().to_lowercase()
        );
        Error::new(ErrorCode::InvalidArgument, message)
    })?;
    match wanted.limit.unwrap_or(LISTED) {
        limit if (1..=MOST_LISTED).contains(&limit) => Ok(limit),
        limit => {
            let message = format!("limit is {limit}; give 1 to {MOST_LISTED} choices");
            Err(Error::invalid("limit", message))
        }
    }
}

async fn list(State(app): State<Arc<App>>, uri: Uri) -> std::result::Result<Response, Refusal> {
    let limit = read_limit(&uri)?;
    Ok(answer(StatusCode::OK, &app.explanations.latest(limit, &app.fleet)))
}

async fn one(State(app): State<Arc<App>>, Path(id): Path<String>) -> std::result::Result<Response, Refusal> {
    match app.explanations.find(&id, &app.fleet) {
        Some(told) => Ok(answer(StatusCode::OK, &told)),
        None => {
            let text = format!(
                "no choice is kept for request '{id}'; give the rid, or the x-request-id that was sent with it, of one \
                 of the last {KEPT} choices"
            );
            Err(Error::new(ErrorCode::NotFound, text).with_field("request").into())
        }
    }
}
