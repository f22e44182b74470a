//! Lease ids: what a client holds. They say which engine holds the prefix, and are good for one API key only.
//!
//! An id is `lease.ENGINE.NUMBER.MAC`. ENGINE is the engine's name of this start (worker and epoch in one: an engine
//! that restarts has another). MAC is HMAC-SHA256 over both and the tenant, so that an id that was made up, or
//! another key's, is refused here. Any gateway with the same `--lease-key` can read it.

use branchline_core::{Error, ErrorCode, Result};
use branchline_worker::proto;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::config::Secret;

/// Bytes of the code that an id carries.
const MAC_BYTES: usize = 16;

/// Signs and reads ids.
pub struct LeaseSigner {
    key: Vec<u8>,
}

/// What an id says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseName {
    /// The engine, as it calls itself since its start.
    pub engine_id: String,
    /// The engine's own id of the lease.
    pub lease_id: String,
}

/// A request's lease, checked: whose and what for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobLease {
    /// The owner's name for workers.
    pub tenant: String,
    /// What is wanted.
    pub want: LeaseWant,
}

/// What a request wants of its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseWant {
    /// Hold the prompt for so many milliseconds.
    Take(u64),
    /// Hit a held prefix.
    Hit(LeaseName),
}

impl JobLease {
    /// The engine that holds the prefix, if one is named.
    pub(super) fn engine_id(&self) -> Option<&str> {
        match &self.want {
            LeaseWant::Hit(name) => Some(&name.engine_id),
            LeaseWant::Take(_) => None,
        }
    }

    /// The contract's form.
    pub fn to_proto(&self) -> proto::Lease {
        let tenant = self.tenant.clone();
        match &self.want {
            LeaseWant::Take(ttl_ms) => {
                proto::Lease { acquire_ttl_ms: Some(*ttl_ms), tenant, ..proto::Lease::default() }
            }
            LeaseWant::Hit(name) => {
                proto::Lease { lease_id: name.lease_id.clone(), acquire_ttl_ms: None, tenant }
            }
        }
    }
}

impl LeaseSigner {
    /// With the operator's key, or one drawn now that nobody else has.
    pub fn new(key: Option<&Secret>) -> Self {
        let key = match key {
            Some(key) => key.reveal().as_bytes().to_vec(),
            None => rand::random::<[u8; 32]>().to_vec(),
        };
        Self { key }
    }

    /// The id of a lease for its owner.
    pub fn sign(&self, name: &LeaseName, tenant: &str) -> String {
        let code = self.mac(name, tenant).finalize().into_bytes();
        let hex: String = code[..MAC_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("lease.{}.{}.{hex}", name.engine_id, name.lease_id)
    }

    /// What an id says, if we made it for this owner.
    pub fn read(&self, id: &str, tenant: &str) -> Option<LeaseName> {
        let mut parts = id.split('.');
        let ("lease", engine_id, lease_id, code, None) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next())
        else {
            return None;
        };
        let name = LeaseName { engine_id: engine_id.to_owned(), lease_id: lease_id.to_owned() };
        self.mac(&name, tenant).verify_truncated_left(&bytes_of(code)?).ok()?;
        Some(name)
    }

    fn mac(&self, name: &LeaseName, tenant: &str) -> Hmac<Sha256> {
        let mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("HMAC takes keys of any length");
        // Names have no dots and tenants are last, so that no two triples read alike.
        mac.chain_update(b"branchline lease 1.")
            .chain_update(&name.engine_id)
            .chain_update(b".")
            .chain_update(&name.lease_id)
            .chain_update(b".")
            .chain_update(tenant)
    }
}

/// The code's bytes, if it is exactly as long as ours.
fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    if hex.len() != 2 * MAC_BYTES || !hex.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')) {
        return None;
    }
    (0..MAC_BYTES).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()).collect()
}

/// An id that this key has no right to, or that nobody made.
fn unknown_lease(code: ErrorCode, field: &str) -> Error {
    let message = format!(
        "`{field}` is not the id of a lease of this API key: it was changed, belongs to another key, or was signed \
         by a gateway with another --lease-key"
    );
    Error::new(code, message).with_field(field)
}

/// Reads an id, or refuses it with `code`.
///
/// # Errors
/// As [`unknown_lease`].
pub fn read_lease(
    signer: &LeaseSigner,
    id: &str,
    tenant: &str,
    code: ErrorCode,
    field: &str,
) -> Result<LeaseName> {
    signer.read(id, tenant).ok_or_else(|| unknown_lease(code, field))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> LeaseName {
        LeaseName { engine_id: "e1".into(), lease_id: "77".into() }
    }

    #[test]
    fn an_id_is_read_by_every_signer_with_the_same_key_and_by_no_other() {
        let key = Secret::from("shared".to_owned());
        let id = LeaseSigner::new(Some(&key)).sign(&name(), "t");
        assert_eq!(LeaseSigner::new(Some(&key)).read(&id, "t"), Some(name()));
        assert_eq!(LeaseSigner::new(None).read(&id, "t"), None);
    }

    #[test]
    fn another_tenant_and_any_changed_character_are_refused() {
        let signer = LeaseSigner::new(None);
        let id = signer.sign(&name(), "t");
        assert_eq!(signer.read(&id, "u"), None);
        for at in 0..id.len() {
            let mut forged = id.clone().into_bytes();
            forged[at] = if forged[at] == b'0' { b'1' } else { b'0' };
            let forged = String::from_utf8(forged).expect("ascii");
            assert_eq!(signer.read(&forged, "t"), None, "{forged}");
        }
        for cut in 0..id.len() {
            assert_eq!(signer.read(&id[..cut], "t"), None);
        }
        assert_eq!(signer.read(&format!("{id}.x"), "t"), None);
        assert_eq!(signer.read("lease.é.é.é", "t"), None);
    }
}
