//! Whose a request is, what its owner may use a minute, and how much of it has been used.
//!
//! A tenant is the key that came with the request, or what the operator's header says, else everybody without a name.
//! Policies come from one file; a tenant it does not name has the default one.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use branchline_core::{Error, ErrorCode, Result};
use http::{HeaderMap, HeaderName};
use parking_lot::Mutex;
use serde::Deserialize;

use super::{KeyHash, hash_of};
use crate::config::Secret;

/// Tenants remembered at once; those that are idle are forgotten first.
const MOST: usize = 16_384;
/// Longest name that a header may give.
const NAME_BYTES: usize = 256;
const MINUTE: f64 = 60.0;
/// Longest wait that anybody is told.
const LONGEST: Duration = Duration::from_secs(3600);

/// How urgent a request is; the first is served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Class {
    /// Of those who run the fleet.
    System,
    /// Somebody watches the answer appear.
    Interactive,
    /// Whatever says nothing.
    Default,
    /// Whatever can wait.
    Bulk,
}

impl Class {
    pub(super) const ALL: [Self; 4] = [Self::System, Self::Interactive, Self::Default, Self::Bulk];

    /// How long one may wait before it goes first whatever its class.
    pub(super) fn patience(self) -> Duration {
        Duration::from_secs(match self {
            Self::System | Self::Interactive => 5,
            Self::Default => 30,
            Self::Bulk => 120,
        })
    }

    fn named(name: &str) -> Option<Self> {
        let names = ["system", "interactive", "default", "bulk"];
        names.iter().position(|known| known.eq_ignore_ascii_case(name)).map(|at| Self::ALL[at])
    }
}

/// What a tenant may do.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Policy {
    /// Its share where tenants compete, beside theirs.
    pub weight: f64,
    /// Requests that it may begin a minute.
    pub requests_per_minute: Option<f64>,
    /// Prompt and output tokens that it may use a minute.
    pub tokens_per_minute: Option<f64>,
    /// The most urgent class that it may ask for.
    pub priority: Class,
}

impl Default for Policy {
    fn default() -> Self {
        Self { weight: 1.0, requests_per_minute: None, tokens_per_minute: None, priority: Class::Interactive }
    }
}

/// What is left of a minute's allowance; may be owed.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    level: f64,
    rate: f64,
    at: Instant,
}

impl Bucket {
    fn new(a_minute: f64, now: Instant) -> Self {
        Self { level: a_minute, rate: a_minute / MINUTE, at: now }
    }

    fn fill(&mut self, now: Instant) {
        let gained = now.saturating_duration_since(self.at).as_secs_f64() * self.rate;
        self.level = (self.level + gained).min(self.rate * MINUTE);
        self.at = now;
    }

    /// How long until `amount` is there.
    fn wait(&self, amount: f64) -> Option<Duration> {
        let wait = || Duration::try_from_secs_f64((amount - self.level) / self.rate).unwrap_or(LONGEST);
        (self.level < amount).then(|| wait().min(LONGEST))
    }
}

#[derive(Debug)]
struct Used {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    /// Virtual time up to which it has had its share.
    position: f64,
}

/// One tenant.
#[derive(Debug)]
pub(super) struct Tenant {
    name: Arc<str>,
    policy: Policy,
    used: Mutex<Used>,
}

