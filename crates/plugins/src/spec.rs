//! What an operator says of a module: name, hooks, order, routes, limits, fail mode, grants. Checked here, once.

use branchline_core::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::grants::Grants;

/// Where a module is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hook {
    /// Before a request is routed.
    OnRequest,
    /// With the head (and body, if asked for) of an answer.
    OnResponse,
    /// With each event of a stream.
    OnStreamEvent,
    /// With an answer of status 400 or more.
    OnError,
    /// When a worker is chosen.
    OnRoute,
}

impl Hook {
    /// Every hook.
    pub const ALL: [Self; 5] =
        [Self::OnRequest, Self::OnResponse, Self::OnStreamEvent, Self::OnError, Self::OnRoute];

    /// Name in WIT, JSON and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::OnRequest => "on-request",
            Self::OnResponse => "on-response",
            Self::OnStreamEvent => "on-stream-event",
            Self::OnError => "on-error",
            Self::OnRoute => "on-route",
        }
    }

    /// Reads `on-request` as well as `OnRequest`, the spelling of SGLang's gateway.
    pub fn parse(text: &str) -> Option<Self> {
        let plain = |text: &str| text.replace(['-', '_'], "").to_ascii_lowercase();
        Self::ALL.into_iter().find(|hook| plain(hook.name()) == plain(text))
    }
}

/// What becomes of a request when a module fails on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailMode {
    /// It is refused.
    #[default]
    Closed,
    /// It goes on as if the module were not there.
    Open,
}

/// Bounds of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Wall time, waits for host calls and for a free place included.
    pub time_ms: u64,
    /// Linear memory of an instance, all its memories together.
    pub memory_mib: u32,
    /// Instructions, roughly; 0 for no bound but time.
    pub fuel: u64,
    /// Bytes that a call may hand back.
    pub output_kib: u32,
    /// Calls of the module at once; more wait, within their time.
    pub concurrency: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { time_ms: 1000, memory_mib: 64, fuel: 0, output_kib: 16 << 10, concurrency: 64 }
    }
}

/// Largest memory that a module can be given.
pub(crate) const MEMORY_CAP_MIB: u32 = 512;
/// Most calls of one module at once.
pub(crate) const CONCURRENCY_CAP: u32 = 256;

impl Limits {
    fn check(&self) -> Result<()> {
        let bounds = [
            ("time_ms", self.time_ms, 1, 300_000),
            ("memory_mib", self.memory_mib.into(), 1, MEMORY_CAP_MIB.into()),
            ("output_kib", self.output_kib.into(), 1, 64 << 10),
            ("concurrency", self.concurrency.into(), 1, CONCURRENCY_CAP.into()),
        ];
        for (name, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                let field = format!("limits.{name}");
                let message = format!("`{field}` is {value}; give {least} to {most}");
                return Err(Error::invalid(&field, message));
            }
        }
        Ok(())
    }
}

/// Which requests a module sees; an empty list means all.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Routes {
    /// Methods.
    pub methods: Vec<String>,
    /// Paths; a trailing `*` stands for any rest.
    pub paths: Vec<String>,
    /// Models as the body names them; a trailing `*` stands for any rest. Makes requests wait for their body.
    pub models: Vec<String>,
    /// Values of the header x-tenant-id; a trailing `*` stands for any rest.
    pub tenants: Vec<String>,
}

impl Routes {
    /// Whether method, path and tenant fit; the model is looked at when the body is there.
    pub fn may_match(&self, method: &str, path: &str, tenant: Option<&str>) -> bool {
        let method = self.methods.is_empty() || self.methods.iter().any(|m| m.eq_ignore_ascii_case(method));
        method
            && (self.paths.is_empty() || fits(&self.paths, path))
            && (self.tenants.is_empty() || tenant.is_some_and(|tenant| fits(&self.tenants, tenant)))
    }

    /// Whether the model fits.
    pub fn matches_model(&self, model: Option<&str>) -> bool {
        self.models.is_empty() || model.is_some_and(|model| fits(&self.models, model))
    }
}

fn fits(patterns: &[String], text: &str) -> bool {
    patterns.iter().any(|pattern| match pattern.strip_suffix('*') {
        Some(start) => text.starts_with(start),
        None => pattern == text,
    })
}

/// Everything said of one module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Spec {
    /// `[A-Za-z0-9._-]{1,64}`; unique.
    pub name: String,
    /// Which of the hooks it exports are called; none given means all.
    pub hooks: Vec<Hook>,
    /// Lower ones see a request first; at equal order, the one loaded first. Answers pass in the opposite order.
    pub order: i32,
    /// Which requests it sees.
    pub routes: Routes,
    /// Handed to the module as JSON text.
    pub config: Value,
    /// Bounds of a call.
    pub limits: Limits,
    /// When it fails.
    pub fail: FailMode,
    /// Beyond the usual.
    pub grants: Grants,
    /// Off: loaded, not called.
    pub enabled: bool,
    /// Failures within a minute after which it is taken out (quarantine); 0 for never.
    pub quarantine_after: u32,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            name: String::new(),
            hooks: Vec::new(),
            order: 0,
            routes: Routes::default(),
            config: Value::Null,
            limits: Limits::default(),
            fail: FailMode::default(),
            grants: Grants::default(),
            enabled: true,
            quarantine_after: 20,
        }
    }
}

/// Largest configuration blob.
const CONFIG_CAP: usize = 64 << 10;

