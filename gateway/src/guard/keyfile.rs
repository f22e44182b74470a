//! Keys of a file that is read again when it changes. What can't be used leaves the last keys in force: half a write must
//! neither lock everybody out nor open anything.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use branchline_core::{Error, Result};
use branchline_telemetry::Metrics;
use branchline_worker::follow_files;
use tokio_util::sync::CancellationToken;

use super::keys::{Known, Role, hash_of};
use crate::config::{Secret, Value as _};

/// A file of keys, never without any: who has one asks for keys for as long as he runs.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    keys: ArcSwap<Vec<Known>>,
}

impl KeyFile {
    /// Reads keys, one a line, `user` or `admin` before it; empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// A sentence that names the file, the line and what to do, without a key.
    pub fn load(path: &Path) -> std::result::Result<Self, String> {
        Ok(Self { path: path.to_owned(), keys: ArcSwap::from_pointee(read(path)?) })
    }

    /// Whether one of them is an administrator's.
    pub fn has_admin(&self) -> bool {
        self.keys.load().iter().any(|(_, role)| *role == Role::Admin)
    }

    /// The keys of now.
    pub(super) fn keys(&self) -> arc_swap::Guard<Arc<Vec<Known>>> {
        self.keys.load()
    }

    /// Reads the file again whenever it changes, until cancelled.
    pub async fn follow(self: Arc<Self>, metrics: Arc<Metrics>, stop: CancellationToken) {
        follow_files(vec![self.path.clone()], "keys", &metrics, stop, || self.read_again()).await;
    }

    fn read_again(&self) -> Result<()> {
        let fault = |cause| Error::invalid("api_key_file", format!("api_key_file: {cause}"));
        self.keys.store(Arc::new(read(&self.path).map_err(fault)?));
        Ok(())
    }
}

fn read(path: &Path) -> std::result::Result<Vec<Known>, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{shown} can't be read ({error}); give a file with one key a line"))?;
    let mut keys = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (role, key) = match line.split_once(char::is_whitespace) {
            Some(("user", key)) => (Role::User, key.trim()),
            Some(("admin", key)) => (Role::Admin, key.trim()),
            _ => (Role::Admin, line),
        };
        let hash = match key {
            // Else half a line would be an administrator's key.
            "user" | "admin" => Err(format!("no key stands after '{key}'; give one, or drop the line")),
            _ => Secret::parse(&[key.to_owned()]).and_then(|key| hash_of(&key)),
        };
        keys.push((hash.map_err(|message| format!("{shown}, line {}: {message}", at + 1))?, role));
    }
    match keys.is_empty() {
        true => Err(format!("{shown} holds no key; give one key a line")),
        false => Ok(keys),
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName, HeaderValue};

    use super::super::Keys;
    use super::*;

    fn role(keys: &Keys, key: &'static str) -> Option<Role> {
        let headers =
            HeaderMap::from_iter([(HeaderName::from_static("x-api-key"), HeaderValue::from_static(key))]);
        keys.accept(&headers).map(|(_, role)| role)
    }

    #[test]
    fn a_file_is_read_line_by_line_and_an_empty_one_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys");
        let hash = "sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
        std::fs::write(&path, format!("# ops\nalpha\n\n user beta \nadmin {hash}\n")).expect("written");
        let file = Arc::new(KeyFile::load(&path).expect("three keys"));
        let keys = Keys::default().and(Some(Arc::clone(&file)));
        let known = |key| role(&keys, key);
        assert_eq!(
            (known("alpha"), known("beta"), known("one")),
            (Some(Role::Admin), Some(Role::User), Some(Role::Admin))
        );
        assert_eq!((known("# ops"), known("user beta"), known(hash)), (None, None, None));
        for (text, told) in
            [("sha256:12\n", "line 1"), ("a\nuser b c\n", "line 2"), ("# none\n", "holds no key")]
        {
            std::fs::write(&path, text).expect("written");
            let message = KeyFile::load(&path).expect_err(text);
            assert!(message.contains(told) && !message.contains("b c"), "{message}");
        }
        assert!(KeyFile::load(&folder.path().join("absent")).is_err());
    }

    #[test]
    fn a_changed_file_is_used_and_a_broken_one_leaves_the_last_keys() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys");
        let write = |text: &str| std::fs::write(&path, text).expect("written");
        write("old\nuser guest\n");
        let file = Arc::new(KeyFile::load(&path).expect("two keys"));
        let keys = Keys::default().and(Some(Arc::clone(&file)));
        let known = || ["old", "new", "guest"].map(|key| role(&keys, key));
        write("new\nadmin guest\n");
        file.read_again().expect("good");
        let changed = [None, Some(Role::Admin), Some(Role::Admin)];
        assert_eq!(known(), changed);
        for broken in ["new\nsha256:12\n", "", "user \n"] {
            write(broken);
            let error = file.read_again().expect_err(broken);
            assert_eq!(
                (error.field.as_deref(), known(), keys.required()),
                (Some("api_key_file"), changed, true)
            );
        }
        std::fs::remove_file(&path).expect("it was there");
        file.read_again().expect_err("no file");
        assert_eq!(known(), changed);
    }
}
