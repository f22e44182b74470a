//! Metrics and labels in one table, tracing set-up.
