//! API keys: kept as SHA-256 only, compared in constant time.

use std::sync::Arc;

use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::KeyFile;
use crate::config::{Options, Secret};

/// SHA-256 of the key that a request came with. In the request's extensions; absent where nobody needs a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyHash([u8; 32]);

impl From<[u8; 32]> for KeyHash {
    fn from(hash: [u8; 32]) -> Self {
        Self(hash)
    }
}

impl KeyHash {
    /// In hex, after `prefix`.
    pub(super) fn hex(&self, prefix: &str) -> String {
        let mut text = String::with_capacity(prefix.len() + 64);
        text.push_str(prefix);
        for byte in self.0 {
            for digit in [byte >> 4, byte & 15] {
                text.push(char::from_digit(digit.into(), 16).unwrap_or('0'));
            }
        }
        text
    }

    /// The owner's name for workers: tells keys apart and gives none away.
    pub fn tenant(&self) -> String {
        let digest = Sha256::new().chain_update(b"branchline tenant\0").chain_update(self.0).finalize();
        digest[..16].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// What a key's holder may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Send requests.
    User,
    /// That, and everything operators do.
    Admin,
}

/// The SHA-256 of a key, and what its holder may do.
pub(super) type Known = ([u8; 32], Role);

/// The keys that clients may use. None at all means that nobody needs one.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    given: Vec<Known>,
    /// Those that may change.
    file: Option<Arc<KeyFile>>,
}

/// SHA-256 of a key as an operator gives it: the key, or `sha256:` and the hash in hex.
///
/// # Errors
/// A sentence, if what follows `sha256:` is no hash. It does not repeat the text.
pub fn hash_of(key: &Secret) -> Result<[u8; 32], String> {
    let Some(hex) = key.reveal().strip_prefix("sha256:") else {
        return Ok(Sha256::digest(key.reveal()).into());
    };
    let digit = |at: usize| hex.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
    let bytes: Option<Vec<u8>> = (0..64).step_by(2).map(digit).collect();
    let plain = hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    bytes.filter(|_| plain).and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
        "what follows 'sha256:' is no hash; give 64 hex digits, as `sha256sum` prints them".to_owned()
    })
}

impl Keys {
    /// The keys of the options, without a file's. Those that are no hash, though they say so, open nothing.
    ///
    /// The administrator's key opens what clients' keys do; alone, it asks nothing of clients.
    pub fn of(options: &Options) -> Self {
        let top = options.admin_api_key.iter().filter(|_| options.is_keyed());
        let admin = options.api_key.iter().chain(top).map(|key| (key, Role::Admin));
        let user = options.user_api_key.iter().map(|key| (key, Role::User));
        Self::new(admin.chain(user))
    }

    /// The keys of the operators' own listener: users' among them, so that they are told why theirs opens nothing.
    pub fn of_admin(options: &Options) -> Self {
        let admin = options.api_key.iter().chain(&options.admin_api_key).map(|key| (key, Role::Admin));
        Self::new(admin.chain(options.user_api_key.iter().map(|key| (key, Role::User))))
    }

    /// One key, of an administrator.
    pub fn only(key: &Secret) -> Self {
        Self::new(std::iter::once((key, Role::Admin)))
    }

    /// Hashes the keys.
    fn new<'a>(keys: impl Iterator<Item = (&'a Secret, Role)>) -> Self {
        let given = keys.filter_map(|(key, role)| Some((hash_of(key).ok()?, role))).collect();
        Self { given, file: None }
    }

    /// These and, if there is a file, those that it holds at the time.
    #[must_use]
    pub fn and(self, file: Option<Arc<KeyFile>>) -> Self {
        Self { file, ..self }
    }

    /// Whether clients need a key. The same for as long as the gateway runs: a file always holds one.
    pub fn required(&self) -> bool {
        !self.given.is_empty() || self.file.is_some()
    }

    /// The key of ours that the headers carry, as `Authorization: Bearer` or `x-api-key`: its hash and role.
    pub fn accept(&self, headers: &HeaderMap) -> Option<(KeyHash, Role)> {
        let bearer = headers.get(AUTHORIZATION).and_then(|value| bearer_token(value.as_bytes()));
        let plain = headers.get("x-api-key").map(http::HeaderValue::as_bytes);
        [bearer, plain].into_iter().flatten().find_map(|key| self.knows(key))
    }

    /// Looks at every hash whatever the outcome, so that time tells nothing.
    fn knows(&self, key: &[u8]) -> Option<(KeyHash, Role)> {
        let hash: [u8; 32] = Sha256::digest(key).into();
        let (mut found, mut admin) = (Choice::from(0), Choice::from(0));
        let file = self.file.as_ref().map(|file| file.keys());
        for (known, role) in self.given.iter().chain(file.iter().flat_map(|keys| keys.iter())) {
            let same = known[..].ct_eq(&hash[..]);
            found |= same;
            admin |= same & Choice::from(u8::from(*role == Role::Admin));
        }
        let role = if bool::from(admin) { Role::Admin } else { Role::User };
        bool::from(found).then_some((KeyHash(hash), role))
    }
}

fn bearer_token(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admins(keys: &[&str]) -> Keys {
        let keys: Vec<Secret> = keys.iter().map(|key| Secret::from((*key).to_owned())).collect();
        Keys::new(keys.iter().map(|key| (key, Role::Admin)))
    }

    fn headers(name: &'static str, value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(http::HeaderName::from_static(name), http::HeaderValue::from_static(value))])
    }

    #[test]
    fn a_known_key_is_accepted_in_either_header() {
        let keys = admins(&["one", "two"]);
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
        let keys = admins(&["one"]);
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
    fn a_hash_stands_for_its_key_and_opens_nothing_itself() {
        // sha256 of "one".
        let hash = "sha256:7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed";
        let keys = admins(&[hash]);
        assert!(keys.accept(&headers("x-api-key", "one")).is_some());
        assert!(keys.accept(&headers("x-api-key", hash)).is_none());
        for bad in [
            "sha256:",
            "sha256:76",
            "sha256:+692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
        ] {
            let message = hash_of(&Secret::from(bad.to_owned())).expect_err("no hash");
            assert!(message.contains("64 hex digits") && !message.contains("692c"), "{message}");
        }
    }

    #[test]
    fn a_tenant_is_its_keys_own_and_the_same_in_either_header() {
        let keys = admins(&["one", "two"]);
        let tenant = |name, value| keys.accept(&headers(name, value)).map(|(key, _)| key.tenant());
        assert_eq!(tenant("x-api-key", "one"), tenant("authorization", "Bearer one"));
        assert_ne!(tenant("x-api-key", "one"), tenant("x-api-key", "two"));
    }
}
