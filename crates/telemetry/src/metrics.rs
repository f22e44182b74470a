//! The metrics table: name, labels, kind and help of each series stand here and nowhere else.
//!
//! A row makes a field of [`Metrics`], its registration, and its line in docs/reference/metrics.md.
//! Names carry no `_total`: the exposition format adds it to counters.

use std::borrow::Cow;
use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

/// A label's value.
pub type Label = Cow<'static, str>;

type Pairs<const N: usize> = [(&'static str, Label); N];

/// What a series is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; exposed with the suffix `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Buckets in seconds.
    Histogram,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Name without the `_total` of counters.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Label names, in the order `with` takes their values.
    pub labels: &'static [&'static str],
    /// One sentence.
    pub help: &'static str,
}

fn seconds() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
    ])
}

/// For work that takes microseconds.
fn micros() -> Histogram {
    Histogram::new([
        0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.1,
        0.5, 1.0, 5.0,
    ])
}

macro_rules! family {
    ($(#[$doc:meta])* $name:ident, $metric:ty) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name<const N: usize> {
            names: [&'static str; N],
            family: Family<Pairs<N>, $metric, fn() -> $metric>,
        }

        impl<const N: usize> $name<N> {
            /// The series with these label values, in the table's order; made at first use.
            /// The handle may be kept: it stays valid after `remove`, but is no longer exposed.
            pub fn with(&self, values: [impl Into<Label>; N]) -> $metric {
                self.family.get_or_create_owned(&self.pairs(values))
            }

            /// Forgets the series with these label values.
            pub fn remove(&self, values: [impl Into<Label>; N]) {
                self.family.remove(&self.pairs(values));
            }

            fn pairs(&self, values: [impl Into<Label>; N]) -> Pairs<N> {
                let mut names = self.names.iter();
                values.map(|value| (names.next().copied().unwrap_or_default(), value.into()))
            }
        }
    };
}

family!(
    /// Counters that differ in label values.
    Counters,
    Counter
);
family!(
    /// Gauges that differ in label values.
    Gauges,
    Gauge
);
family!(
    /// Gauges of fractions, 0 to 1.
    Ratios,
    Gauge<f64, AtomicU64>
);
family!(
    /// Histograms of seconds that differ in label values.
    Histograms,
    Histogram
);

macro_rules! table {
    ($( #[doc = $help:literal] $field:ident: $family:ident($kind:ident, $make:expr) = $name:literal [$($label:literal),*]; )*) => {
        /// Every series the gateway exposes.
        #[derive(Debug)]
        pub struct Metrics {
            registry: Registry,
            $( #[doc = $help] pub $field: $family<{ <[&str]>::len(&[$($label),*]) }>, )*
        }

        /// The table itself, in exposition order.
        pub const TABLE: &[Row] = &[
            $( Row { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help.trim_ascii() }, )*
        ];

        impl Default for Metrics {
            fn default() -> Self {
                let mut registry = Registry::default();
                $(
                    let $field = $family {
                        names: [$($label),*],
                        family: Family::new_with_constructor($make as fn() -> _),
                    };
                    // The client adds the full stop of the help text itself.
                    registry.register($name, $help.trim_ascii().trim_end_matches('.'), $field.family.clone());
                )*
                Self { registry, $($field),* }
            }
        }

        #[cfg(test)]
        impl Metrics {
            /// Makes one series of each row: a row without any is not exposed.
            fn touch_all(&self) {
                $( self.$field.with([$($label),*] as [&'static str; <[&str]>::len(&[$($label),*])]); )*
            }
        }
    };
}

table! {
    #[doc = " Requests answered, by route template and HTTP status."]
    requests: Counters(Counter, Counter::default) = "branchline_router_requests" ["route", "status"];
    #[doc = " Requests being served, from their head to the last byte of the answer."]
    in_flight: Gauges(Gauge, Gauge::default) = "branchline_router_requests_in_flight" [];
    #[doc = " Requests that were not let in: their tenant's allowance, or that of their model, is used up, the queue was full or too slow, their deadline is too near, the bodies of others fill the memory."]
    admission_refused: Counters(Counter, Counter::default) = "branchline_router_admission_refused" ["reason"];
    #[doc = " Requests that wait for a place."]
    admission_waiting: Gauges(Gauge, Gauge::default) = "branchline_router_admission_waiting" [];
    #[doc = " Bytes of request bodies that are held."]
    admission_bytes: Gauges(Gauge, Gauge::default) = "branchline_router_admission_bytes" [];
    #[doc = " Changed files (certificates, keys, tenants), by outcome: used, or refused, while the last good ones stay in force."]
    file_reads: Counters(Counter, Counter::default) = "branchline_router_file_reads" ["file", "outcome"];
    #[doc = " Seconds from a request's head to the last byte of its answer."]
    request_seconds: Histograms(Histogram, seconds) = "branchline_router_request_duration_seconds" ["route"];
    #[doc = " Seconds from a request's head to the first token or body byte sent to the client."]
    first_token_seconds: Histograms(Histogram, seconds) = "branchline_router_time_to_first_token_seconds" ["route"];
    #[doc = " Seconds between successive pieces of one stream."]
    inter_token_seconds: Histograms(Histogram, seconds) = "branchline_router_inter_token_seconds" ["route"];
    #[doc = " Prompt tokens of requests served by workers that report them."]
    prompt_tokens: Counters(Counter, Counter::default) = "branchline_router_prompt_tokens" [];
    #[doc = " Completion tokens of requests served by workers that report them."]
    completion_tokens: Counters(Counter, Counter::default) = "branchline_router_completion_tokens" [];
    #[doc = " Prompt tokens that a worker reported as found in its prefix cache."]
    cached_tokens: Counters(Counter, Counter::default) = "branchline_router_cached_tokens" [];
    #[doc = " Prompt tokens that the router's index predicted to be cached; compare with cached_tokens."]
    predicted_cached_tokens: Counters(Counter, Counter::default) = "branchline_router_predicted_cached_tokens" [];
    #[doc = " 1 while the worker may be chosen, else 0."]
    worker_ready: Gauges(Gauge, Gauge::default) = "branchline_router_worker_ready" ["worker"];
    #[doc = " Requests on the worker, from choice to last byte."]
    worker_in_flight: Gauges(Gauge, Gauge::default) = "branchline_router_worker_in_flight" ["worker"];
    #[doc = " Failures charged to the worker."]
    worker_failures: Counters(Counter, Counter::default) = "branchline_router_worker_failures" ["worker"];
    #[doc = " Times the worker was suspected: silent for far longer than predicted while its peers went on."]
    worker_suspected: Counters(Counter, Counter::default) = "branchline_router_worker_suspected" ["worker"];
    #[doc = " Streams continued on another worker after theirs had died."]
    continuations: Counters(Counter, Counter::default) = "branchline_router_continuations" [];
    #[doc = " Workers that discovery keeps, by state: ready, unready (no new request)."]
    discovery_workers: Gauges(Gauge, Gauge::default) = "branchline_router_discovery_workers" ["state"];
    #[doc = " Changes that discovery made, by kind: add, hold, resume, update, leaving, gone, replaced, refused (tried again)."]
    discovery_changes: Counters(Counter, Counter::default) = "branchline_router_discovery_changes" ["change"];
    #[doc = " Lists asked of the API server, by reason: start, expired, broken, stale (nothing heard for too long), confirm (all gone at once)."]
    discovery_lists: Counters(Counter, Counter::default) = "branchline_router_discovery_lists" ["reason"];
    #[doc = " Failures of the API server, by kind: unreachable, unauthorized, forbidden, expired, refused."]
    discovery_failures: Counters(Counter, Counter::default) = "branchline_router_discovery_failures" ["kind"];
    #[doc = " Watches that are open now."]
    discovery_watches: Gauges(Gauge, Gauge::default) = "branchline_router_discovery_watches" [];
    #[doc = " Unix time at which the most silent watch last heard of the API server; its age is how stale discovery may be."]
    discovery_heard: Gauges(Gauge, Gauge::default) = "branchline_router_discovery_last_heard_timestamp_seconds" [];
    #[doc = " Seconds from a look at what is there to the fleet being so."]
    discovery_settle_seconds: Histograms(Histogram, micros) = "branchline_router_discovery_settle_duration_seconds" [];
    #[doc = " Retries that the retry budget refused."]
    retries_refused: Counters(Counter, Counter::default) = "branchline_router_retries_refused" [];
    #[doc = " Difference between the cached tokens that the router predicted and those that the worker reported, summed over requests without their signs."]
    prediction_error: Counters(Counter, Counter::default) = "branchline_router_prediction_error_tokens" [];
    #[doc = " Attempts moved to another worker before the first byte, by reason."]
    retries: Counters(Counter, Counter::default) = "branchline_router_retries" ["reason"];
    #[doc = " Requests for models with prefill and decode workers, by way: pair, bypass (little to compute), decode_only (no whole pair)."]
    pd_requests: Counters(Counter, Counter::default) = "branchline_router_pd_requests" ["way"];
    #[doc = " Split requests that broke before the first byte, by part at fault: prefill, transfer, decode."]
    pd_failures: Counters(Counter, Counter::default) = "branchline_router_pd_failures" ["part"];
    #[doc = " Requests ended early, by reason: client (it left), api (an abort call), shutdown."]
    aborts: Counters(Counter, Counter::default) = "branchline_router_aborts" ["reason"];
    #[doc = " Error answers and error events, by code."]
    errors: Counters(Counter, Counter::default) = "branchline_router_errors" ["code"];
    #[doc = " Seconds that sequences spent on workers, by part: queue, prefill, decode; detokenize is contained in the others."]
    part_seconds: Histograms(Histogram, seconds) = "branchline_router_worker_part_seconds" ["part"];
    #[doc = " Sequences that run on the worker; this and what follows is asked of the workers at each scrape."]
    engine_running: Gauges(Gauge, Gauge::default) = "branchline_worker_requests_running" ["worker"];
    #[doc = " Sequences that wait on the worker."]
    engine_waiting: Gauges(Gauge, Gauge::default) = "branchline_worker_requests_waiting" ["worker"];
    #[doc = " Share of the worker's KV pool that requests and leases hold; what is only cached is not counted."]
    engine_kv_usage: Ratios(Gauge, Gauge::default) = "branchline_worker_kv_usage_ratio" ["worker"];
    #[doc = " Share of the worker's prompt tokens that were found in its prefix cache, since its start."]
    engine_hit_rate: Ratios(Gauge, Gauge::default) = "branchline_worker_cache_hit_ratio" ["worker"];
    #[doc = " Prompt tokens that the worker scheduled."]
    engine_prompt_tokens: Counters(Counter, Counter::default) = "branchline_worker_prompt_tokens" ["worker"];
    #[doc = " Those of them found in its prefix cache."]
    engine_cached_tokens: Counters(Counter, Counter::default) = "branchline_worker_cached_tokens" ["worker"];
    #[doc = " Pages that the worker's prefix cache evicted."]
    engine_evicted: Counters(Counter, Counter::default) = "branchline_worker_evicted_pages" ["worker"];
    #[doc = " Share of the worker's host tier that holds pages; absent if it has none."]
    engine_host_usage: Ratios(Gauge, Gauge::default) = "branchline_worker_host_cache_usage_ratio" ["worker"];
    #[doc = " Pages that the worker copied to its host tier."]
    engine_host_stored: Counters(Counter, Counter::default) = "branchline_worker_host_stored_pages" ["worker"];
    #[doc = " Pages that it brought back from there."]
    engine_host_fetched: Counters(Counter, Counter::default) = "branchline_worker_host_fetched_pages" ["worker"];
    #[doc = " Sequences that the worker put back into its queue for want of pages or for a higher priority."]
    engine_retractions: Counters(Counter, Counter::default) = "branchline_worker_retractions" ["worker"];
    #[doc = " Guessed tokens that the worker checked."]
    engine_drafted: Counters(Counter, Counter::default) = "branchline_worker_draft_tokens" ["worker"];
    #[doc = " Those of them that were right."]
    engine_accepted: Counters(Counter, Counter::default) = "branchline_worker_accepted_draft_tokens" ["worker"];
    #[doc = " Share of the worker's guessed tokens that were right, since its start; absent while nothing was guessed."]
    engine_acceptance: Ratios(Gauge, Gauge::default) = "branchline_worker_draft_acceptance_ratio" ["worker"];
    #[doc = " Prompts whose pages wait at the worker for whoever continues them, by worker."]
    engine_rooms: Gauges(Gauge, Gauge::default) = "branchline_worker_handover_rooms" ["worker"];
    #[doc = " KV pages that the worker handed over, by worker."]
    engine_sent_pages: Counters(Counter, Counter::default) = "branchline_worker_handover_sent_pages" ["worker"];
    #[doc = " KV pages that the worker took over, by worker."]
    engine_received_pages: Counters(Counter, Counter::default) = "branchline_worker_handover_received_pages" ["worker"];
    #[doc = " Bytes of KV pages that the worker took over, by worker."]
    engine_received_bytes: Counters(Counter, Counter::default) = "branchline_worker_handover_received_bytes" ["worker"];
    #[doc = " Hand-overs that failed at the worker, by worker."]
    engine_failed_handovers: Counters(Counter, Counter::default) = "branchline_worker_handover_failures" ["worker"];
    #[doc = " Rooms that nobody came to in time, by worker."]
    engine_expired_rooms: Counters(Counter, Counter::default) = "branchline_worker_handover_expired_rooms" ["worker"];
    #[doc = " Calls of WASM modules, by module, hook and outcome: the action, or timeout, limit, fuel, trap, bad_output, busy, quarantined."]
    wasm_calls: Counters(Counter, Counter::default) = "branchline_router_wasm_calls" ["module", "hook", "outcome"];
    #[doc = " Seconds that a call of a WASM module took."]
    wasm_call_seconds: Histograms(Histogram, micros) = "branchline_router_wasm_call_duration_seconds" ["module", "hook"];
    #[doc = " WASM modules loaded."]
    wasm_modules: Gauges(Gauge, Gauge::default) = "branchline_router_wasm_modules" [];
    #[doc = " 1 while a WASM module is quarantined after repeated failures, else 0."]
    wasm_quarantined: Gauges(Gauge, Gauge::default) = "branchline_router_wasm_quarantined" ["module"];
    #[doc = " Counters that WASM modules keep themselves; names and labels are the modules'."]
    wasm_module_count: Counters(Counter, Counter::default) = "branchline_router_wasm_module_count" ["module", "name", "label"];
    #[doc = " Gauges that WASM modules keep themselves."]
    wasm_module_value: Gauges(Gauge, Gauge::default) = "branchline_router_wasm_module_value" ["module", "name", "label"];
    #[doc = " Histograms of seconds that WASM modules keep themselves."]
    wasm_module_seconds: Histograms(Histogram, seconds) = "branchline_router_wasm_module_seconds" ["module", "name", "label"];
}

impl Metrics {
    /// All series in Prometheus text form.
    pub fn encode(&self) -> String {
        let mut out = String::with_capacity(8 * 1024);
        text::encode(&mut out, &self.registry).expect("writing to a string cannot fail");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_counted_request_appears_with_its_labels_and_suffix() {
        let metrics = Metrics::default();
        metrics.requests.with(["/v1/models", "200"]).inc();
        let text = metrics.encode();
        assert!(
            text.contains(r#"branchline_router_requests_total{route="/v1/models",status="200"} 1"#),
            "{text}"
        );
    }

    #[test]
    fn a_series_without_labels_counts() {
        let metrics = Metrics::default();
        metrics.prompt_tokens.with([""; 0]).inc_by(7);
        assert!(metrics.encode().contains("branchline_router_prompt_tokens_total 7"), "{}", metrics.encode());
    }

    #[test]
    fn a_removed_worker_leaves_no_series() {
        let metrics = Metrics::default();
        let gauge = metrics.worker_ready.with(["w1"]);
        gauge.set(1);
        metrics.worker_ready.remove(["w1"]);
        gauge.set(0);
        assert!(!metrics.encode().contains("w1"));
    }

    #[test]
    fn every_row_is_exposed_once_under_its_own_name() {
        let metrics = Metrics::default();
        metrics.touch_all();
        let text = metrics.encode();
        let mut names = HashSet::new();
        for row in TABLE {
            assert!(names.insert(row.name), "{} stands twice", row.name);
            assert!(text.contains(&format!("# TYPE {} ", row.name)), "{} is not registered", row.name);
            assert!(row.help.ends_with('.'), "{}", row.help);
        }
    }

    #[test]
    fn a_label_value_with_quotes_and_line_ends_stays_one_line() {
        let metrics = Metrics::default();
        metrics.errors.with(["a\"b\nc\\"]).inc();
        let line = metrics.encode().lines().find(|line| line.contains("errors_total")).map(str::to_owned);
        assert_eq!(line.as_deref(), Some(r#"branchline_router_errors_total{code="a\"b\nc\\"} 1"#));
    }
}
