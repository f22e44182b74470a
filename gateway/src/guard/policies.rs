//! What tenants may do, as the operator's file says it. A tenant that it does not name has the default policy.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::{Error, Result};
use serde::Deserialize;

use super::allowance::Limits;
use super::{KeyHash, hash_of};
use crate::config::Secret;

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

    pub(super) fn named(name: &str) -> Option<Self> {
        let names = ["system", "interactive", "default", "bulk"];
        names.iter().position(|known| known.eq_ignore_ascii_case(name)).map(|at| Self::ALL[at])
    }
}

/// Which models a rule is for, by the names that workers have for them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize)]
#[serde(tag = "type", content = "value", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Matcher {
    /// The one of this name.
    Exact(String),
    /// All whose names begin so.
    Prefix(String),
}

impl Matcher {
    /// How closely it names a model; none if it does not. An exact name is closer than any beginning.
    fn closeness(&self, model: &str) -> Option<usize> {
        match self {
            Self::Exact(name) => (name == model).then_some(usize::MAX),
            Self::Prefix(start) => model.starts_with(start).then_some(start.len()),
        }
    }
}

/// What a tenant may use of some models together, beside what it may use at all.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelRule {
    /// Names it over changes of the file.
    #[serde(deserialize_with = "shared")]
    pub rule_id: Arc<str>,
    pub matcher: Matcher,
    pub requests_per_minute: Option<f64>,
    pub tokens_per_minute: Option<f64>,
}

fn shared<'de, D: serde::Deserializer<'de>>(source: D) -> std::result::Result<Arc<str>, D::Error> {
    String::deserialize(source).map(Into::into)
}

impl ModelRule {
    pub(super) fn limits(&self) -> Limits {
        Limits { requests: self.requests_per_minute, tokens: self.tokens_per_minute }
    }
}

/// What a tenant may do.
#[derive(Debug, Clone, PartialEq, Deserialize)]
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
    /// Limits of models, each its own.
    pub model_rules: Vec<ModelRule>,
}

impl Policy {
    /// Limits of all that it does.
    pub(super) fn limits(&self) -> Limits {
        Limits { requests: self.requests_per_minute, tokens: self.tokens_per_minute }
    }

    /// The rule for a model: the one that names it most closely.
    pub(super) fn rule_of(&self, model: &str) -> Option<&ModelRule> {
        let near = self.model_rules.iter().filter_map(|rule| Some((rule.matcher.closeness(model)?, rule)));
        near.max_by_key(|(closeness, _)| *closeness).map(|(_, rule)| rule)
    }

    /// What is wrong with it.
    fn fault(&self) -> Option<&'static str> {
        let own = [Some(self.weight), self.requests_per_minute, self.tokens_per_minute];
        let rules =
            self.model_rules.iter().flat_map(|rule| [rule.requests_per_minute, rule.tokens_per_minute]);
        if !own.into_iter().chain(rules).flatten().all(|limit| limit.is_finite() && limit > 0.0) {
            return Some("weights and limits are above 0; leave a limit out for none");
        }
        let (mut names, mut matchers) = (HashSet::new(), HashSet::new());
        for rule in &self.model_rules {
            let (Matcher::Exact(value) | Matcher::Prefix(value)) = &rule.matcher;
            if rule.rule_id.is_empty() || value.is_empty() {
                return Some("a rule of model_rules has an empty rule_id or matcher.value; give both");
            }
            if !names.insert(&rule.rule_id) || !matchers.insert(&rule.matcher) {
                return Some(
                    "two rules of one model_rules have the same rule_id or matcher; keep one of the two",
                );
            }
        }
        None
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            weight: 1.0,
            requests_per_minute: None,
            tokens_per_minute: None,
            priority: Class::Interactive,
            model_rules: Vec::new(),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    default: Policy,
    tenants: HashMap<String, Policy>,
}

/// The policies of one file.
#[derive(Debug, Default)]
pub(super) struct Policies {
    default: Policy,
    named: HashMap<Arc<str>, Policy>,
}

impl Policies {
    /// Reads TOML, or the same as JSON.
    ///
    /// # Errors
    /// `InvalidArgument` naming the option and what is wrong; keys are not repeated.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let fault = |cause: &dyn std::fmt::Display| {
            let text = format!("tenant_file: {} can't be used: {}", path.display(), cause.to_string().trim());
            Error::invalid("tenant_file", text)
        };
        let text = std::fs::read_to_string(path).map_err(|cause| fault(&cause))?;
        let file: File = match text.trim_start().starts_with('{') {
            true => serde_json::from_str(&text).map_err(|cause| fault(&cause))?,
            // The parser's own text shows lines, and with them keys.
            false => toml::from_str(&text).map_err(|cause: toml::de::Error| fault(&cause.message()))?,
        };
        let mut named = HashMap::with_capacity(file.tenants.len());
        for (name, policy) in file.tenants {
            if named.insert(canonical(&name).map_err(|cause| fault(&cause))?, policy).is_some() {
                return Err(fault(&"a key stands there twice, once as its hash; keep one of the two"));
            }
        }
        if let Some(cause) = named.values().chain([&file.default]).find_map(Policy::fault) {
            return Err(fault(&cause));
        }
        Ok(Self { default: file.default, named })
    }

    /// What a tenant may do.
    pub(super) fn of(&self, name: &str) -> Policy {
        self.named.get(name).unwrap_or(&self.default).clone()
    }
}

