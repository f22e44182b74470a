//! The state file: workers added and removed over HTTP, so that a restart finds the fleet as it was left.
//!
//! Written whole, beside itself and then moved, readable by its owner only, for it may hold workers' keys.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use branchline_core::{Error, Result};
use branchline_worker::WorkerSpec;
use serde::{Deserialize, Serialize};

use super::key;

/// What requests changed of the fleet.
#[derive(Debug, Clone, Default)]
pub(super) struct State {
    path: Option<PathBuf>,
    changes: Changes,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Changes {
    /// Of this form; a later one is refused.
    version: u32,
    /// By [`key`].
    added: BTreeMap<String, WorkerSpec>,
    /// Keys.
    removed: Vec<String>,
}

const VERSION: u32 = 1;

impl Changes {
    /// Names all workers by their keys: older files have URLs, and one worker may be there by two.
    fn by_key(&mut self) {
        let (told, bare): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.added).into_values().partition(|spec| spec.url.contains("://"));
        // What the worker was found to speak was written later than its bare address.
        self.added = bare.into_iter().chain(told).map(|spec| (key(&spec.url).to_owned(), spec)).collect();
        self.removed.iter_mut().for_each(|url| *url = key(url).to_owned());
    }
}

impl State {
    /// Reads the file; one that is not there yet is an empty one. Without a path nothing is kept.
    pub(super) fn open(path: Option<PathBuf>) -> Result<Self> {
        let fail = |path: &Path, cause: &dyn std::fmt::Display| {
            let text = format!("state file {} can't be read: {cause}; mend or remove it", path.display());
            Error::invalid("state_file", text)
        };
        let mut changes = Changes { version: VERSION, ..Changes::default() };
        if let Some(path) = &path {
            match std::fs::read(path) {
                Ok(bytes) => changes = serde_json::from_slice(&bytes).map_err(|cause| fail(path, &cause))?,
                Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {}
                Err(cause) => return Err(fail(path, &cause)),
            }
            if changes.version != VERSION {
                return Err(fail(path, &format!("its version is {} and not {VERSION}", changes.version)));
            }
        }
        changes.by_key();
        Ok(Self { path, changes })
    }

    pub(super) fn find(&self, url: &str) -> Option<&WorkerSpec> {
        self.changes.added.get(key(url))
    }

    pub(super) fn has_removed(&self, url: &str) -> bool {
        self.changes.removed.iter().any(|removed| removed == key(url))
    }

    pub(super) fn added(&self) -> impl Iterator<Item = WorkerSpec> {
        self.changes.added.values().cloned()
    }

    /// Notes an added or changed worker.
    pub(super) fn add(&mut self, spec: WorkerSpec) -> Result<()> {
        let mut next = self.changes.clone();
        let name = key(&spec.url).to_owned();
        next.removed.retain(|removed| *removed != name);
        next.added.insert(name, spec);
        self.store(next)
    }

    /// Notes a removed worker, also one of the options: it stays away.
    pub(super) fn remove(&mut self, url: &str) -> Result<()> {
        let mut next = self.changes.clone();
        next.added.remove(key(url));
        if !self.has_removed(url) {
            next.removed.push(key(url).to_owned());
        }
        self.store(next)
    }

    fn store(&mut self, next: Changes) -> Result<()> {
        if let Some(path) = &self.path {
            write(path, &next).map_err(|cause| {
                Error::internal(format!(
                    "state file {} can't be written: {cause}; nothing was changed",
                    path.display()
                ))
            })?;
        }
        self.changes = next;
        Ok(())
    }
}

fn write(path: &Path, changes: &Changes) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let beside = path.with_extension("new");
    let mut file =
        std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(&serde_json::to_vec_pretty(changes)?)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_and_removed_is_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let mut state = State::open(Some(path.clone())).unwrap();
        state.add(WorkerSpec { api_key: Some("k".into()), ..WorkerSpec::new("http://a:1") }).unwrap();
        state.add(WorkerSpec::new("http://b:1")).unwrap();
        state.remove("http://b:1").unwrap();
        state.remove("http://static:1").unwrap();
        let again = State::open(Some(path.clone())).unwrap();
        assert_eq!(again.added().map(|spec| spec.url).collect::<Vec<_>>(), ["http://a:1"]);
        assert_eq!(again.find("http://a:1").unwrap().api_key.as_deref(), Some("k"));
        assert!(again.has_removed("http://static:1") && !again.has_removed("http://a:1"));
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_worker_has_one_name_with_and_without_its_scheme() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let old = r#"{"version":1,"removed":["http://gone:1/"],"added":{
            "a:1":{"url":"a:1"},"http://a:1":{"url":"http://a:1","priority":7}}}"#;
        std::fs::write(&path, old).unwrap();
        let mut state = State::open(Some(path)).unwrap();
        assert_eq!(state.added().map(|spec| spec.priority).collect::<Vec<_>>(), [7]);
        assert!(state.has_removed("gone:1") && state.find("a:1/").is_some());
        state.add(WorkerSpec::new("a:1")).unwrap();
        assert_eq!(state.added().count(), 1);
        state.remove("http://a:1").unwrap();
        assert_eq!((state.added().count(), state.has_removed("a:1")), (0, true));
    }

    #[test]
    fn a_file_that_cannot_be_used_is_refused_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        for text in ["{", "[]", r#"{"version":9,"added":{},"removed":[]}"#] {
            std::fs::write(&path, text).unwrap();
            let error = State::open(Some(path.clone())).unwrap_err();
            assert_eq!(error.field.as_deref(), Some("state_file"), "{text}");
        }
        let nowhere = folder.path().join("no/such/folder/state.json");
        let mut state = State::open(Some(nowhere)).unwrap();
        assert!(state.add(WorkerSpec::new("http://a:1")).is_err());
        assert!(state.find("http://a:1").is_none(), "what can't be kept is not done");
    }

    #[test]
    fn without_a_file_nothing_is_kept_and_all_works() {
        let mut state = State::open(None).unwrap();
        state.add(WorkerSpec::new("http://a:1")).unwrap();
        assert!(state.find("http://a:1").is_some());
    }
}
