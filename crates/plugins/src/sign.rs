//! Signed modules: whose signature makes a module's bytes acceptable. Ed25519 over the bytes as they are.
//!
//! Covers the code, not its settings: what a module may do is said by whoever loads it, within the operator's options.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_core::{Error, ErrorCode, Result};
use ring::signature::{ED25519, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

/// A public key that modules may be signed with: 32 bytes, written in base64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrustedKey([u8; 32]);

impl std::str::FromStr for TrustedKey {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bytes = STANDARD.decode(text.trim()).ok().and_then(|bytes| bytes.try_into().ok());
        bytes.map(Self).ok_or_else(|| {
            format!("'{text}' is no Ed25519 public key; give its 32 bytes in base64, 44 characters")
        })
    }
}

/// A signature, written in base64.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Signature(String);

impl From<String> for Signature {
    fn from(text: String) -> Self {
        Self(text)
    }
}

/// The bytes of a module with the signature that came with them.
#[derive(Debug, Clone)]
pub struct Upload {
    /// The component.
    pub bytes: Vec<u8>,
    /// Its signature, if there was one.
    pub signature: Option<Signature>,
    /// The file of this machine that they were read from, as it was named.
    pub origin: Option<String>,
}

impl From<Vec<u8>> for Upload {
    fn from(bytes: Vec<u8>) -> Self {
        Self { bytes, signature: None, origin: None }
    }
}

fn refused(words: &str) -> Error {
    Error::new(ErrorCode::PermissionDenied, words).with_field("signature")
}

/// Whether one of the keys has signed the bytes; always, if there are no keys.
///
/// # Errors
/// `PermissionDenied`, saying whether the signature is missing or wrong.
pub(crate) fn check(keys: &[TrustedKey], bytes: &[u8], signature: Option<&Signature>) -> Result<()> {
    if keys.is_empty() {
        return Ok(());
    }
    let Some(Signature(text)) = signature else {
        return Err(refused("the module is not signed; send a `signature` by a key of --wasm-trusted-keys"));
    };
    let signature = STANDARD.decode(text.trim()).unwrap_or_default();
    let fits = |key: &TrustedKey| UnparsedPublicKey::new(&ED25519, key.0).verify(bytes, &signature).is_ok();
    match keys.iter().any(fits) {
        true => Ok(()),
        false => Err(refused(
            "the module's `signature` is of none of --wasm-trusted-keys, or of other bytes; sign these, in base64",
        )),
    }
}

#[cfg(test)]
mod tests {
    use ring::signature::{Ed25519KeyPair, KeyPair as _};

    use super::*;

    fn pair(seed: u8) -> (Ed25519KeyPair, TrustedKey) {
        let pair = Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).expect("a seed");
        let text = STANDARD.encode(pair.public_key());
        let key = text.parse().expect("a key");
        (pair, key)
    }

    fn sign(pair: &Ed25519KeyPair, bytes: &[u8]) -> Signature {
        Signature(STANDARD.encode(pair.sign(bytes)))
    }

    #[test]
    fn bytes_are_good_if_any_trusted_key_has_signed_them_as_they_are() {
        let ((one, first), (other, second), (stranger, _)) = (pair(1), pair(2), pair(3));
        let keys = [first, second];
        for pair in [&one, &other] {
            assert!(check(&keys, b"module", Some(&sign(pair, b"module"))).is_ok());
            assert!(check(&keys, b"modulE", Some(&sign(pair, b"module"))).is_err(), "other bytes");
        }
        for signature in [sign(&stranger, b"module"), Signature("§".to_owned()), Signature(String::new())] {
            let error = check(&keys, b"module", Some(&signature)).expect_err("nobody's");
            let told = (error.code, error.field.as_deref());
            assert_eq!(told, (ErrorCode::PermissionDenied, Some("signature")));
        }
        let unsigned = check(&keys, b"module", None).expect_err("unsigned");
        assert!(unsigned.message.contains("not signed") && unsigned.message.contains("--wasm-trusted-keys"));
    }

    #[test]
    fn without_keys_nothing_has_to_be_signed() {
        assert!(check(&[], b"module", None).is_ok());
        assert!(check(&[], b"module", Some(&Signature("nonsense".to_owned()))).is_ok());
    }

    /// RFC 8032, section 7.1, test 2.
    #[test]
    fn the_published_vector_verifies() {
        let bytes = |hex: &str| -> Vec<u8> {
            (0..hex.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex"))
                .collect()
        };
        let key = bytes("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c");
        let key: TrustedKey = STANDARD.encode(key).parse().expect("a key");
        let signature = "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da\
                         085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00";
        let signature = Signature(STANDARD.encode(bytes(signature)));
        assert!(check(&[key], &[0x72], Some(&signature)).is_ok());
        assert!(check(&[key], &[0x73], Some(&signature)).is_err());
    }

    #[test]
    fn what_is_no_key_is_refused_with_its_form() {
        for text in ["", "abc", "AAAA", &STANDARD.encode([0; 33])] {
            let error = text.parse::<TrustedKey>().expect_err(text);
            assert!(error.contains("44 characters"), "{error}");
        }
    }
}
