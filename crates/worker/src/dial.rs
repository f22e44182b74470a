//! Connections to workers: a name is resolved, every address of it checked, and a checked one connected to, so that no
//! name can lead elsewhere between check and use. TLS where the URL says so.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};

use crate::address::{Address, is_forbidden_ip};
use crate::tls::{ClientTls, Wire};

/// How one worker is reached.
#[derive(Debug, Clone)]
pub(crate) struct Dialer {
    authority: Arc<str>,
    tls: Option<Arc<ClientTls>>,
    /// Protocol asked for in the handshake.
    alpn: &'static [u8],
}

impl Dialer {
    /// For an address of the fleet; `alpn` is `h2` or `http/1.1`.
    pub(crate) fn new(address: &Address, tls: &Arc<ClientTls>, alpn: &'static [u8]) -> Self {
        let tls = address.tls.then(|| Arc::clone(tls));
        Self { authority: address.authority.as_str().into(), tls, alpn }
    }

    /// `host:port`.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Connects and, where asked for, shakes hands. The caller limits the time.
    pub(crate) async fn connect(&self) -> io::Result<Wire> {
        let stream = tcp(&self.authority).await?;
        stream.set_nodelay(true)?;
        let Some(tls) = &self.tls else { return Ok(Wire::Plain(stream)) };
        let host = self.authority.rsplit_once(':').map_or(&*self.authority, |(host, _)| host);
        let name =
            ServerName::try_from(host.trim_matches(['[', ']']).to_owned()).map_err(io::Error::other)?;
        let mut config = (*tls.config().map_err(io::Error::other)?).clone();
        config.alpn_protocols = vec![self.alpn.to_vec()];
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        if self.alpn == b"h2" && stream.get_ref().1.alpn_protocol() != Some(b"h2") {
            return Err(io::Error::other("it does not speak HTTP/2 over TLS"));
        }
        Ok(Wire::Tls(Box::new(TlsStream::Client(stream))))
    }
}

/// Connects to one of the addresses of `host:port` where a worker may be.
pub(crate) async fn tcp(authority: &str) -> io::Result<TcpStream> {
    let found: Vec<SocketAddr> = tokio::net::lookup_host(authority).await?.collect();
    let allowed = allowed(found)?;
    TcpStream::connect(allowed.as_slice()).await
}

/// The addresses where a worker may be.
fn allowed(found: Vec<SocketAddr>) -> io::Result<Vec<SocketAddr>> {
    let count = found.len();
    let allowed: Vec<SocketAddr> =
        found.into_iter().filter(|address| !is_forbidden_ip(address.ip())).collect();
    match (allowed.is_empty(), count) {
        (false, _) => Ok(allowed),
        (true, 0) => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address")),
        (true, _) => {
            let text =
                "the name leads to link-local, multicast or metadata addresses, where no worker can be";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reaches_only_addresses_where_a_worker_may_be() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let good = at("10.0.0.1:80");
        assert_eq!(allowed(vec![at("169.254.169.254:80"), good]).unwrap(), [good]);
        for bad in ["169.254.169.254:80", "[fe80::1]:80", "[::ffff:169.254.1.1]:80", "224.0.0.1:80"] {
            assert_eq!(allowed(vec![at(bad)]).unwrap_err().kind(), io::ErrorKind::PermissionDenied, "{bad}");
        }
        assert_eq!(allowed(Vec::new()).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
