//! Metrics and their labels in one table, and the tracing set-up.
//!
//! [`Metrics`] is made once a process and passed down; it holds no global. Label values are route
//! templates, closed names and worker ids: never a path, model or header as a client sent it.

mod logging;
mod metrics;
mod reference;
mod traces;

pub use logging::{LogFormat, LogLevel, init_logging};
pub use metrics::{Counters, Gauges, Histograms, Kind, Label, Metrics, Ratios, Row, TABLE};
pub use prometheus_client::metrics::{counter::Counter, gauge::Gauge, histogram::Histogram};
pub use reference::render_reference;
pub use traces::{RequestSpan, Traces, traces_url};
