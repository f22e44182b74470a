//! A registry of modules without a gateway, for the tests of this folder.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part")]

pub mod guests;
pub mod wasi_guests;

use std::sync::Arc;
use std::time::Duration;

use branchline_plugins::{Grantable, Header, Module, PluginOptions, Plugins, RequestView, Spec};
use branchline_telemetry::Metrics;
use serde_json::{Value, json};

/// A registry, with its metrics.
pub struct Kit {
    pub plugins: Arc<Plugins>,
    pub metrics: Arc<Metrics>,
}

impl Kit {
    pub fn new() -> Self {
        Self::kept_in(None)
    }

    pub fn kept_in(dir: Option<&std::path::Path>) -> Self {
        Self::granting(dir, Grantable::default())
    }

    pub fn granting(dir: Option<&std::path::Path>, grantable: Grantable) -> Self {
        Self::with(PluginOptions { dir: dir.map(Into::into), grantable, ..Self::options() })
    }

    pub fn options() -> PluginOptions {
        PluginOptions {
            dir: None,
            upload_dirs: Vec::new(),
            compile_timeout: Duration::from_secs(300),
            grantable: Grantable::default(),
            trusted: Vec::new(),
        }
    }

    pub fn with(options: PluginOptions) -> Self {
        let metrics = Arc::new(Metrics::default());
        Self { plugins: Plugins::new(options, Arc::clone(&metrics)).expect("a registry"), metrics }
    }

    /// Loads a module with these settings beside its name.
    pub async fn load(&self, name: &str, settings: Value, bytes: Vec<u8>) -> Arc<Module> {
        let spec = spec(name, &settings);
        self.plugins.add(spec, bytes).await.unwrap_or_else(|error| panic!("{name}: {error}")).0
    }

    /// How often calls of a module ended so.
    pub fn count(&self, module: &str, outcome: &str) -> u64 {
        let wanted = [format!("module=\"{module}\""), format!("outcome=\"{outcome}\"")];
        let text = self.metrics.encode();
        let lines = text.lines().filter(|line| line.starts_with("branchline_router_wasm_calls_total"));
        lines
            .filter(|line| wanted.iter().all(|label| line.contains(label)))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum()
    }
}

pub fn spec(name: &str, settings: &Value) -> Spec {
    let mut whole = json!({"name": name});
    let (Some(whole), Some(settings)) = (whole.as_object_mut(), settings.as_object()) else {
        panic!("settings are an object")
    };
    whole.extend(settings.clone());
    Spec::default_named(whole).expect("good settings")
}

pub fn request() -> RequestView {
    RequestView {
        id: "r1".to_owned(),
        method: "POST".to_owned(),
        path: "/v1/chat/completions".to_owned(),
        headers: vec![Header::new("content-type", "application/json"), Header::new("x-user", "u1")],
        ..RequestView::default()
    }
}
