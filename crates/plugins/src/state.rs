//! What a module leaves behind: log lines, counts of its calls, failures within a minute, own series, its store.
//!
//! Survives a replacement of the module's bytes, except for the failures.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use branchline_telemetry::Metrics;
use parking_lot::Mutex;
use serde::Serialize;

use crate::store::Store;

/// Log lines kept.
const LINES: usize = 500;
/// Longest line, in bytes.
const LINE_CAP: usize = 1024;
/// Series that a module may make.
const SERIES_CAP: usize = 100;
/// Within which time failures add up to a quarantine.
const WINDOW: Duration = Duration::from_secs(60);

/// Least to most severe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// For authors.
    Debug,
    /// Usual.
    Info,
    /// Odd.
    Warn,
    /// Wrong.
    Error,
}

/// One line that a module logged, or that was logged about it.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    /// Counts all lines of the module, from 1.
    pub number: u64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Severity.
    pub level: Level,
    /// What it says.
    pub message: String,
}

/// Counts of calls.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) calls: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) micros: AtomicU64,
    pub(crate) slowest_micros: AtomicU64,
    pub(crate) last_ms: AtomicU64,
}

#[derive(Debug, Default)]
struct Lines {
    kept: VecDeque<Line>,
    next: u64,
}

/// The state.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) name: String,
    pub(crate) store: Store,
    pub(crate) counts: Counts,
    pub(crate) metrics: Arc<Metrics>,
    lines: Mutex<Lines>,
    failures: Mutex<VecDeque<Instant>>,
    quarantined: AtomicBool,
    series: Mutex<HashSet<(u8, String, String)>>,
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis() as u64)
}

impl State {
    pub(crate) fn new(name: &str, metrics: Arc<Metrics>) -> Self {
        metrics.wasm_quarantined.with([name.to_owned()]).set(0);
        Self {
            name: name.to_owned(),
            store: Store::default(),
            counts: Counts::default(),
            metrics,
            lines: Mutex::default(),
            failures: Mutex::default(),
            quarantined: AtomicBool::new(false),
            series: Mutex::default(),
        }
    }

    /// Keeps a line, cut to its longest length.
    pub(crate) fn log(&self, level: Level, message: &str) {
        let mut end = message.len().min(LINE_CAP);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        let message: String = message[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        tracing::debug!(module = %self.name, ?level, message, "a module says");
        let mut lines = self.lines.lock();
        lines.next += 1;
        let line = Line { number: lines.next, at_ms: now_ms(), level, message };
        if lines.kept.len() == LINES {
            lines.kept.pop_front();
        }
        lines.kept.push_back(line);
    }

    /// Lines after the one with this number.
    pub(crate) fn lines(&self, after: u64) -> Vec<Line> {
        self.lines.lock().kept.iter().filter(|line| line.number > after).cloned().collect()
    }

    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantined.load(Ordering::Acquire)
    }

    /// Lets the module back in.
    pub(crate) fn release(&self) {
        self.failures.lock().clear();
        self.quarantined.store(false, Ordering::Release);
        self.metrics.wasm_quarantined.with([self.name.clone()]).set(0);
    }

    /// Counts a failure; at `limit` of them within a minute the module is taken out.
    pub(crate) fn failed(&self, limit: u32, now: Instant) {
        if limit == 0 || self.is_quarantined() {
            return;
        }
        let mut failures = self.failures.lock();
        failures.push_back(now);
        while failures.front().is_some_and(|first| now.duration_since(*first) > WINDOW) {
            failures.pop_front();
        }
        if failures.len() < limit as usize {
            return;
        }
        failures.clear();
        self.quarantined.store(true, Ordering::Release);
        self.metrics.wasm_quarantined.with([self.name.clone()]).set(1);
        tracing::error!(module = %self.name, failures = limit, "module quarantined");
        drop(failures);
        self.log(Level::Error, &format!("quarantined after {limit} failures within a minute"));
    }

