//! Bounds retries to a share of live traffic, so that they can't melt a fleet that fails. Pure: time is an argument.

use std::time::Duration;

use parking_lot::Mutex;

/// How many retries there may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BudgetOptions {
    /// Retries a request earns.
    pub share: f64,
    /// Retries a second that are free of it.
    pub least: f64,
}

impl Default for BudgetOptions {
    fn default() -> Self {
        Self { share: 0.2, least: 2.0 }
    }
}

/// Retries that a fresh budget holds, and most that can be saved.
const FRESH: f64 = 10.0;
const MOST: f64 = 100.0;

/// A token bucket that requests fill and retries empty.
#[derive(Debug)]
pub struct RetryBudget {
    options: BudgetOptions,
    /// What is left, and when the free ones were last added.
    state: Mutex<(f64, Duration)>,
}

impl RetryBudget {
    /// A budget with its first few retries.
    pub fn new(options: BudgetOptions) -> Self {
        Self { options, state: Mutex::new((FRESH, Duration::ZERO)) }
    }

    /// A request came.
    pub fn earn(&self) {
        let mut state = self.state.lock();
        state.0 = (state.0 + self.options.share).min(MOST);
    }

    /// Takes one retry; false if none is left.
    pub fn spend(&self, now: Duration) -> bool {
        let mut state = self.state.lock();
        let free = now.saturating_sub(state.1).as_secs_f64() * self.options.least;
        // Free ones are not saved beyond what a fresh budget has.
        *state = (state.0.max((state.0 + free).min(FRESH)), now);
        let enough = state.0 >= 1.0;
        if enough {
            state.0 -= 1.0;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_budget_is_a_share_of_the_traffic_and_a_little() {
        let budget = RetryBudget::new(BudgetOptions::default());
        let mut attempts = 0;
        for number in 0..200_u32 {
            let now = Duration::from_millis(20) * number;
            budget.earn();
            attempts += 1;
            // Up to five retries each, all of which fail.
            attempts += (0..5).take_while(|_| budget.spend(now)).count();
        }
        assert!((240..=260).contains(&attempts), "{attempts}");
    }

    #[test]
    fn a_quiet_hour_saves_no_more_than_a_burst() {
        let budget = RetryBudget::new(BudgetOptions::default());
        let spent = (0..1000).take_while(|_| budget.spend(Duration::from_secs(3600))).count();
        assert_eq!(spent, 10);
        (0..100_000).for_each(|_| budget.earn());
        let spent = (0..1000).take_while(|_| budget.spend(Duration::from_secs(3600))).count();
        assert_eq!(spent, 100);
    }
}
