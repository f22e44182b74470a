//! Worker addresses as operators write them.

use std::net::{IpAddr, Ipv6Addr};

use branchline_core::{Error, Result};

use crate::worker::Transport;

/// A parsed `grpc://host:port` or `http://host:port`, `grpcs` and `https` included.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// How to speak to it.
    pub(crate) transport: Transport,
    /// Within TLS.
    pub(crate) tls: bool,
    /// `host:port`.
    pub(crate) authority: String,
}

/// Hosts that no registration may make us call: machines' metadata services, and addresses of no single machine.
fn is_forbidden(host: &str) -> bool {
    let bare = host.trim_matches(['[', ']']).trim_end_matches('.').to_ascii_lowercase();
    match bare.parse::<IpAddr>() {
        Ok(address) => is_forbidden_ip(address),
        // Resolvers read numbers as addresses in other notations.
        Err(_) => {
            let last = bare.rsplit('.').next().unwrap_or_default();
            let numeric = last.starts_with("0x") || last.bytes().all(|byte| byte.is_ascii_digit());
            numeric || bare == "metadata" || bare == "metadata.google.internal"
        }
    }
}

/// The same of an address, whatever name led to it.
pub(crate) fn is_forbidden_ip(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => address.is_link_local() || address.is_multicast() || address.is_broadcast(),
        IpAddr::V6(address) => {
            let metadata = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
            address.is_unicast_link_local() || address.is_multicast() || address == metadata
        }
    }
}

/// Checks a `host:port` as its URL would be checked: what has no scheme is spoken to before the fleet sees it.
///
/// # Errors
/// `InvalidArgument` naming `url`.
pub fn check_address(address: &str) -> Result<()> {
    Address::parse(&format!("grpc://{address}")).map(drop).map_err(|error| error.with_field("url"))
}

impl Address {
    /// Parses `url`; a path other than `/` is refused.
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let refuse = |why: &str| {
            Err(Error::invalid(
                "worker_url",
                format!(
                    "worker url '{url}' {why}; write grpc://host:port for an engine or http://host:port for another server, \
                     grpcs:// or https:// over TLS"
                ),
            ))
        };
        let (transport, tls, rest) = match url.split_once("://") {
            Some(("grpc", rest)) => (Transport::Grpc, false, rest),
            Some(("http", rest)) => (Transport::Http, false, rest),
            Some(("grpcs", rest)) => (Transport::Grpc, true, rest),
            Some(("https", rest)) => (Transport::Http, true, rest),
            Some((scheme, _)) => return refuse(&format!("has the unsupported scheme '{scheme}'")),
            None => return refuse("has no scheme"),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let Ok(authority) = rest.parse::<http::uri::Authority>() else {
            return refuse("has no valid host and port, or has a path");
        };
        if authority.host().is_empty() || rest.contains('@') {
            return refuse("has no host, or has credentials");
        }
        if is_forbidden(authority.host()) {
            return refuse("is a link-local, multicast or metadata address, where no worker can be");
        }
        let authority = match (authority.port_u16(), transport) {
            (Some(_), _) => authority.to_string(),
            (None, Transport::Http) => format!("{authority}:{}", if tls { 443 } else { 80 }),
            (None, Transport::Grpc) => return refuse("has no port"),
        };
        Ok(Self { transport, tls, authority })
    }

    /// Refuses a `connection_mode` that contradicts the URL.
    pub(crate) fn agrees(&self, mode: Option<&str>) -> Result<()> {
        match mode {
            Some(mode) if mode != self.transport.to_string() => Err(Error::invalid(
                "connection_mode",
                format!(
                    "connection_mode is '{mode}' and the url says {}; leave one of the two out",
                    self.transport
                ),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_a_transport_and_an_authority() {
        let parsed = |url| Address::parse(url).map(|a| (a.transport, a.authority));
        assert_eq!(parsed("grpc://127.0.0.1:9000"), Ok((Transport::Grpc, "127.0.0.1:9000".into())));
        assert_eq!(parsed("http://worker-a:8000/"), Ok((Transport::Http, "worker-a:8000".into())));
        assert_eq!(parsed("http://worker-a"), Ok((Transport::Http, "worker-a:80".into())));
        assert_eq!(parsed("https://worker-a"), Ok((Transport::Http, "worker-a:443".into())));
        assert_eq!(parsed("grpcs://worker-a:9000"), Ok((Transport::Grpc, "worker-a:9000".into())));
        assert!(Address::parse("https://a").unwrap().tls && !Address::parse("http://a").unwrap().tls);
        assert_eq!(parsed("grpc://[::1]:9000"), Ok((Transport::Grpc, "[::1]:9000".into())));
    }

    #[test]
    fn a_bad_address_is_refused_with_the_forms_that_work() {
        for url in [
            "",
            "localhost:1",
            "https://a:1/v1",
            "grpcs://a",
            "ftp://a:1",
            "grpc://a",
            "grpc://",
            "http://a:1/v1",
            "http://u:p@a:1",
            "grpc://a:99999",
        ] {
            let error = Address::parse(url).unwrap_err();
            assert!(error.message.contains("grpc://host:port"), "{url}: {}", error.message);
            assert!(error.message.contains(&format!("'{url}'")), "{url}: {}", error.message);
        }
    }

    #[test]
    fn addresses_where_no_worker_can_be_are_refused_in_any_notation() {
        for host in [
            "169.254.169.254",
            "[fe80::1]",
            "[::ffff:169.254.169.254]",
            "[fd00:ec2::254]",
            "224.0.0.1",
            "2852039166",
            "0xa9fea9fe",
            "169.254.43518",
            "metadata.google.internal.",
            "255.255.255.255",
        ] {
            let error = Address::parse(&format!("http://{host}:80")).expect_err(host);
            assert!(error.message.contains("where no worker can be"), "{error}");
            let bare = check_address(&format!("{host}:80")).expect_err(host);
            assert_eq!(
                (bare.field.as_deref(), bare.message.contains("no worker can be")),
                (Some("url"), true)
            );
        }
        for host in ["127.0.0.1", "10.0.0.1", "[::1]", "localhost", "worker-0", "w.example.org"] {
            assert!(Address::parse(&format!("http://{host}:80")).is_ok(), "{host}");
            assert!(check_address(&format!("{host}:80")).is_ok(), "{host}");
        }
    }
}
