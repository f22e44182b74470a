//! What the fleet reports of itself: `/server_info` with cache statistics, and `/get_model_info`.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::response::Response;
use branchline_core::{Error, ErrorCode};
use branchline_worker::{Transport, proto};
use http::{Method, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};

use super::answer::{json as answer, refuse};
use super::{admin, fan};
use crate::app::App;

/// Cache figures of one worker, or of all together.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
struct CacheReport {
    pages_total: u64,
    pages_free: u64,
    pages_evictable: u64,
    pages_protected: u64,
    pages_private: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    lookups: u64,
    hits: u64,
    evicted_pages: u64,
    retractions: u64,
    /// Of the protected pages, those that leases hold.
    pages_leased: u64,
    leases: u64,
    lease_budget_pages: u64,
    preemptions: u64,
    host_pages_total: u64,
    host_pages_used: u64,
    host_stored_pages: u64,
    host_fetched_pages: u64,
    /// Cached tokens among prompt tokens, 0 to 1.
    hit_rate: f64,
}

impl CacheReport {
    fn add(&mut self, stats: &proto::CacheStats) {
        self.pages_total += stats.pages_total;
        self.pages_free += stats.pages_free;
        self.pages_evictable += stats.pages_evictable;
        self.pages_protected += stats.pages_protected;
        self.pages_private += stats.pages_private;
        self.prompt_tokens += stats.prompt_tokens;
        self.cached_tokens += stats.cached_tokens;
        self.lookups += stats.lookups;
        self.hits += stats.hits;
        self.evicted_pages += stats.evicted_pages;
        self.retractions += stats.retractions;
        self.pages_leased += stats.pages_leased;
        self.leases += u64::from(stats.leases);
        self.lease_budget_pages += stats.lease_budget_pages;
        self.preemptions += stats.preemptions;
        self.host_pages_total += stats.host_pages_total;
        self.host_pages_used += stats.host_pages_used;
        self.host_stored_pages += stats.host_stored_pages;
        self.host_fetched_pages += stats.host_fetched_pages;
        self.hit_rate = match self.prompt_tokens {
            0 => 0.0,
            prompt => self.cached_tokens as f64 / prompt as f64,
        };
    }
}

/// Asks every engine; the totals are of those that answered.
pub(super) async fn server(State(app): State<Arc<App>>) -> Response {
    let asked = fan::ask_all(&app, |worker| async move {
        match worker.http() {
            // Their own reports differ too much to be summed; /get_server_info of theirs is theirs to ask.
            Some(_) => Ok(None),
            None => worker.server_info().await.map(Some),
        }
    })
    .await;
    let mut total = CacheReport::default();
    let mut workers = Vec::with_capacity(asked.len());
    for (worker, outcome) in asked {
        if let Ok(Some(info)) = &outcome
            && let Some(stats) = &info.cache
        {
            total.add(stats);
        }
        let detail = outcome.map(|info| info.map_or_else(|| json!({}), |info| engine(&info)));
        let mut shown = admin::report(&worker, detail);
        if let Some(model) = worker.model() {
            shown["output"] = output(&model.info);
        }
        shown["ready"] = worker.is_ready().into();
        shown["in_flight"] = worker.in_flight().into();
        workers.push(shown);
    }
    let body = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "policy": app.options.policy.name(),
        "draining": app.is_draining(),
        "cache": total,
        "workers": workers,
    });
    answer(StatusCode::OK, &body)
}

/// One engine's cache figures.
pub(super) fn cache(stats: &proto::CacheStats) -> Value {
    let mut report = CacheReport::default();
    report.add(stats);
    json!(report)
}

fn engine(info: &proto::GetServerInfoResponse) -> Value {
    let none = proto::CacheStats::default();
    let options: Value = serde_json::from_str(&info.options_json).unwrap_or(Value::Null);
    json!({
        "version": info.version,
        "engine_id": info.engine_id,
        "uptime_s": info.uptime_s,
        "options": options,
        "page_size": info.cache.as_ref().map(|stats| stats.page_size),
        "cache": cache(info.cache.as_ref().unwrap_or(&none)),
        "load": info.load.as_ref().map(|load| json!({
            "running": load.running,
            "waiting": load.waiting,
            "waiting_uncached_tokens": load.waiting_uncached_tokens,
            "pages_used": load.pages_used,
            "pages_total": load.pages_total,
            "queue_age_ms": load.queue_age_ms,
            "step_age_ms": load.step_age_ms,
        })),
        "steps": info.steps,
        "scheduler_ms_per_step": info.scheduler_ms_per_step,
        "components": info.components,
    })
}

/// What a repeated request may rely on. Workers with the same `numerics_id` and `bitwise` give the same bits.
fn output(info: &proto::GetModelInfoResponse) -> Value {
    let means = match info.output_promise.as_str() {
        "bitwise" => {
            "the same request gives the same ids, text and logprobs to the last bit, whatever else runs"
        }
        "near-ties" => "the same request gives the same ids and text, unless two choices are within rounding",
        "seed" => {
            "the same request draws the same random numbers; sums may round differently in other batches"
        }
        _ => "the worker does not say",
    };
    json!({"promise": info.output_promise, "means": means, "numerics_id": info.numerics_id})
}

/// The engines' first model, in the names that SGLang's clients read; else what a ready HTTP worker says.
pub(super) async fn model(State(app): State<Arc<App>>) -> Response {
    if let Some(model) = app.fleet.models().first() {
        let info = &model.info;
        return answer(
            StatusCode::OK,
            &json!({
                "model_path": info.model_path,
                "tokenizer_path": info.model_path,
                "is_generation": true,
                "served_model_name": model.name,
                "served_model_names": model.names,
                "architecture": info.architecture,
                "vocab_size": info.vocab_size,
                "context_length": info.context_length,
                "max_request_tokens": info.max_request_tokens,
                "page_size": info.page_size,
                "dtype": info.dtype,
                "executor": info.executor,
                "weight_version": info.weight_version,
                "numerics_id": info.numerics_id,
                "output_promise": info.output_promise,
                "eos_token_ids": info.eos_token_ids,
                "bos_token_id": info.bos_token_id,
                "has_chat_template": model.chat_template.is_some(),
            }),
        );
    }
    let workers = app.fleet.workers();
    for worker in workers.iter().filter(|worker| worker.is_ready() && worker.transport() == Transport::Http) {
        if let Ok((StatusCode::OK, body)) =
            fan::call(&app, worker, Method::GET, "/get_model_info", Bytes::new()).await
            && let Ok(info) = serde_json::from_slice::<Value>(&body)
        {
            return answer(StatusCode::OK, &info);
        }
    }
    let error = Error::new(
        ErrorCode::Unavailable,
        "no ready worker has told about its model; try again when one is ready",
    );
    refuse(&error.with_retry_after(std::time::Duration::from_secs(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_add_up_and_the_rate_is_of_the_sums() {
        let mut total = CacheReport::default();
        let stats = |prompt, cached| proto::CacheStats {
            prompt_tokens: prompt,
            cached_tokens: cached,
            ..Default::default()
        };
        total.add(&stats(0, 0));
        assert_eq!(total.hit_rate, 0.0);
        total.add(&stats(100, 80));
        total.add(&stats(300, 20));
        assert_eq!((total.prompt_tokens, total.cached_tokens, total.hit_rate), (400, 100, 0.25));
    }
}
