//! API keys: kept as SHA-256 only, compared in constant time.

use std::path::Path;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::config::{Secret, Value as _};

/// SHA-256 of the key that a request came with. In the request's extensions; absent where nobody needs a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// The owner's name for workers: tells keys apart and gives none away.
    pub fn tenant(&self) -> String {
        let digest = Sha256::new().chain_update(b"branchline tenant\0").chain_update(self.0).finalize();
        digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The keys that clients may use. None at all means that nobody needs one.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    hashes: Vec<[u8; 32]>,
}

impl Keys {
    /// Hashes the keys.
    pub fn new(keys: &[Secret]) -> Self {
        Self { hashes: keys.iter().map(|key| Sha256::digest(key.reveal()).into()).collect() }
    }

    /// Whether clients need a key.
    pub fn required(&self) -> bool {
        !self.hashes.is_empty()
    }

    /// The key of ours that the headers carry, as `Authorization: Bearer` or `x-api-key`: its hash.
    pub fn accept(&self, headers: &HeaderMap) -> Option<KeyHash> {
        let bearer = headers.get(AUTHORIZATION).and_then(|value| bearer_token(value.as_bytes()));
        let plain = headers.get("x-api-key").map(http::HeaderValue::as_bytes);
        [bearer, plain].into_iter().flatten().find_map(|key| self.knows(key))
    }

    /// Looks at every hash whatever the outcome, so that time tells nothing.
    fn knows(&self, key: &[u8]) -> Option<KeyHash> {
        let hash: [u8; 32] = Sha256::digest(key).into();
        let found =
            self.hashes.iter().fold(Choice::from(0), |found, known| found | known[..].ct_eq(&hash[..]));
        bool::from(found).then_some(KeyHash(hash))
    }
}

fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

/// Reads keys from a file, one a line; empty lines and lines that begin with `#` are skipped.
///
/// # Errors
/// A sentence that names the file and what to do.
pub fn read_keys(path: &Path) -> Result<Vec<Secret>, String> {
    let shown = path.display();
    let text = std::fs::read_to_string(path)
        .map_err(|error| format!("{shown} can't be read ({error}); give a file with one key a line"))?;
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    let keys = lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(at, line)| {
            Secret::parse(&[line.to_owned()]).map_err(|message| format!("{shown}, line {at}: {message}"))
        })
        .collect::<Result<Vec<_>, _>>()?;
    match keys.is_empty() {
        true => Err(format!("{shown} holds no key; give one key a line")),
        false => Ok(keys),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), http::HeaderValue::from_static(value))])
    }

    #[test]
    fn a_known_key_is_accepted_in_either_header() {
        let keys = Keys::new(&[Secret::from("one".to_owned()), Secret::from("two".to_owned())]);
        for (name, value) in [
            ("authorization", "Bearer two"),
            ("authorization", "bearer one"),
            ("x-api-key", "one"),
            ("x-api-key", "two"),
        ] {
            assert!(keys.accept(&headers(name, value)).is_some(), "{name}: {value}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        let keys = Keys::new(&[Secret::from("one".to_owned())]);
        for (name, value) in [
            ("authorization", "Bearer on"),
            ("authorization", "Bearer one1"),
            ("authorization", "Basic one"),
            ("authorization", "Bear"),
            ("authorization", "Bearer "),
            ("x-api-key", ""),
            ("cookie", "one"),
        ] {
            assert_eq!(keys.accept(&headers(name, value)), None, "{name}: {value}");
        }
    }

    #[test]
    fn a_tenant_is_its_keys_own_and_the_same_in_either_header() {
        let keys = Keys::new(&[Secret::from("one".to_owned()), Secret::from("two".to_owned())]);
        let tenant = |name, value| keys.accept(&headers(name, value)).map(|key| key.tenant());
        assert_eq!(tenant("x-api-key", "one"), tenant("authorization", "Bearer one"));
        assert_ne!(tenant("x-api-key", "one"), tenant("x-api-key", "two"));
    }

    #[test]
    fn a_key_file_is_read_line_by_line_and_an_empty_one_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("keys");
        std::fs::write(&path, "# ops\nalpha\n\n beta \n").expect("written");
        let keys = Keys::new(&read_keys(&path).expect("two keys"));
        assert!(keys.accept(&headers("x-api-key", "beta")).is_some());
        assert!(keys.accept(&headers("x-api-key", "# ops")).is_none());
        std::fs::write(&path, "# none\n").expect("written");
        assert!(read_keys(&path).expect_err("no key").contains("holds no key"));
        assert!(read_keys(&folder.path().join("absent")).is_err());
    }
}
