//! Workers that speak HTTP/1.1: requests and answers pass through as bytes.
//!
//! Hop-by-hop headers are the relay's business; only the request target and `host` are set here.

mod body;
mod pool;
mod probe;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwapOption;
use branchline_core::{Error, ErrorCode, Result};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::Full;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use body::ResponseBody;
use pool::{Lease, Pool};
pub(crate) use probe::watch;

use crate::address::Address;
use crate::dial::Dialer;
use crate::options::FleetOptions;
use crate::worker::Status;

/// The client of one HTTP worker.
pub struct HttpWorker {
    pool: Arc<Pool>,
    host: HeaderValue,
    name: Arc<str>,
    status: Arc<Status>,
    /// Served names; none while unknown or if the worker does not list any.
    served: ArcSwapOption<Vec<String>>,
    /// What runs there, once found out.
    runtime: OnceLock<&'static str>,
    /// Wakes the prober after a failure seen by a request.
    suspect: Notify,
}

impl HttpWorker {
    pub(crate) fn new(
        url: &str,
        address: &Address,
        options: &FleetOptions,
        status: Arc<Status>,
        tracker: TaskTracker,
        cancel: CancellationToken,
    ) -> Result<Self> {
        let host = HeaderValue::from_str(&address.authority).map_err(|_| {
            Error::invalid("worker_url", format!("worker url '{url}' has a host that no header can carry"))
        })?;
        let pool = Pool {
            dialer: Dialer::new(address, &options.tls, b"http/1.1"),
            connect_timeout: options.connect_timeout,
            idle_timeout: options.idle_timeout,
            idle_limit: options.idle_connections,
            tracker,
            cancel,
            idle: Mutex::new(VecDeque::new()),
        };
        let served = ArcSwapOption::empty();
        Ok(Self {
            pool: Arc::new(pool),
            host,
            name: url.into(),
            status,
            served,
            runtime: OnceLock::new(),
            suspect: Notify::new(),
        })
    }

    /// Names the worker lists; `None` if it takes any or has not answered yet.
    pub fn served(&self) -> Option<Arc<Vec<String>>> {
        self.served.load_full()
    }

    /// What runs there, one of [`crate::RUNTIMES`], once found out.
    pub fn runtime(&self) -> Option<&'static str> {
        self.runtime.get().copied()
    }

    /// Sends a request; its URI's path and query and its headers go out as they are, `host` is set.
    ///
    /// The answer's body streams with back pressure. A connection that the worker had closed while idle is
    /// replaced once; one that breaks under the request is not, for the worker may have begun on it. Fails with `Unavailable` if there is no connection (nothing was sent; another worker may be
    /// tried) and `UpstreamFailed` if the worker broke off before its head. Dropping the future or the body
    /// closes the connection.
    pub async fn send(&self, request: Request<Bytes>) -> Result<Response<ResponseBody>> {
        let request = self.localise(request);
        let lease = self.reach(self.pool.checkout().await)?;
        let (reused, stale) = (lease.reused, lease.stale);
        match self.exchange(lease, request.clone()).await {
            // Never sent, or sent into a connection that was being closed.
            Err(cause)
                if (reused && cause.is_canceled()) || (stale && !cause.is_parse() && !cause.is_user()) =>
            {
                let lease = self.reach(self.pool.connect().await)?;
                self.exchange(lease, request).await
            }
            outcome => outcome,
        }
        .map_err(|cause| {
            self.suspect.notify_one();
            // Clients learn what happened, not where.
            tracing::warn!(worker = %self.name, cause = %cause, "the worker broke off before answering");
            let text = "the worker broke off before answering; try again";
            Error::new(ErrorCode::UpstreamFailed, text)
        })
    }

    fn localise(&self, request: Request<Bytes>) -> Request<Full<Bytes>> {
        let (mut parts, body) = request.into_parts();
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str());
        if let Ok(uri) = target.parse() {
            parts.uri = uri;
        }
        parts.version = http::Version::HTTP_11;
        parts.headers.insert(header::HOST, self.host.clone());
        Request::from_parts(parts, Full::new(body))
    }

    async fn exchange(
        &self,
        mut lease: Lease,
        request: Request<Full<Bytes>>,
    ) -> std::result::Result<Response<ResponseBody>, hyper::Error> {
        let response = lease.sender.send_request(request).await?;
        Ok(response.map(|incoming| ResponseBody::new(incoming, lease, self.name.clone())))
    }

    /// A worker that takes no connection is down at once; the prober brings it back.
    fn reach(&self, lease: Result<Lease>) -> Result<Lease> {
        lease.inspect_err(|error| {
            self.status.set_down(&error.message);
            self.suspect.notify_one();
        })
    }
}
