//! Which headers pass between client and worker: all but those that speak of one connection.

use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::config::Options;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

const HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    KEEP_ALIVE,
    PROXY_CONNECTION,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// Headers by which parts of a fleet tell each other where to connect: only we may say that, so a client's stop here.
const PEERS: [&str; 5] = [
    "x-prefiller-",
    "x-encoder-hosts-ports",
    "x-gateway-destination-endpoint",
    "x-decoder-",
    "x-data-parallel-host-port",
];

/// Drops what concerns one connection only, with what `connection` names.
pub(super) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The headers that a worker gets for a client's.
///
/// A key of ours must not reach a worker; a client's own credential passes where the gateway asks for none.
pub(super) fn to_worker(client: &HeaderMap, options: &Options) -> HeaderMap {
    let mut headers = client.clone();
    strip_hop_by_hop(&mut headers);
    // Set anew for the body and the connection.
    for name in [HOST, CONTENT_LENGTH, EXPECT] {
        headers.remove(name);
    }
    let peers = |name: &HeaderName| PEERS.iter().any(|start| name.as_str().starts_with(start));
    let named: Vec<HeaderName> = headers.keys().filter(|name| peers(name)).cloned().collect();
    for name in named {
        headers.remove(name);
    }
    if options.is_keyed() {
        headers.remove(AUTHORIZATION);
        headers.remove(API_KEY);
    }
    if let Some(value) = worker_credential(options) {
        headers.insert(AUTHORIZATION, value);
    }
    headers
}

/// The `authorization` header made of `--worker-token`.
fn worker_credential(options: &Options) -> Option<HeaderValue> {
    bearer(options.worker_token.as_ref()?.reveal())
}

/// A token as the value of `authorization`; `None` if no header can carry it.
pub(crate) fn bearer(token: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// An event stream whose bytes can be read as such: not a compressed one.
pub(super) fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(http::header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    let stream = kind.get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"));
    stream && !headers.contains_key(http::header::CONTENT_ENCODING)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_headers_and_what_they_name_are_dropped_and_the_rest_stays_twice() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, X-Secret-Hop"),
            ("x-secret-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("x-custom", "kept"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        left.sort_unstable();
        assert_eq!(left, [("set-cookie", &b"a=1"[..]), ("set-cookie", b"b=2"), ("x-custom", b"kept")]);
    }
}
