//! Whose a request is, and how much its owner has used of what it may use a minute.
//!
//! A tenant is the key that came with the request, or what the operator's header says, else everybody without a name.
//! Policies may change while the gateway runs: what a tenant has used stays used.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use branchline_core::{Error, Result};
use http::{HeaderMap, HeaderName};
use parking_lot::Mutex;

use super::KeyHash;
use super::allowance::Allowance;
use super::policies::{Class, Policies, Policy};

/// Tenants remembered at once; those that have nothing under way and owe nothing are forgotten first.
const MOST: usize = 16_384;
/// Longest name that a header may give.
const NAME_BYTES: usize = 256;

#[derive(Debug)]
struct Used {
    policy: Policy,
    own: Allowance,
    /// By the rules of its policy that a model of its requests fell under.
    models: HashMap<Arc<str>, Allowance>,
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
        let own = Allowance::new(policy.limits(), Instant::now());
        let used = Used { policy, own, models: HashMap::new(), position: 0.0 };
        Self { name: name.into(), used: Mutex::new(used) }
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn change(&self, policy: Policy, now: Instant) {
        let mut used = self.used.lock();
        if used.policy == policy {
            return;
        }
        used.own.change(policy.limits(), now);
        used.models.retain(|rule, left| match policy.model_rules.iter().find(|own| own.rule_id == *rule) {
            Some(rule) => {
                left.change(rule.limits(), now);
                true
            }
            None => false,
        });
        used.policy = policy;
    }

    /// Whether it would be no different if it came for the first time; its place in the queue apart.
    fn is_settled(&self, now: Instant) -> bool {
        let mut used = self.used.lock();
        used.own.is_whole(now) && used.models.values_mut().all(|left| left.is_whole(now))
    }

    /// The class it asked for, no higher than it may.
    pub(super) fn class(&self, asked: Option<&str>) -> Class {
        asked.and_then(Class::named).unwrap_or(Class::Default).max(self.used.lock().policy.priority)
    }

    /// Takes one request of about `tokens` from the allowance.
    pub(super) fn take(&self, tokens: f64, now: Instant) -> Result<()> {
        self.used.lock().own.take(tokens, now, "")
    }

    /// Takes the same from what it may use of a model, if a rule limits that; the rule.
    pub(super) fn take_model(&self, model: &str, tokens: f64, now: Instant) -> Result<Option<Arc<str>>> {
        let mut used = self.used.lock();
        let Used { policy, models, .. } = &mut *used;
        let Some(rule) = policy.rule_of(model) else { return Ok(None) };
        let left =
            models.entry(Arc::clone(&rule.rule_id)).or_insert_with(|| Allowance::new(rule.limits(), now));
        left.take(tokens, now, &format!(" for model '{model}'"))?;
        Ok(Some(Arc::clone(&rule.rule_id)))
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
    pub(super) fn forgive(&self, rule: Option<&str>, tokens: f64) {
        let mut used = self.used.lock();
        used.own.forgive(tokens);
        if let Some(left) = rule.and_then(|rule| used.models.get_mut(rule)) {
            left.forgive(tokens);
        }
    }

    /// Work has ended that took `more` tokens (or less, if negative) than it was begun with.
    pub(super) fn settle(&self, rule: Option<&str>, more: f64) {
        let mut used = self.used.lock();
        used.position += more / used.policy.weight;
        used.own.settle(more);
        // A rule that is gone from the file has nothing to settle.
        if let Some(left) = rule.and_then(|rule| used.models.get_mut(rule)) {
            left.settle(more);
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
