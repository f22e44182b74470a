//! What an operator says of a worker: the body of `POST /workers`, a row of the worker file, an entry of the state
//! file. Names and defaults are those that users of SGLang's gateway and its descendants write.

use std::collections::BTreeMap;

use branchline_core::{Error, ErrorCode, Result, Role};
use serde::{Deserialize, Serialize};

/// A model that a worker serves, as an operator names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ModelName {
    /// Its id.
    Id(String),
    /// Its id and further names.
    Card(ModelCard),
}

/// A model with its further names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelCard {
    /// The name that the worker itself knows.
    pub id: String,
    /// Names that clients may use for it.
    #[serde(default)]
    pub aliases: Vec<String>,
}

/// A worker as registered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerSpec {
    /// `grpc://host:port`, `http://host:port`, or `host:port` to find out which.
    pub url: String,
    /// The one model, as older clients say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_id: Option<String>,
    /// Models that it serves; empty for what it says itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelName>,
    /// `regular`, `prefill`, `decode`, or `both` for either half; see [`Role`].
    pub worker_type: String,
    /// Port of a prefill worker's bootstrap server, for SGLang's kind of hand-over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootstrap_port: Option<u16>,
    /// Only workers of one group are paired; those without a group are one of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Data-parallel ranks of a prefill worker; 1 for none.
    #[serde(skip_serializing_if = "is_one")]
    pub dp_size: u32,
    /// How a vLLM worker hands its pages over: `nixl` or `mooncake`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_connector: Option<String>,
    /// What a vLLM worker's connector calls itself; only Mooncake's needs it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_engine_id: Option<String>,
    /// `grpc` or `http`; absent for what the URL says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection_mode: Option<String>,
    /// What runs there; absent to find out.
    #[serde(skip_serializing_if = "Option::is_none", alias = "runtime")]
    pub runtime_type: Option<String>,
    /// Free words of the operator.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Workers of the highest priority that are well get all requests.
    pub priority: i64,
    /// How dear its time is; policies that weigh costs multiply by it.
    pub cost: f64,
    /// Token sent to this worker instead of `--worker-token`. Never shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api_key: Option<String>,
    /// Whether it gets no new requests, while its running ones go on.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
    /// Who named it, for those who look at the fleet. Never given nor kept: whoever reads a source says it.
    #[serde(skip)]
    pub source: Source,
}

/// Who named a worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Source {
    /// A request to `/workers`, now or before a restart.
    #[default]
    Http,
    /// `--worker-urls`.
    Options,
    /// `--worker-file`.
    File,
    /// `--worker-dns`.
    Dns,
    /// A pod: its namespace, name and uid.
    Kubernetes(String, String, String),
}

impl Source {
    /// The word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Options => "options",
            Self::File => "file",
            Self::Dns => "dns",
            Self::Kubernetes(..) => "kubernetes",
        }
    }
}

impl Default for WorkerSpec {
    fn default() -> Self {
        Self {
            url: String::new(),
            model_id: None,
            models: Vec::new(),
            worker_type: "regular".to_owned(),
            bootstrap_port: None,
            group: None,
            dp_size: 1,
            kv_connector: None,
            kv_engine_id: None,
            connection_mode: None,
            runtime_type: None,
            labels: BTreeMap::new(),
            priority: 50,
            cost: 1.0,
            api_key: None,
            draining: false,
            source: Source::default(),
        }
    }
}

/// What may be changed of a registered worker; absent fields stay.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerPatch {
    /// See [`WorkerSpec::priority`].
    pub priority: Option<i64>,
    /// See [`WorkerSpec::cost`].
    pub cost: Option<f64>,
    /// Replaces all labels.
    pub labels: Option<BTreeMap<String, String>>,
    /// See [`WorkerSpec::api_key`].
    pub api_key: Option<String>,
    /// See [`WorkerSpec::draining`].
    pub draining: Option<bool>,
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

/// How vLLM workers can hand pages over.
const CONNECTORS: [&str; 2] = ["nixl", "mooncake"];

/// Kinds of server that can be named or found out.
pub const RUNTIMES: [&str; 5] = ["branchline", "sglang", "vllm", "llamacpp", "openai"];