impl Spec {
    /// Whether everything said is possible.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field.
    pub fn check(&self) -> Result<()> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if self.name.is_empty() || self.name.len() > 64 || !self.name.bytes().all(plain) {
            let message =
                format!("`name` is {:?}; give 1 to 64 letters, digits, dots, dashes, underscores", self.name);
            return Err(Error::invalid("name", message));
        }
        if self.config_text().len() > CONFIG_CAP {
            return Err(Error::invalid("config", format!("`config` is over {CONFIG_CAP} bytes; shorten it")));
        }
        let lists = [&self.routes.methods, &self.routes.paths, &self.routes.models, &self.routes.tenants];
        if lists.iter().any(|list| list.len() > 64 || list.iter().any(|text| text.len() > 256)) {
            let message =
                "a list of `routes` is over 64 entries or an entry over 256 bytes; use a trailing *";
            return Err(Error::invalid("routes", message));
        }
        self.grants.check()?;
        self.limits.check()
    }

    /// The settings of a new module over the defaults.
    ///
    /// # Errors
    /// `InvalidArgument`, naming what is wrong.
    pub fn default_named(settings: &serde_json::Map<String, Value>) -> Result<Self> {
        if !settings.contains_key("name") {
            return Err(Error::invalid("name", "`name` is missing; give the module one"));
        }
        Self::default().patched(&Value::Object(settings.clone()))
    }

    /// The configuration as modules read it; empty if there is none.
    pub fn config_text(&self) -> String {
        match &self.config {
            Value::Null => String::new(),
            config => config.to_string(),
        }
    }

    /// The spec with the given fields replaced, objects merged field by field.
    ///
    /// # Errors
    /// `InvalidArgument` if a field is unknown or of the wrong form.
    pub fn patched(&self, changes: &Value) -> Result<Self> {
        let mut whole = serde_json::to_value(self)
            .map_err(|error| Error::internal(format!("a spec could not be written: {error}")))?;
        let (Some(whole_map), Some(changes)) = (whole.as_object_mut(), changes.as_object()) else {
            return Err(Error::invalid("body", "the changes are not a JSON object; send one"));
        };
        for (key, change) in changes {
            match (whole_map.get_mut(key), change) {
                (Some(Value::Object(old)), Value::Object(new)) if key != "config" => {
                    old.extend(new.clone());
                }
                _ => {
                    whole_map.insert(key.clone(), change.clone());
                }
            }
        }
        let spec: Self = serde_json::from_value(whole).map_err(|error| {
            Error::invalid("body", format!("the module's settings can't be read: {error}"))
        })?;
        spec.check()?;
        Ok(spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn named() -> Spec {
        Spec { name: "m".to_owned(), ..Spec::default() }
    }

    #[test]
    fn routes_fit_by_method_path_model_and_tenant() {
        let routes = Routes {
            methods: vec!["post".to_owned()],
            paths: vec!["/v1/*".to_owned(), "/generate".to_owned()],
            models: vec!["llama-*".to_owned()],
            tenants: vec!["gold".to_owned()],
        };
        assert!(routes.may_match("POST", "/v1/chat/completions", Some("gold")));
        assert!(routes.may_match("POST", "/generate", Some("gold")));
        assert!(!routes.may_match("POST", "/generates", Some("gold")));
        assert!(!routes.may_match("GET", "/v1/models", Some("gold")));
        assert!(!routes.may_match("POST", "/v1/x", None));
        assert!(routes.matches_model(Some("llama-3")));
        assert!(!routes.matches_model(Some("qwen")) && !routes.matches_model(None));
        assert!(Routes::default().may_match("GET", "/", None) && Routes::default().matches_model(None));
    }

    #[test]
    fn impossible_settings_are_refused_by_name() {
        for (changes, field) in [
            (json!({"name": "a b"}), "name"),
            (json!({"limits": {"memory_mib": 0}}), "limits.memory_mib"),
            (json!({"limits": {"memory_mib": 4096}}), "limits.memory_mib"),
            (json!({"limits": {"time_ms": 0}}), "limits.time_ms"),
            (json!({"limits": {"speed": 1}}), "body"),
            (json!({"fail": "maybe"}), "body"),
            (json!({"hooks": ["on-sunday"]}), "body"),
            (json!({"config": "x".repeat(70_000)}), "config"),
            (json!([]), "body"),
        ] {
            let error = named().patched(&changes).expect_err(field);
            assert_eq!(error.field.as_deref(), Some(field), "{changes}");
        }
    }

    #[test]
    fn a_patch_changes_what_it_names_and_no_more() {
        let spec = named()
            .patched(&json!({"limits": {"time_ms": 5}, "config": {"a": 1}, "fail": "open"}))
            .expect("a good patch");
        assert_eq!((spec.limits.time_ms, spec.limits.memory_mib), (5, 64));
        assert_eq!((spec.config_text().as_str(), spec.fail), (r#"{"a":1}"#, FailMode::Open));
        let replaced = spec.patched(&json!({"config": {"b": 2}})).expect("a good patch");
        assert_eq!(replaced.config_text(), r#"{"b":2}"#);
    }

    #[test]
    fn hooks_are_read_in_both_spellings() {
        assert_eq!(Hook::parse("OnRequest"), Some(Hook::OnRequest));
        assert_eq!(Hook::parse("on-stream-event"), Some(Hook::OnStreamEvent));
        assert_eq!(Hook::parse("OnNothing"), None);
    }
}