/// A tenant of the file as requests name it: `auth:KEY`, `auth:sha256:HEX`, `header:VALUE` or `anonymous`.
fn canonical(name: &str) -> std::result::Result<Arc<str>, String> {
    match name.split_once(':') {
        Some(("auth", key)) if !key.is_empty() => {
            Ok(KeyHash::from(hash_of(&Secret::from(key.to_owned()))?).hex("auth:").into())
        }
        Some(("header", value)) if !value.is_empty() => Ok(name.into()),
        None if name == "anonymous" => Ok(name.into()),
        _ => {
            Err("a tenant's name has none of the forms auth:KEY, auth:sha256:HEX, header:VALUE, anonymous"
                .into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Policies> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tenants");
        std::fs::write(&path, text).expect("written");
        Policies::read(&path)
    }

    #[test]
    fn toml_and_json_say_the_same_and_a_key_may_be_given_as_its_hash() {
        let toml = "[default]\nrequests_per_minute = 5\n[tenants.\"header:a\"]\nweight = 4\n\
                    [tenants.\"auth:one\"]\ntokens_per_minute = 10\npriority = \"bulk\"\n";
        let json = r#"{"default":{"requests_per_minute":5},"tenants":{"header:a":{"weight":4},
            "auth:sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed":
            {"tokens_per_minute":10,"priority":"bulk"}}}"#;
        for text in [toml, json] {
            let policies = read(text).expect("good");
            let one = hash_of(&Secret::from("one".to_owned())).expect("a key");
            let one = policies.of(&KeyHash::from(one).hex("auth:"));
            assert_eq!((one.tokens_per_minute, one.priority, one.weight), (Some(10.0), Class::Bulk, 1.0));
            assert_eq!(policies.of("header:a").weight, 4.0);
            for other in ["header:b", "anonymous", "auth:0"] {
                assert_eq!(policies.of(other).requests_per_minute, Some(5.0), "{other}");
            }
        }
        assert_eq!(read("").expect("empty").of("anonymous"), Policy::default());
    }

    #[test]
    fn the_rule_that_names_a_model_most_closely_is_its_rule() {
        let toml = "[[default.model_rules]]\nrule_id = \"all-a\"\nmatcher = { type = \"prefix\", value = \"a\" }\n\
                    [[default.model_rules]]\nrule_id = \"one\"\nmatcher = { type = \"exact\", value = \"ab-long\" }\n\
                    [[default.model_rules]]\nrule_id = \"ab\"\ntokens_per_minute = 9\nmatcher = { type = \"prefix\", value = \"ab\" }\n";
        let json = r#"{"default":{"model_rules":[
            {"rule_id":"all-a","matcher":{"type":"prefix","value":"a"}},
            {"rule_id":"one","matcher":{"type":"exact","value":"ab-long"}},
            {"rule_id":"ab","matcher":{"type":"prefix","value":"ab"},"tokens_per_minute":9}]}}"#;
        for text in [toml, json] {
            let policy = read(text).expect("good").of("anonymous");
            let rule = |model| policy.rule_of(model).map(|rule| &*rule.rule_id);
            assert_eq!(
                ["ac", "ab", "ab-long", "ab-longer", "b", ""].map(rule),
                [Some("all-a"), Some("ab"), Some("one"), Some("ab"), None, None]
            );
            assert_eq!(policy.rule_of("abc").and_then(|rule| rule.limits().tokens), Some(9.0));
        }
    }

    #[test]
    fn a_bad_file_is_refused_and_its_keys_are_not_repeated() {
        for text in [
            "[default]\nweight = 0",
            "[default]\nweight = nan",
            "[default]\nwait = 1",
            "[default]\npriority = \"urgent\"",
            "[tenants.\"hunter2\"]\n",
            "[tenants.\"auth:\"]\n",
            "[tenants.\"header:\"]\n",
            "[tenants.\"ip:10.0.0.1\"]\n",
            "[tenants.\"auth:sha256:hunter2\"]\n",
            "[tenants.\"auth:hunter2\"]\nweight = \"x\"",
            "[tenants.\"auth:one\"]\n[tenants.\"auth:sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed\"]\n",
            "[tenants.\"auth:hunter2\"]\n[tenants.\"auth:hunter2\"]\n",
            "[[default.model_rules]]\nrule_id = \"a\"\nmatcher = { type = \"glob\", value = \"x\" }",
            "[[default.model_rules]]\nmatcher = { type = \"exact\", value = \"x\" }",
            "[[default.model_rules]]\nrule_id = \"a\"\nmatcher = { type = \"exact\", value = \"\" }",
            "[[default.model_rules]]\nrule_id = \"a\"\ntokens_per_minute = 0\nmatcher = { type = \"exact\", value = \"x\" }",
            "[[default.model_rules]]\nrule_id = \"a\"\nmatcher = { type = \"exact\", value = \"x\" }\n\
             [[default.model_rules]]\nrule_id = \"b\"\nmatcher = { type = \"exact\", value = \"x\" }",
            "[[default.model_rules]]\nrule_id = \"a\"\nmatcher = { type = \"exact\", value = \"x\" }\n\
             [[default.model_rules]]\nrule_id = \"a\"\nmatcher = { type = \"prefix\", value = \"x\" }",
            "{\"default\": {\"requests_per_minute\": -1}}",
            "{\"default\": ",
        ] {
            let error = read(text).expect_err(text);
            assert_eq!(error.field.as_deref(), Some("tenant_file"), "{error}");
            assert!(!error.message.contains("hunter2"), "{error}");
        }
        let absent = Policies::read(Path::new("/nowhere/tenants.toml")).expect_err("no file");
        assert!(absent.message.contains("/nowhere/tenants.toml"), "{absent}");
    }
}