impl WorkerSpec {
    /// The worker at `url`, all else by default.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), ..Self::default() }
    }

    /// What the operator says it is there for.
    pub fn role(&self) -> Role {
        Role::of(&self.worker_type)
    }

    /// Ids of the models that the operator names; empty if none.
    pub fn model_ids(&self) -> Vec<String> {
        let ids = self.models.iter().map(|model| match model {
            ModelName::Id(id) => id.clone(),
            ModelName::Card(card) => card.id.clone(),
        });
        let mut names: Vec<String> = self.model_id.iter().cloned().chain(ids).collect();
        let mut seen = std::collections::HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        names
    }

    /// Further name → the worker's own.
    pub fn aliases(&self) -> impl Iterator<Item = (&str, &str)> {
        let cards = self.models.iter().filter_map(|model| match model {
            ModelName::Id(_) => None,
            ModelName::Card(card) => Some(card),
        });
        cards.flat_map(|card| card.aliases.iter().map(|alias| (alias.as_str(), card.id.as_str())))
    }

    /// The URL with its scheme, if there is one.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unimplemented` naming the field that can't be.
    pub fn check(&self) -> Result<()> {
        let refuse = |field: &str, text: String| Err(Error::invalid(field, text));
        match self.worker_type.as_str() {
            "regular" | "prefill" | "decode" | "both" => {}
            "encode" => {
                let text = "worker_type 'encode' is not implemented; give regular, prefill, decode or both";
                return Err(Error::new(ErrorCode::Unimplemented, text).with_field("worker_type"));
            }
            other => {
                let text =
                    format!("worker_type '{other}' does not exist; give regular, prefill, decode or both");
                return refuse("worker_type", text);
            }
        }
        if self.bootstrap_port == Some(0) {
            return refuse(
                "bootstrap_port",
                "bootstrap_port is 0; give the port, or leave it out".to_owned(),
            );
        }
        if !(1..=1024).contains(&self.dp_size) {
            return refuse("dp_size", format!("dp_size is {}; give a number from 1 to 1024", self.dp_size));
        }
        if let Some(name) = &self.kv_connector
            && !CONNECTORS.contains(&name.as_str())
        {
            let text = format!("kv_connector '{name}' does not exist; give {}", CONNECTORS.join(" or "));
            return refuse("kv_connector", text);
        }
        if let Some(mode) = &self.connection_mode
            && !matches!(mode.as_str(), "grpc" | "http")
        {
            return refuse(
                "connection_mode",
                format!("connection_mode '{mode}' does not exist; give grpc or http"),
            );
        }
        if let Some(kind) = &self.runtime_type
            && !RUNTIMES.contains(&kind.as_str())
        {
            let text = format!("runtime_type '{kind}' does not exist; give one of {}", RUNTIMES.join(", "));
            return refuse("runtime_type", text);
        }
        if !(self.cost.is_finite() && self.cost > 0.0) {
            return refuse("cost", format!("cost is {}; give a number above 0", self.cost));
        }
        if self.model_ids().iter().any(String::is_empty) {
            return refuse("models", "models holds an empty name; give the model's id".to_owned());
        }
        if self.api_key.as_ref().is_some_and(|key| !key.bytes().all(|byte| byte.is_ascii_graphic())) {
            let text = "api_key holds a blank or a character outside ASCII; a header can't carry it";
            return refuse("api_key", text.to_owned());
        }
        Ok(())
    }

    /// The changed specification.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn patched(&self, patch: &WorkerPatch) -> Result<Self> {
        let new = Self {
            priority: patch.priority.unwrap_or(self.priority),
            cost: patch.cost.unwrap_or(self.cost),
            labels: patch.labels.clone().unwrap_or_else(|| self.labels.clone()),
            api_key: patch.api_key.clone().or_else(|| self.api_key.clone()),
            draining: patch.draining.unwrap_or(self.draining),
            ..self.clone()
        };
        new.check().map(|()| new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> WorkerSpec {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_url_alone_takes_the_defaults_of_the_field() {
        let spec = read(r#"{"url":"http://a:1"}"#);
        assert_eq!((spec.priority, spec.cost, spec.worker_type.as_str()), (50, 1.0, "regular"));
        assert_eq!(spec, WorkerSpec::new("http://a:1"));
        assert_eq!(spec.check(), Ok(()));
        assert!(spec.model_ids().is_empty());
    }

    #[test]
    fn models_are_names_or_cards_with_aliases() {
        let spec = read(r#"{"url":"a:1","model_id":"m","models":["m",{"id":"n","aliases":["x","y"]}]}"#);
        assert_eq!(spec.model_ids(), ["m", "n"]);
        assert_eq!(spec.aliases().collect::<Vec<_>>(), [("x", "n"), ("y", "n")]);
        assert_eq!(read(&serde_json::to_string(&spec).unwrap()), spec);
    }

    #[test]
    fn what_cannot_be_is_refused_by_its_name() {
        for (text, field) in [
            (r#"{"worker_type":"encode"}"#, "worker_type"),
            (r#"{"bootstrap_port":0}"#, "bootstrap_port"),
            (r#"{"dp_size":0}"#, "dp_size"),
            (r#"{"kv_connector":"telepathy"}"#, "kv_connector"),
            (r#"{"worker_type":"fast"}"#, "worker_type"),
            (r#"{"connection_mode":"carrier pigeon"}"#, "connection_mode"),
            (r#"{"runtime_type":"trt"}"#, "runtime_type"),
            (r#"{"cost":0}"#, "cost"),
            (r#"{"cost":-1}"#, "cost"),
            (r#"{"models":[""]}"#, "models"),
            (r#"{"api_key":"a b"}"#, "api_key"),
        ] {
            assert_eq!(read(text).check().unwrap_err().field.as_deref(), Some(field), "{text}");
        }
        let unknown = serde_json::from_str::<WorkerSpec>(r#"{"url":"a","colour":"red"}"#).unwrap_err();
        assert!(unknown.to_string().contains("colour"), "{unknown}");
    }

    #[test]
    fn a_patch_changes_what_it_names() {
        let spec = read(r#"{"url":"a:1","api_key":"k","labels":{"a":"b"}}"#);
        let patch: WorkerPatch = serde_json::from_str(r#"{"priority":7,"labels":{}}"#).unwrap();
        let new = spec.patched(&patch).unwrap();
        assert_eq!((new.priority, new.labels.len(), new.api_key.as_deref()), (7, 0, Some("k")));
        let bad: WorkerPatch = serde_json::from_str(r#"{"cost":0}"#).unwrap();
        assert!(spec.patched(&bad).is_err());
    }
}
