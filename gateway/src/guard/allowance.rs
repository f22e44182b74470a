//! What somebody may use a minute, in requests and in tokens, and what is left of it. Fills evenly; may be owed.

use std::time::{Duration, Instant};

use branchline_core::{Error, ErrorCode, Result};

const MINUTE: f64 = 60.0;
/// Longest wait that anybody is told.
const LONGEST: Duration = Duration::from_secs(3600);

/// Limits a minute; none where nothing is limited.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Limits {
    pub(super) requests: Option<f64>,
    /// Of prompt and output.
    pub(super) tokens: Option<f64>,
}

/// What is left of them.
#[derive(Debug)]
pub(super) struct Allowance {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    level: f64,
    /// Both what a minute brings and the most that is saved up.
    a_minute: f64,
    at: Instant,
}

impl Bucket {
    fn new(a_minute: f64, now: Instant) -> Self {
        Self { level: a_minute, a_minute, at: now }
    }

    fn fill(&mut self, now: Instant) {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() / MINUTE * self.a_minute;
        self.give(gained);
        self.at = now;
    }

    fn give(&mut self, amount: f64) {
        self.level = (self.level + amount).min(self.a_minute);
    }

    /// How long until `amount` is there, or all that can be.
    fn wait(&self, amount: f64) -> Option<Duration> {
        let amount = amount.min(self.a_minute);
        let wait =
            || Duration::try_from_secs_f64((amount - self.level) / self.a_minute * MINUTE).unwrap_or(LONGEST);
        (self.level < amount).then(|| wait().min(LONGEST))
    }
}

/// Another limit for a bucket: what was used of the old one is used of the new one.
fn change(bucket: &mut Option<Bucket>, limit: Option<f64>, now: Instant) {
    let used = bucket.as_mut().map_or(0.0, |bucket| {
        bucket.fill(now);
        bucket.a_minute - bucket.level
    });
    *bucket = limit.map(|limit| Bucket { level: limit - used, ..Bucket::new(limit, now) });
}

impl Allowance {
    /// All of it.
    pub(super) fn new(limits: Limits, now: Instant) -> Self {
        let bucket = |limit: Option<f64>| limit.map(|limit| Bucket::new(limit, now));
        Self { requests: bucket(limits.requests), tokens: bucket(limits.tokens) }
    }

    /// Other limits; what was used stays used.
    pub(super) fn change(&mut self, limits: Limits, now: Instant) {
        change(&mut self.requests, limits.requests, now);
        change(&mut self.tokens, limits.tokens, now);
    }

    fn fill(&mut self, now: Instant) {
        for bucket in self.requests.iter_mut().chain(&mut self.tokens) {
            bucket.fill(now);
        }
    }

    /// Whether nothing of it is used.
    pub(super) fn is_whole(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.requests.iter().chain(&self.tokens).all(|bucket| bucket.level >= bucket.a_minute)
    }

    /// Takes one request of about `tokens`. What is larger than a minute's allowance may begin when all of it is there.
    ///
    /// # Errors
    /// `ResourceExhausted` with the time to wait; `whose` ends the words that say what is limited.
    pub(super) fn take(&mut self, tokens: f64, now: Instant, whose: &str) -> Result<()> {
        let refuse = |what: &str, limit: f64, wait| {
            let message = format!("{limit} {what} a minute are allowed{whose} and used up; try again later");
            Error::new(ErrorCode::ResourceExhausted, message).with_retry_after(wait)
        };
        self.fill(now);
        for (bucket, what, amount) in [(&self.requests, "requests", 1.0), (&self.tokens, "tokens", tokens)] {
            if let Some(bucket) = bucket
                && let Some(wait) = bucket.wait(amount)
            {
                return Err(refuse(what, bucket.a_minute, wait));
            }
        }
        for (bucket, amount) in [(&mut self.requests, 1.0), (&mut self.tokens, tokens)] {
            if let Some(bucket) = bucket {
                bucket.level -= amount;
            }
        }
        Ok(())
    }

    /// Takes back a request of about `tokens` that nothing was done for.
    pub(super) fn forgive(&mut self, tokens: f64) {
        if let Some(bucket) = &mut self.requests {
            bucket.give(1.0);
        }
        self.settle(-tokens);
    }

    /// Work has ended that took `more` tokens (or less, if negative) than it was begun with.
    pub(super) fn settle(&mut self, more: f64) {
        if let Some(bucket) = &mut self.tokens {
            bucket.give(-more);
        }
    }
}
