//! Options: one table, four layers, every fault reported at once before any port opens.
//!
//! The only part of the gateway that sees the command line, the environment or the options file. What
//! it hands out is frozen.

mod cluster;
mod flags;
mod layers;
mod parser;
mod policy;
mod reference;
mod table;
#[cfg(test)]
mod tests;
mod value;
mod wasm;

use std::path::Path;

pub(crate) use cluster::plan;
pub use cluster::{Labels, ModelIdFrom, WorkerProtocol};
pub use layers::{Fault, Layers};
pub use parser::{ReasoningParserChoice, ToolParserChoice};
pub use policy::{ModelAlias, ModelPolicy, policy_names};
pub use reference::{PAGES, render};
pub use table::{Options, Row, TABLE};
pub use value::{Fraction, Names, Secret, Shape, Size, Value};

use branchline_telemetry::traces_url;

use crate::guard;

/// What a command line leads to.
#[allow(clippy::large_enum_variant, reason = "made once a process")]
pub enum Outcome {
    /// Serve with these.
    Serve(Options),
    /// Print to standard output (code 0) or standard error, and leave with the code.
    Exit {
        /// What to print.
        text: String,
        /// The exit code.
        code: u8,
    },
}

/// Resolves command line (without the program's name), environment and file.
pub fn resolve(arguments: &[String], environment: impl Iterator<Item = (String, String)>) -> Outcome {
    let mut flag_layer = Layers::default();
    let config = match flags::read_flags(arguments, &mut flag_layer) {
        flags::Invocation::Print { text, code } => return Outcome::Exit { text, code },
        flags::Invocation::Reference(page) => {
            let text = render(&page).unwrap_or_default();
            return Outcome::Exit { text, code: 0 };
        }
        flags::Invocation::Serve { config } => config,
    };
    match stack(flag_layer, config.as_deref(), environment) {
        Ok(options) => Outcome::Serve(options),
        Err(faults) => Outcome::Exit { text: report(&faults), code: 2 },
    }
}

/// Resolves arguments given as name and texts (the Python facade) over environment and file.
///
/// # Errors
/// All faults.
pub fn resolve_arguments(
    arguments: Vec<(String, Vec<String>)>,
    config: Option<&Path>,
    environment: impl Iterator<Item = (String, String)>,
) -> Result<Options, Vec<Fault>> {
    let mut layers = Layers::default();
    for (name, texts) in arguments {
        let place = name.clone();
        layers.put(&name, place, texts);
    }
    stack(layers, config, environment)
}

fn stack(
    top: Layers,
    config: Option<&Path>,
    environment: impl Iterator<Item = (String, String)>,
) -> Result<Options, Vec<Fault>> {
    let mut layers = Layers::default();
    if let Some(path) = config {
        layers.put_file(path);
    }
    layers.put_env(environment);
    layers.overlay(top);
    let mut faults = layers.take_faults();
    match Options::read(&layers) {
        Ok(options) => {
            faults.extend(check(&options, &layers));
            if faults.is_empty() { Ok(options) } else { Err(faults) }
        }
        Err(unread) => {
            faults.extend(unread);
            Err(faults)
        }
    }
}

/// What no single option can tell: files behind options, and pairs that contradict each other.
fn check(options: &Options, layers: &Layers) -> Vec<Fault> {
    let mut faults = Vec::new();
    let file = options.api_key_file.as_deref().map(guard::KeyFile::load).transpose();
    // A key file that can't be read has its own fault already.
    let has_admin = file.as_ref().map_or(true, |file| file.as_ref().is_some_and(guard::KeyFile::has_admin));
    if let Err(message) = file {
        faults.push(Fault::new(layers.place("api_key_file"), message));
    }
    for (field, keys) in [("api_key", &options.api_key), ("user_api_key", &options.user_api_key)] {
        if let Some(message) = keys.iter().find_map(|key| guard::hash_of(key).err()) {
            faults.push(Fault::new(layers.place(field), message));
        }
    }
    for url in &options.worker_urls {
        if let Err(error) = check_worker_url(url) {
            faults.push(Fault::new(layers.place("worker_urls"), error));
        }
    }
    if let Err(message) = guard::check_exposure(options) {
        faults.push(Fault::new(layers.place("host"), message));
    }
    if let Err(message) = guard::check_admin_exposure(options, has_admin) {
        faults.push(Fault::new(layers.place("admin_host"), message));
    }
    if options.admin_port.is_some_and(|port| port != 0 && port == options.port) {
        let message = format!("{} is the main port too; give another or leave it out", options.port);
        faults.push(Fault::new(layers.place("admin_port"), message));
    }
    faults.extend(check_pairs(options, layers));
    faults.extend(cluster::check(options, layers));
    if options.prometheus_port.is_some_and(|port| port != 0 && port == options.port) {
        let message = format!("{} is the main port too; give another or leave it out", options.port);
        faults.push(Fault::new(layers.place("prometheus_port"), message));
    }
    if let Some(endpoint) = &options.otlp_endpoint
        && let Err(error) = traces_url(endpoint)
    {
        faults.push(Fault::new(layers.place("otlp_endpoint"), error.message));
    }
    if options.max_connections == 0 {
        faults.push(Fault::new(layers.place("max_connections"), "0 would serve nobody; give at least 1"));
    }
    faults
}

/// Files of TLS that say nothing without each other.
fn check_pairs(options: &Options, layers: &Layers) -> Vec<Fault> {
    let pair = |(cert, key): (&'static str, &'static str), given: (bool, bool)| {
        let (there, missing) = match given {
            (true, false) => (cert, key),
            (false, true) => (key, cert),
            _ => return None,
        };
        let message = format!("says nothing without --{}; give both", missing.replace('_', "-"));
        Some(Fault::new(layers.place(there), message))
    };
    let served = (options.tls_cert_path.is_some(), options.tls_key_path.is_some());
    let shown = (options.client_cert_path.is_some(), options.client_key_path.is_some());
    let mut faults = Vec::from_iter(pair(("tls_cert_path", "tls_key_path"), served));
    faults.extend(pair(("client_cert_path", "client_key_path"), shown));
    if options.tls_client_ca_path.is_some() && !served.0 && !served.1 {
        let message = "clients show certificates over TLS only; give --tls-cert-path and --tls-key-path";
        faults.push(Fault::new(layers.place("tls_client_ca_path"), message));
    }
    faults
}

impl Options {
    /// Whether clients need a key.
    pub fn is_keyed(&self) -> bool {
        !(self.api_key.is_empty() && self.user_api_key.is_empty()) || self.api_key_file.is_some()
    }
}

fn check_worker_url(url: &str) -> Result<(), String> {
    // An address without a scheme is asked what it speaks.
    if !url.contains("://") && url.parse::<http::uri::Authority>().is_ok_and(|at| at.port_u16().is_some()) {
        return Ok(());
    }
    let known = ["http://", "grpc://", "https://", "grpcs://"].iter().any(|scheme| url.starts_with(scheme));
    let parsed =
        url.parse::<http::Uri>().is_ok_and(|uri| uri.authority().is_some_and(|a| !a.host().is_empty()));
    match known && parsed {
        true => Ok(()),
        false => Err(format!(
            "'{url}' is not a worker's address; give grpc://host:port, http://host:port (grpcs://, https:// over TLS) or host:port"
        )),
    }
}

/// All faults, one a line, as the command line prints them.
pub fn report(faults: &[Fault]) -> String {
    faults.iter().map(|fault| format!("error: {fault}\n")).collect()
}
