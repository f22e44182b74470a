//! Workers from a file and from names: looked at again and again, and the difference is added and removed.
//!
//! What can't be read or resolved leaves the workers as they are: a name server's bad minute empties no fleet.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use branchline_core::{Error, ErrorCode, Result};
use branchline_worker::{Fleet, Source as Kind, WorkerPatch, WorkerSpec};

use super::names::{Name, Names};
use super::{Workers, key};
use crate::config::Options;

/// Where a list of workers comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Source {
    File(PathBuf),
    Name(Name),
}

impl Source {
    fn kind(&self) -> Kind {
        match self {
            Self::File(_) => Kind::File,
            Self::Name(..) => Kind::Dns,
        }
    }
}

/// Reads every source once, then watches them.
pub(super) fn watch(workers: &Arc<Workers>, options: &Options, fleet: &Arc<Fleet>) -> Result<()> {
    let mut sources: Vec<Source> = options.worker_file.clone().into_iter().map(Source::File).collect();
    let asked = options.worker_dns.iter().map(|text| Name::parse(text)).collect::<Result<Vec<_>>>()?;
    let names = Names::new(&asked, options.worker_dns_server.as_deref())?;
    sources.extend(asked.into_iter().map(Source::Name));
    for source in &sources {
        if let Source::File(path) = source {
            // At the start a file that can't be read is a fault of the operator's.
            read_file(path)?;
        }
    }
    for source in sources {
        let (owner, fleet, every) = (Arc::clone(workers), Arc::clone(fleet), options.worker_refresh);
        let (grace, stop, names) = (options.drain_timeout, workers.stop.clone(), names.clone());
        workers.tracker.spawn(async move {
            let mut known: BTreeMap<String, WorkerSpec> = BTreeMap::new();
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    read = read(&source, &names) => match read {
                        Ok(mut found) => {
                            found.iter_mut().for_each(|spec| spec.source = source.kind());
                            apply(&owner, &fleet, &mut known, found, grace);
                        }
                        Err(error) => tracing::warn!(error = %error, "a source of workers can't be read; the workers stay"),
                    },
                }
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(every) => {}
                }
            }
        });
    }
    Ok(())
}

async fn read(source: &Source, names: &Names) -> Result<Vec<WorkerSpec>> {
    match source {
        Source::File(path) => read_file(path),
        Source::Name(name) => names.read(name).await,
    }
}

/// One URL a line, with # for comments, or a JSON list of URLs and objects.
fn read_file(path: &Path) -> Result<Vec<WorkerSpec>> {
    let fail = |cause: &dyn std::fmt::Display| {
        Error::invalid("worker_file", format!("worker file {} can't be read: {cause}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|cause| fail(&cause))?;
    parse_file(&text).map_err(|cause| fail(&cause))
}

fn parse_file(text: &str) -> std::result::Result<Vec<WorkerSpec>, String> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Row {
        Url(String),
        Spec(Box<WorkerSpec>),
    }
    let specs: Vec<WorkerSpec> = if text.trim_start().starts_with('[') {
        let rows: Vec<serde_json::Value> = serde_json::from_str(text).map_err(|cause| cause.to_string())?;
        let row = |row: serde_json::Value| {
            serde_json::from_value(row.clone()).map_err(|_| match serde_json::from_value::<WorkerSpec>(row) {
                Err(cause) => cause.to_string(),
                Ok(_) => "a row is neither a URL nor an object".to_owned(),
            })
        };
        let rows = rows.into_iter().map(row).collect::<std::result::Result<Vec<Row>, String>>()?;
        let spec = |row| match row {
            Row::Url(url) => WorkerSpec::new(url),
            Row::Spec(spec) => *spec,
        };
        rows.into_iter().map(spec).collect()
    } else {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.map(WorkerSpec::new).collect()
    };
    specs.iter().try_for_each(|spec| spec.check().map_err(|error| error.message))?;
    Ok(specs)
}

/// The change between two specifications that differ in nothing but how much of the traffic a worker gets: no reason to
/// take it out.
fn weighing(old: &WorkerSpec, new: &WorkerSpec) -> Option<WorkerPatch> {
    let same = WorkerSpec { priority: new.priority, cost: new.cost, ..old.clone() } == *new;
    let patch = WorkerPatch { priority: Some(new.priority), cost: Some(new.cost), ..WorkerPatch::default() };
    (same && old != new).then_some(patch)
}

/// Adds what is new, takes out what is gone; what changed is taken out and added.
fn apply(
    owner: &Arc<Workers>,
    fleet: &Arc<Fleet>,
    known: &mut BTreeMap<String, WorkerSpec>,
    found: Vec<WorkerSpec>,
    grace: std::time::Duration,
) {
    let found: BTreeMap<String, WorkerSpec> =
        found.into_iter().map(|spec| (key(&spec.url).to_owned(), spec)).collect();
    // What was removed on request is not this source's any more, nor does it come back because it is listed.
    let removed = |url: &str| owner.state.lock().has_removed(url);
    known.retain(|url, _| !removed(url));
    for (url, spec) in &found {
        if let Some(old) = known.get_mut(url)
            && let Some(patch) = weighing(old, spec)
            && let Some(worker) = fleet.workers().iter().find(|worker| key(&worker.url) == url)
            && fleet.patch(worker.id, &patch).is_ok()
        {
            *old = spec.clone();
        }
    }
    let gone: Vec<String> = known
        .iter()
        .filter(|(url, spec)| found.get(*url) != Some(spec))
        .map(|(url, _)| url.clone())
        .collect();
    for url in gone {
        known.remove(&url);
        owner.cancel(&url);
        if let Some(worker) = fleet.workers().iter().find(|worker| key(&worker.url) == url) {
            tracing::info!(worker = %worker.url, "worker is no longer listed");
            owner.tracker.spawn(fleet.retire(worker.id, grace));
        }
    }
    for (url, spec) in found {
        if known.contains_key(&url) || removed(&url) {
            continue;
        }
        match owner.admit(fleet, spec.clone()) {
            Ok(_) => {
                tracing::info!(worker = url, "worker is listed");
                known.insert(url, spec);
            }
            // Somebody else named it too; whoever did takes it out.
            Err(error) if error.code == ErrorCode::Conflict => {
                tracing::debug!(worker = url, "a listed worker is in the fleet already");
            }
            Err(error) => tracing::warn!(worker = url, error = %error, "a listed worker was not added"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_urls_or_objects() {
        let urls = |text: &str| {
            parse_file(text).map(|specs| specs.into_iter().map(|spec| spec.url).collect::<Vec<_>>())
        };
        let right = Ok(vec!["http://a:1".to_owned(), "grpc://b:2".to_owned()]);
        assert_eq!(urls("# mine\nhttp://a:1\n\n  grpc://b:2  \n"), right);
        assert_eq!(urls(r#"["http://a:1",{"url":"grpc://b:2","priority":7}]"#), right);
        assert_eq!(urls(""), Ok(Vec::new()));
        for text in ["[", "[7]", r#"[{"url":"a","colour":"red"}]"#, r#"[{"url":"a","cost":0}]"#] {
            assert!(urls(text).is_err(), "{text}");
        }
    }
}
