//! One request to a gateway, over TLS where its URL says so.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use branchline_worker::{ClientFiles, ClientTls, Wire};
use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};

/// A gateway's address and whom to believe that it is there.
pub(super) struct Dial {
    url: Uri,
    tls: Arc<ClientTls>,
}

impl Dial {
    /// `ca` is a file of authorities; the system's without it.
    pub(super) fn new(url: &str, ca: Option<PathBuf>) -> Result<Self, String> {
        let parsed = url.parse::<Uri>().ok().filter(|url| {
            matches!(url.scheme_str(), Some("http" | "https"))
                && url.host().is_some_and(|host| !host.is_empty())
        });
        let url = parsed.ok_or_else(|| {
            format!(
                "--url {url} can't be used; give one like http://127.0.0.1:30000 or https://gateway.example"
            )
        })?;
        let files = ClientFiles { ca: ca.into_iter().collect(), ..ClientFiles::default() };
        Ok(Self { url, tls: ClientTls::load(files).map_err(|error| error.message)? })
    }

    async fn connect(&self) -> io::Result<Wire> {
        let secure = self.url.scheme_str() == Some("https");
        let host = self.url.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = self.url.port_u16().unwrap_or(if secure { 443 } else { 80 });
        let stream = TcpStream::connect((host, port)).await?;
        if !secure {
            return Ok(Wire::Plain(stream));
        }
        let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
        let config = self.tls.config().map_err(io::Error::other)?;
        let stream = TlsConnector::from(config).connect(name, stream).await?;
        Ok(Wire::Tls(Box::new(TlsStream::Client(stream))))
    }

    /// Sends a request whose URI is a path; status and body of the answer.
    pub(super) async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, Bytes), String> {
        let away = |error: &dyn std::fmt::Display| {
            let url = &self.url;
            format!(
                "no gateway answers at {url} ({error}); give --url, and --ca-cert for an authority of your own"
            )
        };
        let wire = self.connect().await.map_err(|error| away(&error))?;
        let shaken = hyper::client::conn::http1::handshake(TokioIo::new(wire)).await;
        let (mut sender, connection) = shaken.map_err(|error| away(&error))?;
        if let Some(authority) = self.url.authority().and_then(|authority| authority.as_str().parse().ok()) {
            request.headers_mut().insert(header::HOST, authority);
        }
        let exchange = async move {
            let answer = sender.send_request(request).await?;
            let status = answer.status();
            Ok::<_, hyper::Error>((status, answer.into_body().collect().await?.to_bytes()))
        };
        // What went wrong with the connection, the exchange tells.
        let (outcome, _) = tokio::join!(exchange, connection);
        outcome.map_err(|error| away(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_url_of_http_can_be_dialled() {
        for url in ["http://127.0.0.1:30000", "https://gateway.example", "http://[::1]:1"] {
            assert!(Dial::new(url, None).is_ok(), "{url}");
        }
        for url in ["127.0.0.1:30000", "ftp://x", "/wasm", "", "http://"] {
            let error = Dial::new(url, None).err().expect(url);
            assert!(error.contains("--url") && error.contains("http://127.0.0.1:30000"), "{error}");
        }
        let missing = Dial::new("https://x", Some("/nowhere.pem".into())).err().expect("no such file");
        assert!(missing.contains("/nowhere.pem"), "{missing}");
    }
}
