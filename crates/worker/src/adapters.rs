//! LoRA adapters of engines: which of them a worker holds, and what a request means by a name.
//!
//! A request is bound to a digest when it comes in, so a name that is given to other weights meanwhile never changes
//! what it is answered with. The lists are the engines' own, read again whenever their load reports a change.

use std::sync::Arc;

use branchline_core::{Error, ErrorCode, Result};

use crate::fleet::Fleet;
use crate::proto;
use crate::worker::{Transport, Worker};

/// The adapter of a request: its name, and the digest of the weights that the name meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterKey<'a> {
    /// What engines know it by.
    pub name: &'a str,
    /// What they must hold under the name; separates cached prefixes.
    pub digest: &'a str,
}

impl Worker {
    /// The adapters that the engine holds, as last told; none of HTTP workers and before the first connection.
    pub fn adapters(&self) -> Arc<proto::ListAdaptersResponse> {
        self.listed().unwrap_or_default()
    }

    /// Whether it can serve requests for an adapter (absent: for the base model).
    pub(crate) fn holds(&self, adapter: Option<AdapterKey<'_>>) -> bool {
        let Some(wanted) = adapter else { return true };
        let all = self.adapters();
        all.adapters.iter().any(|own| own.name == wanted.name && own.digest == wanted.digest)
    }
}

impl Fleet {
    /// Names of the adapters that ready engines hold for `model`, sorted.
    pub fn adapters(&self, model: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for worker in self.workers().iter().filter(|worker| is_engine_of(worker, model) && worker.is_ready())
        {
            names.extend(worker.adapters().adapters.iter().map(|adapter| adapter.name.clone()));
        }
        names.sort();
        names.dedup();
        names
    }

    /// The digest that `name` means for `model`: that of most engines that hold it, ready ones first.
    ///
    /// # Errors
    /// `NotFound`, naming what there is, if no engine holds it.
    pub fn adapter(&self, model: &str, name: &str) -> Result<String> {
        let mut found: Vec<(String, usize)> = Vec::new();
        for worker in self.workers().iter().filter(|worker| is_engine_of(worker, model)) {
            let weight = if worker.is_ready() { 1 << 16 } else { 1 };
            for adapter in worker.adapters().adapters.iter().filter(|adapter| adapter.name == name) {
                match found.iter_mut().find(|(digest, _)| *digest == adapter.digest) {
                    Some((_, count)) => *count += weight,
                    None => found.push((adapter.digest.clone(), weight)),
                }
            }
        }
        // The first of equals, so that the order of the fleet decides.
        let most = found.iter().map(|(_, count)| *count).max();
        let best = found.into_iter().find(|(_, count)| Some(*count) == most);
        best.map(|(digest, _)| digest).ok_or_else(|| self.no_adapter(model, name))
    }

    pub(crate) fn no_adapter(&self, model: &str, name: &str) -> Error {
        let known: Vec<String> =
            self.adapters(model).into_iter().map(|adapter| format!("{model}:{adapter}")).collect();
        let known = match known.is_empty() {
            true => "it has none; load it first".to_owned(),
            false => format!("use one of: {}", known.join(", ")),
        };
        let text = format!("adapter '{name}' of model '{model}' does not exist; {known}");
        Error::new(ErrorCode::NotFound, text).with_field("model")
    }

    /// The engines that adapters for `model` are loaded into: those that can run any, or all if none can.
    pub fn adapter_engines(&self, model: &str) -> Vec<Arc<Worker>> {
        let workers = self.workers();
        let engines = workers.iter().filter(|worker| is_engine_of(worker, model)).cloned();
        let (able, other): (Vec<_>, Vec<_>) = engines.partition(|worker| worker.adapters().limit > 0);
        if able.is_empty() { other } else { able }
    }
}

fn is_engine_of(worker: &Worker, model: &str) -> bool {
    worker.transport() == Transport::Grpc
        && worker.can_serve(Some(model))
        && worker.model().is_some_and(|model| model.can("generate"))
}
