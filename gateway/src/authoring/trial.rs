//! `wasm test`: a component called on this machine, as a gateway would.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use branchline_core::Error;
use branchline_plugins::{Grantable, PluginOptions, Plugins, Spec};
use branchline_telemetry::Metrics;

use crate::http::dry_run;

/// Calls the component with each sample in turn; a call's store is left to the next.
pub(super) fn run(component: &Path, samples: &[PathBuf], settings: Option<&str>) -> Result<String, String> {
    let bytes = super::build::read(component)?;
    let mut given = samples.iter().map(|path| super::build::read(path)).collect::<Result<Vec<_>, _>>()?;
    if given.is_empty() {
        given.push(b"{}".to_vec());
    }
    let mut settings = super::settings(settings)?;
    settings.entry("name").or_insert_with(|| super::stem(component).into());
    let spec = Spec::default_named(&settings).map_err(|error| error.message)?;
    let runtime = crate::lifecycle::runtime(0).map_err(|error| error.to_string())?;
    let outcomes = runtime.block_on(async {
        let options = PluginOptions {
            dir: None,
            upload_dirs: Vec::new(),
            compile_timeout: Duration::from_secs(600),
            grantable: Grantable::everything(),
            trusted: Vec::new(),
        };
        let plugins = Plugins::new(options, Arc::new(Metrics::default()))?;
        let (module, _) = plugins.add(spec, bytes).await?;
        let twin = module.twin();
        let (mut outcomes, mut line) = (Vec::new(), 0);
        for sample in &given {
            let outcome = dry_run::run(&twin, sample, line).await?;
            line = twin.lines(0).last().map_or(line, |last| last.number);
            outcomes.push(outcome);
        }
        Ok(outcomes)
    });
    runtime.shutdown_background();
    let outcomes = outcomes.map_err(|error: Error| error.message)?;
    let shown = outcomes.iter().map(serde_json::to_string_pretty).collect::<Result<Vec<_>, _>>();
    shown.map(|texts| texts.join("\n") + "\n").map_err(|error| error.to_string())
}