    /// Whether the module may write this series: a good name, and not one too many.
    fn admit(&self, kind: u8, name: &str, label: &str) -> bool {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if name.is_empty() || name.len() > 48 || !name.bytes().all(plain) || label.len() > 64 {
            return false;
        }
        let mut series = self.series.lock();
        let key = (kind, name.to_owned(), label.to_owned());
        series.contains(&key) || (series.len() < SERIES_CAP && series.insert(key))
    }

    fn labels(&self, name: &str, label: &str) -> [String; 3] {
        [self.name.clone(), name.to_owned(), label.to_owned()]
    }

    pub(crate) fn counter_add(&self, name: &str, label: &str, by: u64) {
        if self.admit(0, name, label) {
            self.metrics.wasm_module_count.with(self.labels(name, label)).inc_by(by);
        }
    }

    pub(crate) fn gauge_set(&self, name: &str, label: &str, value: i64) {
        if self.admit(1, name, label) {
            self.metrics.wasm_module_value.with(self.labels(name, label)).set(value);
        }
    }

    pub(crate) fn histogram_observe(&self, name: &str, label: &str, value: f64) {
        if value.is_finite() && value >= 0.0 && self.admit(2, name, label) {
            self.metrics.wasm_module_seconds.with(self.labels(name, label)).observe(value);
        }
    }

    /// Takes the module's series out of the metrics.
    pub(crate) fn forget_series(&self) {
        self.metrics.wasm_quarantined.remove([self.name.clone()]);
        for hook in crate::spec::Hook::ALL {
            self.metrics.wasm_call_seconds.remove([self.name.clone(), hook.name().to_owned()]);
            for outcome in crate::failure::OUTCOMES {
                let labels = [self.name.clone(), hook.name().to_owned(), outcome.to_owned()];
                self.metrics.wasm_calls.remove(labels);
            }
        }
        for (kind, name, label) in self.series.lock().drain() {
            let labels = self.labels(&name, &label);
            match kind {
                0 => self.metrics.wasm_module_count.remove(labels),
                1 => self.metrics.wasm_module_value.remove(labels),
                _ => self.metrics.wasm_module_seconds.remove(labels),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        State::new("m", Arc::new(Metrics::default()))
    }

    #[test]
    fn log_lines_are_bounded_in_number_and_length_and_hold_no_line_ends() {
        let state = state();
        for number in 0..LINES + 10 {
            state.log(Level::Info, &format!("line {number}\nforged"));
        }
        state.log(Level::Warn, &"é".repeat(LINE_CAP));
        let lines = state.lines(0);
        assert_eq!((lines.len(), lines[0].number), (LINES, 12));
        assert_eq!(lines[0].message, "line 11 forged");
        assert_eq!(lines[LINES - 1].message.len(), LINE_CAP);
        assert_eq!(state.lines(lines[LINES - 1].number - 2).len(), 2);
    }

    #[test]
    fn failures_within_a_minute_quarantine_and_spread_ones_do_not() {
        let (state, start) = (state(), Instant::now());
        for at in 0..6u64 {
            state.failed(3, start + Duration::from_secs(40 * at));
        }
        assert!(!state.is_quarantined());
        for _ in 0..2 {
            state.failed(3, start + Duration::from_secs(240));
        }
        assert!(state.is_quarantined());
        assert!(state.metrics.encode().contains("wasm_quarantined{module=\"m\"} 1"));
        state.release();
        assert!(!state.is_quarantined());
    }

    #[test]
    fn a_module_can_make_a_hundred_series_with_plain_names() {
        let state = state();
        state.counter_add("bad name", "", 1);
        state.counter_add("Bad", "", 1);
        for number in 0..SERIES_CAP + 20 {
            state.counter_add("c", &number.to_string(), 1);
        }
        let text = state.metrics.encode();
        assert_eq!(text.matches("branchline_router_wasm_module_count_total{").count(), SERIES_CAP);
        state.forget_series();
        assert!(!state.metrics.encode().contains("module=\"m\""), "{}", state.metrics.encode());
    }
}
