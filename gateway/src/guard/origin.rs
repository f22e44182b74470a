//! Host and Origin checks of admin routes, against pages that reach a local gateway through a browser.
//!
//! A rebound DNS name shows in `Host`; a page of another site shows in `Origin`. Callers with a key of
//! ours skip the `Host` check, since such a page has none.

use std::net::IpAddr;

use branchline_core::{Error, ErrorCode, Result};
use http::HeaderMap;
use http::header::{HOST, ORIGIN};

use super::exposure::is_loopback;

/// Checks one request to an admin route. `configured` is the `--host`, `authority` that of an HTTP/2 URI.
///
/// # Errors
/// `PermissionDenied`, naming the header and what to send.
pub(super) fn check(
    headers: &HeaderMap,
    authority: Option<&str>,
    configured: &str,
    keyed: bool,
) -> Result<()> {
    let host = match headers.get(HOST) {
        Some(value) => value.to_str().unwrap_or_default(),
        None => authority.unwrap_or_default(),
    };
    if !keyed && !names_us(host_of(host), configured) {
        let message = format!(
            "host '{host}' is not a name of this gateway; address it by its IP address, as localhost, or by the --host it was given"
        );
        return Err(Error::new(ErrorCode::PermissionDenied, message).with_field("host"));
    }
    // A page's picture or link sends no Origin, but browsers say whose request it is (https://w3.org/TR/fetch-metadata).
    if let Some(site) = headers.get("sec-fetch-site")
        && !matches!(site.as_bytes(), b"same-origin" | b"none")
    {
        let site = site.to_str().unwrap_or_default();
        let message =
            format!("sec-fetch-site is '{site}'; admin calls from web pages of another site are refused");
        return Err(Error::new(ErrorCode::PermissionDenied, message).with_field("sec-fetch-site"));
    }
    let Some(origin) = headers.get(ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let same = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    match same.is_some_and(|site| site.eq_ignore_ascii_case(host)) {
        true => Ok(()),
        false => {
            let message =
                format!("origin '{origin}' is another site; admin calls from web pages are refused");
            Err(Error::new(ErrorCode::PermissionDenied, message).with_field("origin"))
        }
    }
}

fn names_us(host: &str, configured: &str) -> bool {
    // An address can't be rebound; but a gateway on loopback knows that it is only called by loopback ones.
    let literal = host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    is_loopback(host) || host.eq_ignore_ascii_case(configured) || (literal && !is_loopback(configured))
}

/// The host of `host[:port]`, brackets of IPv6 kept.
fn host_of(authority: &str) -> &str {
    match authority.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(host: &'static str, origin: Option<&'static str>, configured: &str, keyed: bool) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().expect("a header"));
        if let Some(origin) = origin {
            headers.insert(ORIGIN, origin.parse().expect("a header"));
        }
        check(&headers, None, configured, keyed).is_ok()
    }

    #[test]
    fn local_names_are_accepted_and_rebound_ones_refused() {
        for host in ["127.0.0.1:30000", "localhost", "localhost:9", "[::1]:30000"] {
            assert!(verdict(host, None, "127.0.0.1", false), "{host}");
        }
        for host in ["evil.example", "evil.example:30000", "127.0.0.1.evil.example", "", "10.0.0.1"] {
            assert!(!verdict(host, None, "127.0.0.1", false), "{host}");
        }
    }

    #[test]
    fn a_gateway_on_all_addresses_is_called_by_any_address_but_no_foreign_name() {
        assert!(verdict("10.0.0.1:30000", None, "0.0.0.0", false));
        assert!(!verdict("evil.example", None, "0.0.0.0", false));
        assert!(verdict("router.internal", None, "router.internal", false));
        assert!(verdict("router.internal", None, "0.0.0.0", true));
    }

    #[test]
    fn a_foreign_pages_picture_or_link_is_refused_even_with_a_key() {
        for (site, allowed) in
            [("same-origin", true), ("none", true), ("cross-site", false), ("same-site", false), ("x", false)]
        {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, "127.0.0.1:8080".parse().expect("a header"));
            headers.insert("sec-fetch-site", site.parse().expect("a header"));
            assert_eq!(check(&headers, None, "127.0.0.1", true).is_ok(), allowed, "{site}");
        }
    }

    #[test]
    fn a_foreign_origin_is_refused_even_with_a_key() {
        assert!(verdict("localhost:1", Some("http://localhost:1"), "127.0.0.1", false));
        for origin in ["https://evil.example", "null", "http://localhost:2", "file://localhost:1"] {
            assert!(!verdict("localhost:1", Some(origin), "127.0.0.1", true), "{origin}");
        }
    }
}
