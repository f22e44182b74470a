//! The key space of a request's cache entries: what besides the tokens changes the result.
//!
//! The encoding is injective: each field has a presence byte and a length, so a salt can't pose as an
//! extra key, and absence differs from the empty text.

/// Encodes the four fields; equal outputs mean equal fields.
#[must_use]
pub fn encode(
    cache_salt: Option<&str>,
    extra_key: Option<&str>,
    adapter: Option<&str>,
    weight_version: &str,
) -> Vec<u8> {
    let mut encoded = Vec::new();
    for field in [cache_salt, extra_key, adapter, Some(weight_version)] {
        match field {
            None => encoded.push(0),
            Some(text) => {
                encoded.push(1);
                encoded.extend_from_slice(&(text.len() as u64).to_le_bytes());
                encoded.extend_from_slice(text.as_bytes());
            }
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::encode;
    use proptest::prelude::*;

    #[test]
    fn the_same_key_in_another_field_is_another_namespace() {
        let all = [
            encode(Some("X"), None, None, ""),
            encode(None, Some("X"), None, ""),
            encode(None, None, Some("X"), ""),
            encode(None, None, None, "X"),
            encode(None, None, None, ""),
            encode(Some(""), None, None, ""),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[i + 1..] {
                assert_ne!(a, b);
            }
        }
    }

    type Fields = (Option<String>, Option<String>, Option<String>, String);

    fn fields() -> impl Strategy<Value = Fields> {
        let text = "[\\x00\\x01a]{0,10}";
        (prop::option::of(text), prop::option::of(text), prop::option::of(text), text)
    }

    proptest! {
        #[test]
        fn encoding_is_injective(a in fields(), b in fields()) {
            let bytes = |f: &Fields| encode(f.0.as_deref(), f.1.as_deref(), f.2.as_deref(), &f.3);
            prop_assert_eq!(bytes(&a) == bytes(&b), a == b);
        }
    }
}
