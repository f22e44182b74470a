//! What a request says it belongs to: a header of the operator's list, else a member of the body. Policies that keep
//! sessions together choose by its hash.

use http::HeaderMap;
use sha2::{Digest as _, Sha256};

use crate::config::Options;

/// The hash of the request's session or user; the same at every gateway. `None` if it names none.
pub(super) fn session_key(
    headers: &HeaderMap,
    options: &Options,
    body: impl FnOnce() -> Option<String>,
) -> Option<u64> {
    let named = options.session_headers.0.iter().find_map(|name| headers.get(name.as_str()));
    match named {
        Some(value) => Some(hash(value.as_bytes())),
        None => body().map(|text| hash(text.as_bytes())),
    }
}

/// Not for secrecy: clients must not be able to choose keys that all fall on one worker.
fn hash(text: &[u8]) -> u64 {
    let digest = Sha256::digest(text);
    digest.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::resolve_arguments;

    #[test]
    fn the_first_header_of_the_list_comes_before_the_body() {
        let options = resolve_arguments(Vec::new(), None, std::iter::empty()).unwrap();
        let mut headers = HeaderMap::new();
        let key = |headers: &HeaderMap| session_key(headers, &options, || Some("body".to_owned()));
        assert_eq!(key(&headers), Some(hash(b"body")));
        headers.insert("x-session-id", http::HeaderValue::from_static("s"));
        assert_eq!(key(&headers), Some(hash(b"s")));
        headers.insert("x-branchline-session", http::HeaderValue::from_static("b"));
        assert_eq!(key(&headers), Some(hash(b"b")));
        assert_eq!(session_key(&HeaderMap::new(), &options, || None), None);
    }
}
