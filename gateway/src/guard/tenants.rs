//! Whose a request is, and how much its owner has used of what it may use a minute.
//!
//! A tenant is the key that came with the request, or what the operator's header says, else everybody without a name.
//! Policies may change while the gateway runs: what a tenant has used stays used.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use branchline_core::{Error, ErrorCode, Result};
use http::{HeaderMap, HeaderName};
use parking_lot::Mutex;

use super::KeyHash;
use super::policies::{Class, Policies, Policy};

/// Tenants remembered at once; those that have nothing under way and owe nothing are forgotten first.
const MOST: usize = 16_384;
/// Longest name that a header may give.
const NAME_BYTES: usize = 256;
const MINUTE: f64 = 60.0;
/// Longest wait that anybody is told.
const LONGEST: Duration = Duration::from_secs(3600);

/// What is left of a minute's allowance; may be owed.
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

    /// How long until `amount` is there.
    fn wait(&self, amount: f64) -> Option<Duration> {
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

#[derive(Debug)]
struct Used {
    policy: Policy,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    /// Virtual time up to which it has had its share.
    position: f64,
}

/// One tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    name: Arc<str>,
    used: Mutex<Used>,
}

impl Tenant {
    pub(super) fn new(name: &str, policy: Policy) -> Self {
        let now = Instant::now();
        let bucket = |limit: Option<f64>| limit.map(|limit| Bucket::new(limit, now));
        let (requests, tokens) = (bucket(policy.requests_per_minute), bucket(policy.tokens_per_minute));
        Self { name: name.into(), used: Mutex::new(Used { policy, requests, tokens, position: 0.0 }) }
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn change(&self, policy: Policy, now: Instant) {
        let mut used = self.used.lock();
        if used.policy != policy {
            change(&mut used.requests, policy.requests_per_minute, now);
            change(&mut used.tokens, policy.tokens_per_minute, now);
            used.policy = policy;
        }
    }

    /// Whether it would be no different if it came for the first time; its place in the queue apart.
    fn is_settled(&self, now: Instant) -> bool {
        let mut used = self.used.lock();
        let Used { requests, tokens, .. } = &mut *used;
        requests.iter_mut().chain(tokens.iter_mut()).all(|bucket| {
            bucket.fill(now);
            bucket.level >= bucket.a_minute
        })
    }

    /// The class it asked for, no higher than it may.
    pub(super) fn class(&self, asked: Option<&str>) -> Class {
        asked.and_then(Class::named).unwrap_or(Class::Default).max(self.used.lock().policy.priority)
    }

    /// Takes one request of about `tokens` from the allowance.
    pub(super) fn take(&self, tokens: f64, now: Instant) -> Result<()> {
        let mut used = self.used.lock();
        let Used { requests, tokens: allowed, .. } = &mut *used;
        for bucket in requests.iter_mut().chain(allowed.iter_mut()) {
            bucket.fill(now);
        }
        let refuse = |what: &str, limit: f64, wait| {
            let message = format!("{limit} {what} a minute are allowed and used up; try again later");
            Error::new(ErrorCode::ResourceExhausted, message).with_retry_after(wait)
        };
        if let Some(bucket) = requests
            && let Some(wait) = bucket.wait(1.0_f64.min(bucket.a_minute))
        {
            return Err(refuse("requests", bucket.a_minute, wait));
        }
        // What is larger than a minute's allowance may begin when all of it is there.
        if let Some(bucket) = allowed
            && let Some(wait) = bucket.wait(tokens.min(bucket.a_minute))
        {
            return Err(refuse("tokens", bucket.a_minute, wait));
        }
        if let Some(bucket) = requests {
            bucket.level -= 1.0;
        }
        if let Some(bucket) = allowed {
            bucket.level -= tokens;
        }
        Ok(())
    }

    /// Where it stands on a virtual clock.
    pub(super) fn position(&self, clock: f64) -> f64 {
        self.used.lock().position.max(clock)
    }

    /// Begins work of about `cost` tokens; where it stood.
    pub(super) fn start(&self, clock: f64, cost: f64) -> f64 {
        let mut used = self.used.lock();
        let start = used.position.max(clock);
        used.position = start + cost / used.policy.weight;
        start
    }

    /// Takes back a request of about `tokens` that nothing was done for.
    pub(super) fn forgive(&self, tokens: f64) {
        let mut used = self.used.lock();
        let Used { requests, tokens: allowed, .. } = &mut *used;
        if let Some(bucket) = requests {
            bucket.give(1.0);
        }
        if let Some(bucket) = allowed {
            bucket.give(tokens);
        }
    }

    /// Work has ended that took `more` tokens (or less, if negative) than it was begun with.
    pub(super) fn settle(&self, more: f64) {
        let mut used = self.used.lock();
        used.position += more / used.policy.weight;
        if let Some(bucket) = &mut used.tokens {
            bucket.give(-more);
        }
    }
}

/// All tenants.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    file: Option<PathBuf>,
    header: Option<HeaderName>,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    policies: Policies,
    tenants: HashMap<Arc<str>, Arc<Tenant>>,
    /// Whom there is no room to tell apart.
    rest: Option<Arc<Tenant>>,
}

