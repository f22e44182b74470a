//! A gateway's life: bind, serve, drain with a deadline, abort what is left.
//!
//! Both the binary and the Python wheel run [`Server`]; only the stop signal differs. Ports open after
//! every option is known to be good, and close first when a stop is asked for.

mod connection;
mod framing;
mod listen;
mod screen;
mod signals;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use branchline_core::Error;
use branchline_telemetry::{LogFormat, init_logging};
use branchline_worker::ServerTls;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::config::Options;
use crate::http;

pub use framing::Fault;
pub use signals::StopSignals;

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A port can't be had.
    #[error("{host}:{port} can't be listened on: {reason}")]
    Bind {
        /// As configured.
        host: String,
        /// As configured.
        port: u16,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A part could not be built.
    #[error(transparent)]
    Build(#[from] Error),
}

/// A gateway whose ports are open and that serves as soon as it is run.
pub struct Server {
    app: Arc<App>,
    listener: TcpListener,
    metrics_listener: Option<TcpListener>,
    admin_listener: Option<TcpListener>,
    tls: Option<Arc<ServerTls>>,
}

/// Connections of operators at once: clients that take all of theirs must not lock operators out.
const OPERATOR_CONNECTIONS: usize = 256;

/// The runtime that serves; `threads` 0 takes one a CPU.
///
/// # Errors
/// If the system gives no threads.
pub fn runtime(threads: usize) -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if threads > 0 {
        builder.worker_threads(threads);
    }
    builder.thread_name("router").enable_all().build()
}

/// Starts logging to standard error as the options say; a process that logs already goes on as it does.
///
/// # Errors
/// `Internal` if the level can't be made into a filter.
pub fn start_logging(options: &Options) -> branchline_core::Result<()> {
    let format = if options.log_json { LogFormat::Json } else { LogFormat::Text };
    init_logging(options.log_level, format).map(drop)
}

/// How long aborted connections get to notice that they were.
const ABORT_GRACE: Duration = Duration::from_secs(2);

impl Server {
    /// Opens the ports and builds the parts.
    ///
    /// # Errors
    /// [`StartError`], before anything is served.
    pub async fn bind(options: Options) -> Result<Self, StartError> {
        let listener = listen::open(&options.host, options.port, "--port").await?;
        let metrics_listener = match options.prometheus_port {
            Some(port) => Some(listen::open(&options.prometheus_host, port, "--prometheus-port").await?),
            None => None,
        };
        let admin_listener = match options.admin_port {
            Some(port) => Some(listen::open(&options.admin_host, port, "--admin-port").await?),
            None => None,
        };
        let pair = options.tls_cert_path.clone().zip(options.tls_key_path.clone());
        let ca = options.tls_client_ca_path.clone();
        let tls = pair.map(|(cert, key)| ServerTls::load(cert, key, ca)).transpose()?;
        let app = App::build(options)?;
        // Before anything is served: a policy must not be missing for the first requests.
        app.plugins.restore_all().await?;
        app.workers.discover(&app.options, &app.fleet, &app.metrics).await?;
        Ok(Self { app, listener, metrics_listener, admin_listener, tls })
    }

    /// The address that clients reach, with the port that was taken.
    ///
    /// # Errors
    /// If the system does not know it.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Address of the listener for /metrics alone.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics_listener.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// Address of the operators' listener, if they have one of their own.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin_listener.as_ref().and_then(|listener| listener.local_addr().ok())
    }

    /// The parts, for tests and for the Python wheel.
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Serves until `stop` resolves, then drains: no new connection, running requests up to the drain
    /// timeout, then none at all.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { app, listener, metrics_listener, admin_listener, tls } = self;
        let address =
            listener.local_addr().map_or_else(|_| app.options.host.clone(), |address| address.to_string());
        let scheme = if tls.is_some() { "https" } else { "http" };
        tracing::info!(
            url = format!("{scheme}://{address}"),
            workers = app.options.worker_urls.len(),
            "serving"
        );
        let drain = CancellationToken::new();
        let slots = Arc::new(Semaphore::new(app.options.max_connections));
        let accept = |slots: &Arc<Semaphore>, tls: Option<&Arc<ServerTls>>| connection::Accept {
            app: Arc::clone(&app),
            slots: Arc::clone(slots),
            drain: drain.clone(),
            tls: tls.cloned(),
        };
        app.tracker.spawn(accept(&slots, tls.as_ref()).run(listener, http::service(&app)));
        if let Some(listener) = metrics_listener {
            app.tracker.spawn(accept(&slots, None).run(listener, http::metrics_service(&app)));
        }
        if let Some(listener) = admin_listener {
            if let Ok(address) = listener.local_addr() {
                tracing::info!(url = format!("{scheme}://{address}"), "operators are served apart");
            }
            let slots = Arc::new(Semaphore::new(OPERATOR_CONNECTIONS));
            app.tracker.spawn(accept(&slots, tls.as_ref()).run(listener, http::admin_service(&app)));
        }
        if let Some(tls) = tls {
            app.tracker.spawn(tls.follow(Arc::clone(&app.metrics), drain.clone()));
        }
        app.tracker.spawn(Arc::clone(&app.worker_tls).follow(Arc::clone(&app.metrics), drain.clone()));
        if let Some(keys) = app.key_file.clone() {
            app.tracker.spawn(keys.follow(Arc::clone(&app.metrics), drain.clone()));
        }
        if let Some(admission) = app.admission.clone() {
            app.tracker.spawn(admission.follow(drain.clone()));
        }
        stop.await;
        app.begin_drain();
        drain.cancel();
        app.tracker.close();
        tracing::info!(timeout = ?app.options.drain_timeout, "draining");
        if timeout(app.options.drain_timeout, app.tracker.wait()).await.is_err() {
            tracing::warn!(
                connections = app.tracker.len(),
                "drain deadline passed, ending what still runs with an error"
            );
            app.ending.cancel();
            // Streams get the time to say so; a client that does not read must not hold the stop.
            let _ = timeout(ABORT_GRACE, app.tracker.wait()).await;
        }
        app.stop.cancel();
        // Nothing may outlive a stop, not even a task that misses its cancellation.
        if timeout(ABORT_GRACE, app.tracker.wait()).await.is_err() {
            tracing::error!(tasks = app.tracker.len(), "tasks did not end");
        }
        app.fleet.shutdown().await;
        if let Some(traces) = app.traces.clone() {
            // It blocks while this runtime's threads post the last spans.
            let closed = tokio::task::spawn_blocking(move || traces.close()).await;
            if let Err(error) = closed {
                tracing::warn!(%error, "the last spans were not sent");
            }
        }
        tracing::info!("stopped");
    }
}
