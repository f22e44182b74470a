//! TLS of this process: certificates from PEM files, read again when they change, and the stream that is either plain
//! or not. Knows nothing of HTTP, gRPC or options.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use branchline_core::{Error, Result};
use branchline_telemetry::Metrics;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use tokio_util::sync::CancellationToken;

/// How often files are looked at again.
const LOOK: Duration = Duration::from_secs(1);

/// A connection of either end.
#[derive(Debug)]
pub enum Wire {
    /// Bytes as they are.
    Plain(TcpStream),
    /// Within TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Wire::Plain(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Wire::Tls(stream) => {
                let $stream = Pin::new(stream.as_mut());
                $call
            }
        }
    };
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => stream.poll_write_vectored(cx, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => stream.poll_shutdown(cx))
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn fault(field: &str, path: &Path, cause: &dyn std::fmt::Display) -> Error {
    Error::invalid(field, format!("{field}: {} can't be used: {cause}; give a PEM file", path.display()))
}

fn read(field: &str, path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|cause| fault(field, path, &cause))
}

fn chain(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = read(field, path)?;
    let found: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    match found {
        Ok(chain) if !chain.is_empty() => Ok(chain),
        Ok(_) => Err(fault(field, path, &"it holds no certificate")),
        Err(cause) => Err(fault(field, path, &cause)),
    }
}

fn key(field: &str, path: &Path) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(&read(field, path)?).map_err(|cause| fault(field, path, &cause))
}

fn roots(field: &str, paths: &[PathBuf]) -> Result<RootCertStore> {
    let mut store = RootCertStore::empty();
    for path in paths {
        for certificate in chain(field, path)? {
            store.add(certificate).map_err(|cause| fault(field, path, &cause))?;
        }
    }
    Ok(store)
}

/// A certificate to serve with, and whom it is served to.
#[derive(Debug)]
pub struct ServerTls {
    cert: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
    current: ArcSwap<ServerConfig>,
}

impl ServerTls {
    /// Reads the files. With `client_ca`, clients must show a certificate that it has signed.
    ///
    /// # Errors
    /// `InvalidArgument` naming the option and the file.
    pub fn load(cert: PathBuf, key: PathBuf, client_ca: Option<PathBuf>) -> Result<Arc<Self>> {
        let config = Self::read(&cert, &key, client_ca.as_deref())?;
        Ok(Arc::new(Self { cert, key, client_ca, current: ArcSwap::from_pointee(config) }))
    }

    /// What the next handshake is made with.
    pub fn config(&self) -> Arc<ServerConfig> {
        self.current.load_full()
    }

    fn read(cert: &Path, key_path: &Path, client_ca: Option<&Path>) -> Result<ServerConfig> {
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|cause| Error::internal(format!("TLS has no protocol versions: {cause}")))?;
        let builder = match client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let field = "tls_client_ca_path";
                let store = roots(field, &[path.to_owned()])?;
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(store), provider()).build();
                builder.with_client_cert_verifier(verifier.map_err(|cause| fault(field, path, &cause))?)
            }
        };
        let chain = chain("tls_cert_path", cert)?;
        let secret = key("tls_key_path", key_path)?;
        let made = builder.with_single_cert(chain, secret);
        let mut config = made.map_err(|cause| fault("tls_cert_path", cert, &cause))?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(config)
    }

    /// Reads the files again whenever they change, until cancelled. Files that can't be used leave the last ones in force.
    pub async fn follow(self: Arc<Self>, metrics: Arc<Metrics>, stop: CancellationToken) {
        let files = [Some(&self.cert), Some(&self.key), self.client_ca.as_ref()];
        let files = files.into_iter().flatten().cloned().collect();
        follow_files(files, "certificates", &metrics, stop, || {
            self.current.store(Arc::new(Self::read(&self.cert, &self.key, self.client_ca.as_deref())?));
            Ok(())
        })
        .await;
    }
}

/// Files that say which workers are trusted, and what is shown to them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// Authorities; empty for the system's.
    pub ca: Vec<PathBuf>,
    /// The chain that is shown, if any.
    pub cert: Option<PathBuf>,
    /// Its key.
    pub key: Option<PathBuf>,
}

/// How TLS workers are spoken to. The default trusts the system's authorities and reads them at the first use.
#[derive(Debug, Default)]
pub struct ClientTls {
    files: ClientFiles,
    current: ArcSwapOption<ClientConfig>,
}

impl ClientTls {
    /// Reads the files, if there are any.
    ///
    /// # Errors
    /// `InvalidArgument` naming the option and the file.
    pub fn load(files: ClientFiles) -> Result<Arc<Self>> {
        let tls = Self { files, current: ArcSwapOption::empty() };
        if tls.files != ClientFiles::default() {
            tls.current.store(Some(Arc::new(tls.read()?)));
        }
        Ok(Arc::new(tls))
    }

    /// What the next handshake is made with.
    ///
    /// # Errors
    /// If the system's authorities can't be read.
    pub fn config(&self) -> Result<Arc<ClientConfig>> {
        if let Some(config) = self.current.load_full() {
            return Ok(config);
        }
        let config = Arc::new(self.read()?);
        self.current.store(Some(Arc::clone(&config)));
        Ok(config)
    }

    fn read(&self) -> Result<ClientConfig> {
        let store = match self.files.ca.is_empty() {
            false => roots("ca_cert_path", &self.files.ca)?,
            true => {
                let mut store = RootCertStore::empty();
                store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                store
            }
        };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|cause| Error::internal(format!("TLS has no protocol versions: {cause}")))?
            .with_root_certificates(store);
        match (&self.files.cert, &self.files.key) {
            (Some(cert), Some(path)) => {
                let (chain, secret) = (chain("client_cert_path", cert)?, key("client_key_path", path)?);
                let made = builder.with_client_auth_cert(chain, secret);
                made.map_err(|cause| fault("client_cert_path", cert, &cause))
            }
            _ => Ok(builder.with_no_client_auth()),
        }
    }

    /// As [`ServerTls::follow`]; ends at once if there are no files.
    pub async fn follow(self: Arc<Self>, metrics: Arc<Metrics>, stop: CancellationToken) {
        let files: Vec<PathBuf> =
            self.files.ca.iter().chain(&self.files.cert).chain(&self.files.key).cloned().collect();
        if files.is_empty() {
            return;
        }
        follow_files(files, "certificates", &metrics, stop, || {
            self.current.store(Some(Arc::new(self.read()?)));
            Ok(())
        })
        .await;
    }
}

/// Looks at files every second: calls `change` when their bytes have changed, and again until it succeeds. Each failure is
/// logged and counted once; `what` names them in the log and in `branchline_router_file_reads`.
pub async fn follow_files(
    files: Vec<PathBuf>,
    what: &'static str,
    metrics: &Metrics,
    stop: CancellationToken,
    change: impl Fn() -> Result<()>,
) {
    let look = || files.iter().map(|path| std::fs::read(path).ok()).collect::<Vec<_>>();
    let count = |outcome| metrics.file_reads.with([what, outcome]).inc();
    let (mut good, mut told) = (None, None);
    loop {
        let seen = look();
        if good.as_ref() != Some(&seen) {
            match change() {
                Ok(()) => {
                    if good.is_some() {
                        count("used");
                        tracing::info!(?files, "{what} were read again");
                    }
                    good = Some(seen);
                }
                // The other half of a pair may be on its way.
                Err(error) if told.as_ref() != Some(&seen) => {
                    count("refused");
                    tracing::warn!(%error, "changed {what} can't be used; the last ones stay");
                    told = Some(seen);
                }
                Err(_) => {}
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}