impl Tenants {
    /// The policies of `file`, and the header that names tenants, if any may.
    ///
    /// # Errors
    /// `InvalidArgument` naming the option and what is wrong.
    pub(super) fn load(file: Option<&Path>, header: Option<&str>) -> Result<Self> {
        let header = header.map(|name| {
            name.parse::<HeaderName>().map_err(|_| {
                let text = format!("tenant_header: '{name}' is no name of a header; give one such as x-team");
                Error::invalid("tenant_header", text)
            })
        });
        let policies = file.map(Policies::read).transpose()?.unwrap_or_default();
        let known = Mutex::new(Known { policies, ..Known::default() });
        Ok(Self { file: file.map(Path::to_owned), header: header.transpose()?, known })
    }

    /// The file, if there is one.
    pub(super) fn file(&self) -> Option<&PathBuf> {
        self.file.as_ref()
    }

    /// Reads the file again. What tenants have used stays used.
    ///
    /// # Errors
    /// As for [`Self::load`]; the policies then stay as they are.
    pub(super) fn read_again(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let policies = Policies::read(file)?;
        let (mut known, now) = (self.known.lock(), Instant::now());
        for tenant in known.tenants.values().chain(&known.rest) {
            tenant.change(policies.of(tenant.name()), now);
        }
        known.policies = policies;
        Ok(())
    }

    /// Whose a request is.
    pub(super) fn of(&self, key: Option<KeyHash>, headers: &HeaderMap) -> Arc<Tenant> {
        let told =
            self.header.as_ref().and_then(|name| headers.get(name)).and_then(|value| value.to_str().ok());
        let name: Arc<str> = match (told, key) {
            (Some(told), _) if !told.is_empty() && told.len() <= NAME_BYTES => {
                format!("header:{told}").into()
            }
            (_, Some(key)) => key.hex("auth:").into(),
            _ => "anonymous".into(),
        };
        self.known.lock().get(name, MOST)
    }
}

impl Known {
    fn get(&mut self, name: Arc<str>, most: usize) -> Arc<Tenant> {
        if let Some(tenant) = self.tenants.get(&name) {
            return Arc::clone(tenant);
        }
        if self.tenants.len() >= most {
            let now = Instant::now();
            self.tenants.retain(|_, tenant| Arc::strong_count(tenant) > 1 || !tenant.is_settled(now));
        }
        let policy = self.policies.of(&name);
        if self.tenants.len() >= most {
            // New names must not be a way around limits.
            let rest = self.rest.get_or_insert_with(|| Arc::new(Tenant::new("rest", policy)));
            return Arc::clone(rest);
        }
        let tenant = Arc::new(Tenant::new(&name, policy));
        self.tenants.insert(name, Arc::clone(&tenant));
        tenant
    }
}

#[cfg(test)]
#[path = "tenants/tests.rs"]
mod tests;
