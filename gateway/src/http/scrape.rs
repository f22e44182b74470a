//! `/metrics`: the router's own series, and what each engine says of itself when it is asked.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use branchline_telemetry::{Counter, Counters, Metrics};
use branchline_worker::proto;
use futures_util::future::join_all;
use http::header;
use parking_lot::Mutex;
use tokio::time::timeout;

use crate::app::App;

/// A scrape does not wait longer for an engine; its series are then absent rather than old.
const PATIENCE: Duration = Duration::from_millis(500);

/// Whose series stand in the table.
#[derive(Debug, Default)]
pub struct Shown(Mutex<HashSet<String>>);

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    if let Some(admission) = &app.admission {
        let gauge = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        app.metrics.admission_waiting.with([""; 0]).set(gauge(admission.waiting()));
        app.metrics.admission_bytes.with([""; 0]).set(gauge(admission.bytes()));
    }
    refresh(&app).await;
    let mut response = Response::new(Body::from(app.metrics.encode()));
    let kind = http::HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Asks every engine, and forgets those that are gone or silent.
async fn refresh(app: &App) {
    let workers = app.fleet.workers();
    let asked = workers.iter().filter(|worker| worker.http().is_none() && worker.is_ready());
    let answers = join_all(asked.map(|worker| async move {
        let answer = timeout(PATIENCE, worker.server_info()).await;
        (worker.url.clone(), answer.unwrap_or_else(|_| Err(branchline_core::Error::internal("silent"))))
    }))
    .await;
    let mut shown = app.scraped.0.lock();
    let mut told = HashSet::new();
    for (worker, answer) in answers {
        if let Ok(info) = answer {
            show(&app.metrics, &worker, &info);
            told.insert(worker);
        }
    }
    for worker in shown.difference(&told) {
        forget(&app.metrics, worker);
    }
    *shown = told;
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// A counter that the worker keeps: it starts again with the worker, which is what Prometheus expects of one.
fn store(counters: &Counters<1>, worker: &str, value: u64) {
    let counter: Counter = counters.with([worker.to_owned()]);
    counter.inner().store(value, std::sync::atomic::Ordering::Relaxed);
}

fn show(metrics: &Metrics, worker: &str, info: &proto::GetServerInfoResponse) {
    let name = || [worker.to_owned()];
    if let Some(load) = &info.load {
        metrics.engine_running.with(name()).set(load.running.into());
        metrics.engine_waiting.with(name()).set(load.waiting.into());
    }
    if let Some(cache) = &info.cache {
        let held = cache.pages_protected + cache.pages_private;
        metrics.engine_kv_usage.with(name()).set(ratio(held, cache.pages_total));
        metrics.engine_hit_rate.with(name()).set(ratio(cache.cached_tokens, cache.prompt_tokens));
        store(&metrics.engine_prompt_tokens, worker, cache.prompt_tokens);
        store(&metrics.engine_cached_tokens, worker, cache.cached_tokens);
        store(&metrics.engine_evicted, worker, cache.evicted_pages);
        store(&metrics.engine_retractions, worker, cache.retractions);
        store(&metrics.engine_host_stored, worker, cache.host_stored_pages);
        store(&metrics.engine_host_fetched, worker, cache.host_fetched_pages);
        if cache.host_pages_total > 0 {
            let share = ratio(cache.host_pages_used, cache.host_pages_total);
            metrics.engine_host_usage.with(name()).set(share);
        }
    }
    let guesses = info.speculative.unwrap_or_default();
    store(&metrics.engine_drafted, worker, guesses.drafted_tokens);
    store(&metrics.engine_accepted, worker, guesses.accepted_tokens);
    if guesses.drafted_tokens > 0 {
        let share = ratio(guesses.accepted_tokens, guesses.drafted_tokens);
        metrics.engine_acceptance.with(name()).set(share);
    }
    // An engine without a role has none.
    if let Some(handover) = &info.handover {
        metrics.engine_rooms.with(name()).set(handover.rooms.into());
        store(&metrics.engine_sent_pages, worker, handover.sent_pages);
        store(&metrics.engine_received_pages, worker, handover.received_pages);
        store(&metrics.engine_received_bytes, worker, handover.received_bytes);
        store(&metrics.engine_failed_handovers, worker, handover.failed_pulls);
        store(&metrics.engine_expired_rooms, worker, handover.expired_rooms);
    }
}

fn forget(metrics: &Metrics, worker: &str) {
    let name = || [worker.to_owned()];
    for gauges in [&metrics.engine_running, &metrics.engine_waiting, &metrics.engine_rooms] {
        gauges.remove(name());
    }
    for ratios in [
        &metrics.engine_kv_usage,
        &metrics.engine_hit_rate,
        &metrics.engine_acceptance,
        &metrics.engine_host_usage,
    ] {
        ratios.remove(name());
    }
    for counters in [
        &metrics.engine_prompt_tokens,
        &metrics.engine_cached_tokens,
        &metrics.engine_evicted,
        &metrics.engine_retractions,
        &metrics.engine_host_stored,
        &metrics.engine_host_fetched,
        &metrics.engine_drafted,
        &metrics.engine_accepted,
        &metrics.engine_sent_pages,
        &metrics.engine_received_pages,
        &metrics.engine_received_bytes,
        &metrics.engine_failed_handovers,
        &metrics.engine_expired_rooms,
    ] {
        counters.remove(name());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(prompt: u64, cached: u64) -> proto::GetServerInfoResponse {
        proto::GetServerInfoResponse {
            load: Some(proto::GetLoadResponse { running: 3, waiting: 2, ..Default::default() }),
            cache: Some(proto::CacheStats {
                pages_total: 10,
                pages_protected: 2,
                pages_private: 3,
                pages_evictable: 5,
                prompt_tokens: prompt,
                cached_tokens: cached,
                evicted_pages: 7,
                retractions: 1,
                host_pages_total: 8,
                host_pages_used: 2,
                host_stored_pages: 5,
                host_fetched_pages: 4,
                ..Default::default()
            }),
            speculative: Some(proto::SpeculativeStats { steps: 4, drafted_tokens: 8, accepted_tokens: 6 }),
            handover: Some(proto::HandoverStats {
                rooms: 2,
                sent_pages: 9,
                failed_pulls: 1,
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn a_workers_figures_stand_beside_its_name_and_go_with_it() {
        let metrics = Metrics::default();
        show(&metrics, "grpc://a:1", &info(200, 50));
        let text = metrics.encode();
        for line in [
            "requests_running{worker=\"grpc://a:1\"} 3",
            "requests_waiting{worker=\"grpc://a:1\"} 2",
            "kv_usage_ratio{worker=\"grpc://a:1\"} 0.5",
            "cache_hit_ratio{worker=\"grpc://a:1\"} 0.25",
            "evicted_pages_total{worker=\"grpc://a:1\"} 7",
            "retractions_total{worker=\"grpc://a:1\"} 1",
            "host_cache_usage_ratio{worker=\"grpc://a:1\"} 0.25",
            "host_stored_pages_total{worker=\"grpc://a:1\"} 5",
            "host_fetched_pages_total{worker=\"grpc://a:1\"} 4",
            "draft_acceptance_ratio{worker=\"grpc://a:1\"} 0.75",
            "handover_rooms{worker=\"grpc://a:1\"} 2",
            "handover_sent_pages_total{worker=\"grpc://a:1\"} 9",
            "handover_failures_total{worker=\"grpc://a:1\"} 1",
        ] {
            assert!(text.contains(&format!("branchline_worker_{line}")), "{line}:\n{text}");
        }
        forget(&metrics, "grpc://a:1");
        assert!(!metrics.encode().contains("grpc://a:1"));
    }

    #[test]
    fn a_worker_that_starts_again_starts_its_counters_again() {
        let metrics = Metrics::default();
        show(&metrics, "w", &info(200, 50));
        show(&metrics, "w", &info(10, 0));
        assert!(metrics.encode().contains("branchline_worker_prompt_tokens_total{worker=\"w\"} 10"));
    }
}
