//! Accepts connections and serves each on its own tracked task until it ends, drains or is aborted.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use branchline_worker::{ServerTls, Wire};
use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tower::Service;

use super::screen::Screen;
use crate::app::App;

/// Headers a request may have; hyper answers 431 past it.
const MAX_HEADERS: usize = 128;
/// Bytes of a connection's read buffer, and so of a request's head.
const MAX_HEAD: usize = 64 * 1024;
/// Wait after a failed accept: it mostly means that no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Accepts on one port.
pub(super) struct Accept {
    pub(super) app: Arc<App>,
    pub(super) slots: Arc<Semaphore>,
    pub(super) drain: CancellationToken,
    pub(super) tls: Option<Arc<ServerTls>>,
}

impl Accept {
    /// Serves `service` to every connection until the drain begins; the port closes with it.
    pub(super) async fn run<S, B>(self, listener: TcpListener, service: S)
    where
        S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
            + Clone
            + Send
            + Sync
            + 'static,
        S::Future: Send,
        B: http_body::Body<Data = Bytes> + Send + 'static,
        B::Error: Into<axum::BoxError>,
    {
        let patience = self.app.options.header_timeout;
        let builder = Arc::new(builder(patience));
        loop {
            let accepted = async {
                // Taken before accepting, so that excess clients wait in the kernel's queue.
                let slot = Arc::clone(&self.slots).acquire_owned().await;
                (slot, listener.accept().await)
            };
            let (slot, outcome) = tokio::select! {
                biased;
                () = self.drain.cancelled() => return,
                accepted = accepted => accepted,
            };
            let stream = match outcome {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (drain, stop) = (self.drain.clone(), self.app.stop.clone());
            let (builder, service) = (Arc::clone(&builder), service.clone());
            let tls = self.tls.as_ref().map(|tls| tls.config());
            self.app.tracker.spawn(async move {
                let opened = tokio::select! {
                    biased;
                    () = stop.cancelled() => None,
                    () = drain.cancelled(), if tls.is_some() => None,
                    opened = open(stream, tls, patience) => opened,
                };
                if let Some(stream) = opened {
                    serve(&builder, (stream, patience), service, drain, stop).await;
                }
                drop(slot);
            });
        }
    }
}

/// The connection as the server reads it; a handshake has the time of a head. `None` if there was none.
async fn open(stream: TcpStream, tls: Option<Arc<ServerConfig>>, patience: Duration) -> Option<Wire> {
    // Without it, small stream chunks wait for the client's acknowledgement of the one before.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    let Some(config) = tls else { return Some(Wire::Plain(stream)) };
    match tokio::time::timeout(patience, TlsAcceptor::from(config).accept(stream)).await {
        Ok(Ok(stream)) => Some(Wire::Tls(Box::new(stream.into()))),
        Ok(Err(error)) => {
            tracing::debug!(%error, "a handshake failed");
            None
        }
        Err(_) => None,
    }
}

fn builder(header_timeout: Duration) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(header_timeout)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(MAX_HEAD as u32)
        .max_concurrent_streams(1024)
        .keep_alive_interval(Duration::from_secs(30));
    builder
}

async fn serve<S, B>(
    builder: &auto::Builder<TokioExecutor>,
    (stream, patience): (Wire, Duration),
    service: S,
    drain: CancellationToken,
    stop: CancellationToken,
) where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<axum::BoxError>,
{
    let stream = TokioIo::new(Screen::new(stream, patience, MAX_HEAD));
    let connection = builder.serve_connection(stream, TowerToHyperService::new(service));
    let mut connection = std::pin::pin!(connection);
    let mut draining = false;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = drain.cancelled(), if !draining => {
                draining = true;
                connection.as_mut().graceful_shutdown();
            }
            outcome = connection.as_mut() => {
                if let Err(error) = outcome {
                    tracing::debug!(error = %error, "connection ended early");
                }
                return;
            }
        }
    }
}
