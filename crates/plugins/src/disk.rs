//! Modules on disk: their bytes by hash, their settings by uuid, and compiled code, which may always be deleted.
//!
//! Every file is written beside its place and renamed, so that a crash leaves the old or the new one.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use branchline_core::{Error, Result};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::sign::Signature;
use crate::spec::Spec;

/// What is kept of a module beside its bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) uuid: Uuid,
    pub(crate) spec: Spec,
    pub(crate) sha256: String,
    /// Of the bytes, if they came with one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) signature: Option<Signature>,
    /// The file that the bytes were read from, if they were not uploaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) origin: Option<String>,
    pub(crate) version: u32,
    pub(crate) created_ms: u64,
    pub(crate) updated_ms: u64,
    /// Place among modules of equal order.
    pub(crate) sequence: u64,
}

/// The folder of `--wasm-dir`.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    root: PathBuf,
}

fn fault<'a>(path: &'a Path, what: &'a str) -> impl Fn(std::io::Error) -> Error + 'a {
    move |error| {
        let path = path.display();
        Error::internal(format!("{path} can't be {what} ({error}); check --wasm-dir and its permissions"))
    }
}

/// Writes a file whole or not at all.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

impl Disk {
    /// Makes the folders.
    pub(crate) fn open(root: &Path) -> Result<Self> {
        for folder in ["modules", "bytes"] {
            let folder = root.join(folder);
            std::fs::create_dir_all(&folder).map_err(fault(&folder, "made"))?;
        }
        Ok(Self { root: root.to_owned() })
    }

    /// Where compiled code may be kept.
    pub(crate) fn cache(&self) -> Arc<Path> {
        self.root.join("compiled").into()
    }

    fn bytes_path(&self, sha256: &str) -> PathBuf {
        self.root.join("bytes").join(format!("{sha256}.wasm"))
    }

    fn record_path(&self, uuid: Uuid) -> PathBuf {
        self.root.join("modules").join(format!("{uuid}.json"))
    }

    /// Every record, in the order of loading.
    pub(crate) fn records(&self) -> Result<Vec<Record>> {
        let folder = self.root.join("modules");
        let mut records = Vec::new();
        for entry in std::fs::read_dir(&folder).map_err(fault(&folder, "read"))? {
            let path = entry.map_err(fault(&folder, "read"))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let text = std::fs::read(&path).map_err(fault(&path, "read"))?;
            let record: Record = serde_json::from_slice(&text).map_err(|error| {
                let path = path.display();
                Error::internal(format!("{path} is no module's record ({error}); restore or delete it"))
            })?;
            records.push(record);
        }
        records.sort_by_key(|record| (record.sequence, record.uuid));
        Ok(records)
    }

    /// A module's bytes.
    pub(crate) fn bytes(&self, sha256: &str) -> Result<Vec<u8>> {
        let path = self.bytes_path(sha256);
        std::fs::read(&path).map_err(fault(&path, "read"))
    }

    /// Keeps a module; bytes first, so that no record is without them.
    pub(crate) fn save(&self, record: &Record, bytes: Option<&[u8]>) -> Result<()> {
        if let Some(bytes) = bytes {
            let path = self.bytes_path(&record.sha256);
            write(&path, bytes).map_err(fault(&path, "written"))?;
        }
        let path = self.record_path(record.uuid);
        let text = serde_json::to_vec_pretty(record)
            .map_err(|error| Error::internal(format!("a record could not be written: {error}")))?;
        write(&path, &text).map_err(fault(&path, "written"))
    }

    /// Forgets a module.
    pub(crate) fn remove(&self, uuid: Uuid) -> Result<()> {
        let path = self.record_path(uuid);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(fault(&path, "deleted")(error)),
            _ => Ok(()),
        }
    }

    /// Deletes bytes and compiled code that no module uses any more.
    pub(crate) fn sweep(&self, used: &[&str]) {
        for folder in ["bytes", "compiled"] {
            let Ok(entries) = std::fs::read_dir(self.root.join(folder)) else { continue };
            for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
                let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                if name.len() > 64 && !used.iter().any(|hash| name.starts_with(hash)) {
                    // What stays only takes room.
                    drop(std::fs::remove_file(&path));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(sequence: u64, sha256: &str) -> Record {
        let spec = Spec { name: "m".to_owned(), ..Spec::default() };
        let sha256 = sha256.to_owned();
        Record {
            uuid: Uuid::new_v4(),
            spec,
            sha256,
            signature: None,
            origin: None,
            version: 1,
            created_ms: 1,
            updated_ms: 1,
            sequence,
        }
    }

    #[test]
    fn records_come_back_in_the_order_of_loading_and_unused_bytes_are_swept() {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = Disk::open(folder.path()).expect("it opens");
        let (kept, gone) = ("a".repeat(64), "b".repeat(64));
        let (late, early) = (record(2, &kept), record(1, &gone));
        disk.save(&late, Some(b"late")).expect("it saves");
        disk.save(&early, Some(b"early")).expect("it saves");
        let sequences: Vec<u64> = disk.records().expect("they read").iter().map(|r| r.sequence).collect();
        assert_eq!(sequences, [1, 2]);
        disk.remove(early.uuid).expect("it goes");
        disk.remove(early.uuid).expect("gone already");
        disk.sweep(&[&kept]);
        assert_eq!(disk.bytes(&kept).expect("still there"), b"late");
        assert!(disk.bytes(&gone).is_err());
    }

    #[test]
    fn a_damaged_record_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = Disk::open(folder.path()).expect("it opens");
        std::fs::write(folder.path().join("modules/x.json"), "{").expect("it writes");
        let error = disk.records().expect_err("damaged");
        assert!(error.message.contains("x.json") && error.message.contains("restore or delete"), "{error}");
    }
}
