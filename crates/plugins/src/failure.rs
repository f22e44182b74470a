//! How a call can fail, under the names that metrics and logs use.

use std::time::Duration;

use branchline_core::{Error, ErrorCode};

/// Why a call gave no usable action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// It took longer than its time.
    Timeout,
    /// It wanted more memory, tables or instances than it may have.
    Limit,
    /// It used up its fuel.
    Fuel,
    /// It trapped.
    Trap,
    /// What it answered is not usable.
    BadOutput,
    /// No place for it was free in time.
    Busy,
}

/// Every value of the `outcome` label.
pub(crate) const OUTCOMES: [&str; 13] = [
    "continue",
    "modify",
    "reject",
    "replace",
    "stop",
    "route",
    "timeout",
    "limit",
    "fuel",
    "trap",
    "bad_output",
    "busy",
    "quarantined",
];

impl Cause {
    /// Name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Limit => "limit",
            Self::Fuel => "fuel",
            Self::Trap => "trap",
            Self::BadOutput => "bad_output",
            Self::Busy => "busy",
        }
    }
}

/// A failed call.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Of which kind.
    pub cause: Cause,
    /// For the operator: the trap's text, or what was wrong with the answer.
    pub detail: String,
}

impl Failure {
    /// A failure.
    pub fn new(cause: Cause, detail: impl Into<String>) -> Self {
        Self { cause, detail: detail.into() }
    }

    /// What a client is told: which module, and of which kind, no more.
    pub fn refusal(&self, module: &str) -> Error {
        let message =
            format!("middleware '{module}' failed ({}); try again or tell the operator", self.cause.name());
        Error::new(ErrorCode::Unavailable, message).with_retry_after(Duration::from_secs(1))
    }
}

/// What a call cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Cost {
    /// Wall time.
    pub micros: u64,
    /// Fuel used.
    pub fuel: u64,
    /// Linear memory at its largest.
    pub memory_bytes: u64,
}

/// A call's action with its cost.
#[derive(Debug)]
pub struct Called<A> {
    /// What it answered.
    pub result: Result<A, Failure>,
    /// What it took.
    pub cost: Cost,
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAUSES: [Cause; 6] =
        [Cause::Timeout, Cause::Limit, Cause::Fuel, Cause::Trap, Cause::BadOutput, Cause::Busy];

    #[test]
    fn every_cause_is_a_value_of_the_outcome_label_and_no_value_stands_twice() {
        for cause in CAUSES {
            assert!(OUTCOMES.contains(&cause.name()), "{cause:?}");
        }
        let mut sorted = OUTCOMES.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), OUTCOMES.len());
    }

    #[test]
    fn a_client_learns_the_module_and_the_cause_and_nothing_of_the_guests_inside() {
        for cause in CAUSES {
            let failure = Failure::new(cause, "wasm backtrace: 0x18abb2 secret_function");
            let refusal = failure.refusal("gate");
            assert!(
                refusal.message.contains("'gate'") && refusal.message.contains(cause.name()),
                "{refusal}"
            );
            assert!(!refusal.message.contains("secret_function"), "{refusal}");
            assert_eq!(refusal.code, ErrorCode::Unavailable);
            assert_eq!(refusal.retry_after, Some(Duration::from_secs(1)));
        }
    }
}