impl Tenant {
    pub(super) fn new(name: &str, policy: Policy) -> Self {
        let now = Instant::now();
        let bucket = |limit: Option<f64>| limit.map(|limit| Bucket::new(limit, now));
        let (requests, tokens) = (bucket(policy.requests_per_minute), bucket(policy.tokens_per_minute));
        Self { name: name.into(), policy, used: Mutex::new(Used { requests, tokens, position: 0.0 }) }
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The class it asked for, no higher than it may.
    pub(super) fn class(&self, asked: Option<&str>) -> Class {
        asked.and_then(Class::named).unwrap_or(Class::Default).max(self.policy.priority)
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
        if let Some(wait) = requests.and_then(|bucket| bucket.wait(1.0)) {
            return Err(refuse("requests", self.policy.requests_per_minute.unwrap_or_default(), wait));
        }
        // What is larger than a minute's allowance may begin when all of it is there.
        let least = self.policy.tokens_per_minute.map_or(0.0, |limit| tokens.min(limit));
        if let Some(wait) = allowed.and_then(|bucket| bucket.wait(least)) {
            return Err(refuse("tokens", self.policy.tokens_per_minute.unwrap_or_default(), wait));
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
        used.position = start + cost / self.policy.weight;
        start
    }

    /// Takes back a request of about `tokens` that nothing was done for.
    pub(super) fn forgive(&self, tokens: f64) {
        let mut used = self.used.lock();
        let Used { requests, tokens: allowed, .. } = &mut *used;
        for (bucket, amount) in
            requests.iter_mut().map(|one| (one, 1.0)).chain(allowed.iter_mut().map(|one| (one, tokens)))
        {
            bucket.level = (bucket.level + amount).min(bucket.rate * MINUTE);
        }
    }

    /// Work has ended that took `more` tokens (or less, if negative) than it was begun with.
    pub(super) fn settle(&self, more: f64) {
        let mut used = self.used.lock();
        used.position += more / self.policy.weight;
        if let Some(bucket) = &mut used.tokens {
            bucket.level = (bucket.level - more).min(bucket.rate * MINUTE);
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    default: Policy,
    tenants: HashMap<String, Policy>,
}

/// All tenants.
#[derive(Debug, Default)]
pub(super) struct Tenants {
    header: Option<HeaderName>,
    default: Policy,
    named: HashMap<Arc<str>, Policy>,
    known: Mutex<HashMap<Arc<str>, Arc<Tenant>>>,
}

impl Tenants {
    /// The policies of `file` (TOML, or JSON), and the header that names tenants, if any may.
    ///
    /// # Errors
    /// `InvalidArgument` naming the option and what is wrong.
    pub(super) fn load(file: Option<&Path>, header: Option<&str>) -> Result<Self> {
        let header = header.map(|name| {
            name.parse::<HeaderName>().map_err(|_| {
                Error::invalid("tenant_header", format!("tenant_header: '{name}' is no name of a header"))
            })
        });
        let read = file.map_or_else(|| Ok(File::default()), read)?;
        let named =
            read.tenants.into_iter().map(|(name, policy)| canonical(&name).map(|name| (name, policy)));
        let fault = |cause: String| Error::invalid("tenant_file", format!("tenant_file: {cause}"));
        let named = named.collect::<std::result::Result<HashMap<_, _>, String>>().map_err(fault)?;
        for policy in named.values().chain([&read.default]) {
            let positive = |limit: f64| limit.is_finite() && limit > 0.0;
            let limits = [Some(policy.weight), policy.requests_per_minute, policy.tokens_per_minute];
            if !limits.into_iter().flatten().all(positive) {
                return Err(fault("weights and limits are above 0; leave a limit out for none".to_owned()));
            }
        }
        Ok(Self { header: header.transpose()?, default: read.default, named, known: Mutex::default() })
    }

    /// Whether anything is limited or weighed by tenant.
    pub(super) fn limits(&self) -> bool {
        let limited =
            |policy: &Policy| policy.requests_per_minute.is_some() || policy.tokens_per_minute.is_some();
        limited(&self.default) || self.named.values().any(limited)
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
        let mut known = self.known.lock();
        if let Some(tenant) = known.get(&name) {
            return Arc::clone(tenant);
        }
        if known.len() >= MOST {
            // Whoever has nothing under way and owes nothing is as good as new.
            known.retain(|_, tenant| Arc::strong_count(tenant) > 1);
        }
        let policy = self.named.get(&name).copied().unwrap_or(self.default);
        let tenant = Arc::new(Tenant::new(&name, policy));
        if known.len() < MOST {
            known.insert(name, Arc::clone(&tenant));
        }
        tenant
    }
}

/// A tenant of the file as requests name it: `auth:KEY`, `auth:sha256:HEX`, `header:VALUE` or `anonymous`.
fn canonical(name: &str) -> std::result::Result<Arc<str>, String> {
    match name.split_once(':') {
        Some(("auth", key)) => Ok(KeyHash::from(hash_of(&Secret::from(key.to_owned()))?).hex("auth:").into()),
        Some(("header", value)) if !value.is_empty() => Ok(name.into()),
        None if name == "anonymous" => Ok(name.into()),
        _ => {
            Err("a tenant has a name of none of the forms auth:KEY, auth:sha256:HEX, header:VALUE, anonymous"
                .into())
        }
    }
}

fn read(path: &Path) -> Result<File> {
    let fault = |cause: &dyn std::fmt::Display| {
        let cause = cause.to_string();
        Error::invalid(
            "tenant_file",
            format!("tenant_file: {} can't be used: {}", path.display(), cause.trim()),
        )
    };
    let text = std::fs::read_to_string(path).map_err(|cause| fault(&cause))?;
    match text.trim_start().starts_with('{') {
        true => serde_json::from_str(&text).map_err(|cause| fault(&cause)),
        // The parser's own text shows lines, and with them keys.
        false => toml::from_str(&text).map_err(|cause: toml::de::Error| fault(&cause.message())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn load(text: &str) -> Result<Tenants> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tenants");
        std::fs::write(&path, text).expect("written");
        Tenants::load(Some(&path), Some("x-team"))
    }

    fn headers(team: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(HeaderName::from_static("x-team"), team.parse().expect("a header"))])
    }

    #[test]
    fn a_tenant_is_told_by_header_then_key_and_policies_are_found_in_toml_and_json() {
        let toml = "[default]\nrequests_per_minute = 5\n[tenants.\"header:a\"]\nweight = 4\n\
                    [tenants.\"auth:one\"]\ntokens_per_minute = 10\npriority = \"bulk\"\n";
        let json = r#"{"default":{"requests_per_minute":5},"tenants":{"header:a":{"weight":4},
            "auth:sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed":
            {"tokens_per_minute":10,"priority":"bulk"}}}"#;
        for text in [toml, json] {
            let tenants = load(text).expect("good");
            let one = hash_of(&Secret::from("one".to_owned())).expect("a key");
            let one = tenants.of(Some(KeyHash::from(one)), &HeaderMap::new());
            assert_eq!((one.policy.tokens_per_minute, one.policy.priority), (Some(10.0), Class::Bulk));
            let a = tenants.of(None, &headers("a"));
            assert_eq!((a.policy.weight, &**a.name()), (4.0, "header:a"));
            let other = tenants.of(None, &headers("b"));
            assert_eq!(other.policy.requests_per_minute, Some(5.0));
            assert_eq!(&**tenants.of(None, &HeaderMap::new()).name(), "anonymous");
            assert!(Arc::ptr_eq(&a, &tenants.of(None, &headers("a"))), "it is remembered");
        }
    }

    #[test]
    fn a_bad_file_is_refused_and_its_keys_are_not_repeated() {
        for text in [
            "[default]\nweight = 0",
            "[default]\nwait = 1",
            "[tenants.\"hunter2\"]\n",
            "[tenants.\"auth:sha256:hunter2\"]\n",
            "[tenants.\"auth:hunter2\"]\nweight = \"x\"",
            "{\"default\": {\"requests_per_minute\": -1}}",
        ] {
            let error = load(text).expect_err(text);
            assert_eq!(error.field.as_deref(), Some("tenant_file"), "{error}");
            assert!(!error.message.contains("hunter2"), "{error}");
        }
        assert_eq!(
            Tenants::load(None, Some("a b")).expect_err("no name").field.as_deref(),
            Some("tenant_header")
        );
    }

    #[test]
    fn allowances_fill_by_the_minute_and_say_when_to_come_back() {
        let policy =
            Policy { requests_per_minute: Some(6.0), tokens_per_minute: Some(60.0), ..Policy::default() };
        let (tenant, now) = (Tenant::new("t", policy), Instant::now());
        for _ in 0..6 {
            tenant.take(1.0, now).expect("six requests");
        }
        let error = tenant.take(1.0, now).expect_err("a seventh");
        assert!(error.message.contains("requests a minute"), "{error}");
        assert!((9.0..=10.0).contains(&error.retry_after.expect("a wait").as_secs_f64()), "{error:?}");
        tenant.take(1.0, now + 11 * SECOND).expect("one has come back");
        tenant.settle(100.0);
        let error = tenant.take(1.0, now + 30 * SECOND).expect_err("tokens are owed");
        assert!(error.message.contains("tokens a minute"), "{error}");
        let wait = error.retry_after.expect("a wait");
        assert!(tenant.take(1.0, now + 30 * SECOND + wait + SECOND).is_ok(), "the wait is long enough");
        assert!(tenant.take(1000.0, now + 600 * SECOND).is_ok(), "a huge one begins when all is there");
        tenant.settle(-1000.0);
        assert!(tenant.take(60.0, now + 600 * SECOND).is_ok(), "what was not used comes back");
    }

    #[test]
    fn nobody_gets_a_higher_class_than_he_may() {
        let tenant = Tenant::new("t", Policy { priority: Class::Default, ..Policy::default() });
        for (asked, class) in [
            (Some("interactive"), Class::Default),
            (Some("system"), Class::Default),
            (Some("BULK"), Class::Bulk),
            (Some("urgent"), Class::Default),
            (None, Class::Default),
        ] {
            assert_eq!(tenant.class(asked), class, "{asked:?}");
        }
    }
}
