//! `lease` in a request: a prefix to hold, or a held one to hit.

use branchline_core::{Error, Result};
use serde::Serialize;

use crate::fields::{Fields, wrong};

/// Longest time of a lease in milliseconds: a day.
pub const MAX_LEASE_MS: i64 = 86_400_000;
const MAX_ID_BYTES: usize = 512;

/// What a request wants of leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseAsk {
    /// Hold this request's prompt for so many milliseconds.
    Take {
        /// From 1 to a day.
        ttl_ms: u64,
    },
    /// Hit the prefix of a lease.
    Hit {
        /// The signed id.
        id: String,
    },
}

impl LeaseAsk {
    /// Reads `lease`: `{"ttl_ms": …}` or `{"id": "…"}`.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field.
    pub fn read(fields: &Fields<'_>) -> Result<Option<Self>> {
        let Some(lease) = fields.object("lease")? else { return Ok(None) };
        if let Some(name) = lease.names().find(|name| !matches!(*name, "id" | "ttl_ms")) {
            let path = lease.path(name);
            let message = format!("`{path}` is unknown; `lease` takes `id` or `ttl_ms`");
            return Err(Error::invalid(path, message));
        }
        match (lease.string("id")?, ttl(&lease)?) {
            (Some(id), None) if !id.is_empty() && id.len() <= MAX_ID_BYTES => {
                Ok(Some(Self::Hit { id: id.to_owned() }))
            }
            (Some(_), None) => {
                let path = lease.path("id");
                let message = format!("`{path}` must be a lease's id of 1 to {MAX_ID_BYTES} bytes");
                Err(Error::invalid(path, message))
            }
            (None, Some(ttl_ms)) => Ok(Some(Self::Take { ttl_ms })),
            _ => {
                let path = fields.path("lease");
                let message =
                    format!("`{path}` needs one of `id` (hit a held prefix) and `ttl_ms` (hold this one)");
                Err(Error::invalid(path, message))
            }
        }
    }
}

fn ttl(fields: &Fields<'_>) -> Result<Option<u64>> {
    Ok(fields.integer("ttl_ms", 1..=MAX_LEASE_MS)?.map(|ttl| ttl as u64))
}

/// The time of a lease that a body must give.
///
/// # Errors
/// `InvalidArgument` if it is absent or out of range.
pub fn lease_ttl(fields: &Fields<'_>) -> Result<u64> {
    ttl(fields)?.ok_or_else(|| {
        let path = fields.path("ttl_ms");
        wrong(&path, &format!("an integer from 1 to {MAX_LEASE_MS}"), &serde_json::Value::Null)
    })
}

/// How a request found its lease, as answers tell it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeaseNote {
    /// `held`, `lost` or `unmatched`.
    pub lease: &'static str,
    /// The signed id, if this request acquired it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_id: Option<String>,
    /// Tokens that it holds, if acquired.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_tokens: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(value: Value) -> Result<Option<LeaseAsk>> {
        LeaseAsk::read(&Fields::of(&value, "").unwrap())
    }

    #[test]
    fn a_lease_is_either_taken_or_hit() {
        assert_eq!(read(json!({})).unwrap(), None);
        assert_eq!(read(json!({"lease": {"ttl_ms": 5}})).unwrap(), Some(LeaseAsk::Take { ttl_ms: 5 }));
        assert_eq!(read(json!({"lease": {"id": "x"}})).unwrap(), Some(LeaseAsk::Hit { id: "x".into() }));
    }

    #[test]
    fn anything_else_is_refused_with_its_place() {
        for (lease, field) in [
            (json!("x"), "lease"),
            (json!({}), "lease"),
            (json!({"id": "x", "ttl_ms": 1}), "lease"),
            (json!({"id": ""}), "lease.id"),
            (json!({"id": 7}), "lease.id"),
            (json!({"id": "x".repeat(513)}), "lease.id"),
            (json!({"ttl_ms": 0}), "lease.ttl_ms"),
            (json!({"ttl_ms": 86_400_001}), "lease.ttl_ms"),
            (json!({"ttl_ms": "1"}), "lease.ttl_ms"),
            (json!({"ttl": 1}), "lease.ttl"),
        ] {
            let error = read(json!({"lease": lease})).expect_err(&lease.to_string());
            assert_eq!(error.field.as_deref(), Some(field), "{lease}");
        }
    }

    #[test]
    fn a_missing_time_is_refused() {
        let empty = json!({});
        let error = lease_ttl(&Fields::of(&empty, "").unwrap()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("ttl_ms"));
    }

    #[test]
    fn a_note_shows_an_id_only_to_who_acquired() {
        let note = |lease_id| LeaseNote { lease: "held", lease_id, lease_tokens: None };
        assert_eq!(serde_json::to_value(note(None)).unwrap(), json!({"lease": "held"}));
        let with = serde_json::to_value(note(Some("i".into()))).unwrap();
        assert_eq!(with, json!({"lease": "held", "lease_id": "i"}));
    }
}
