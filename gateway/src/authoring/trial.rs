//! `wasm test`: a component called on this machine, as a gateway would.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use branchline_plugins::{Grantable, PluginOptions, Plugins, Spec};
use branchline_telemetry::Metrics;

use crate::http::dry_run;

pub(super) fn run(component: &Path, sample: Option<&Path>, settings: Option<&str>) -> Result<String, String> {
    let bytes = super::build::read(component)?;
    let sample = sample.map_or_else(|| Ok(b"{}".to_vec()), super::build::read)?;
    let mut settings = super::settings(settings)?;
    settings.entry("name").or_insert_with(|| super::stem(component).into());
    let spec = Spec::default_named(&settings).map_err(|error| error.message)?;
    let runtime = crate::lifecycle::runtime(0).map_err(|error| error.to_string())?;
    let outcome = runtime.block_on(async {
        let options = PluginOptions {
            dir: None,
            upload_dirs: Vec::new(),
            compile_timeout: Duration::from_secs(600),
            grantable: Grantable::everything(),
        };
        let plugins = Plugins::new(options, Arc::new(Metrics::default()))?;
        let (module, _) = plugins.add(spec, bytes).await?;
        dry_run::run(&module.twin(), &sample).await
    });
    runtime.shutdown_background();
    let outcome = outcome.map_err(|error| error.message)?;
    serde_json::to_string_pretty(&outcome).map(|text| text + "\n").map_err(|error| error.to_string())
}
