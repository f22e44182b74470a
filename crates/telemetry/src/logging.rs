//! Tracing to standard error, as text or as one JSON object a line.
//!
//! Set up once a process; a second call (a second router in one Python process) keeps the first.

use std::io::IsTerminal as _;

use branchline_core::{Error, Result};
use tracing_subscriber::EnvFilter;

/// How a log line is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// The levels that `--log-level` takes, least to most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// Failures of ours.
    Error,
    /// Things an operator should look at.
    Warn,
    /// Start, stop, workers that come and go.
    Info,
    /// One line a request.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// Names in order, as the option table lists them.
    pub const NAMES: [&'static str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

    /// The level of that name.
    pub fn parse(name: &str) -> Option<Self> {
        let levels = [Self::Off, Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace];
        Self::NAMES.iter().position(|known| *known == name).map(|index| levels[index])
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }
}

/// Starts logging to standard error. Returns whether this call did it (false: it was running already).
///
/// # Errors
/// `Internal` if the level can't be made into a filter.
pub fn init_logging(level: LogLevel, format: LogFormat) -> Result<bool> {
    let filter = EnvFilter::try_new(level.name())
        .map_err(|error| Error::internal(format!("log filter '{}' is not usable: {error}", level.name())))?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let outcome = match format {
        // Colour codes belong on a terminal, not in a file.
        LogFormat::Text => builder.with_target(false).with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    Ok(outcome.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_level_parses_to_its_own_name() {
        for name in LogLevel::NAMES {
            assert_eq!(LogLevel::parse(name).map(LogLevel::name), Some(name));
        }
        assert_eq!(LogLevel::parse("loud"), None);
    }

    #[test]
    fn a_second_set_up_keeps_the_first() {
        init_logging(LogLevel::Off, LogFormat::Text).expect("the filter is one of ours");
        assert!(!init_logging(LogLevel::Off, LogFormat::Json).expect("the filter is one of ours"));
    }
}
