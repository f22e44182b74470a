//! One router: options on construction, a runtime of its own while it runs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use branchline_gateway::config::{Fault, resolve_arguments};
use branchline_gateway::http::InProcess;
use branchline_gateway::lifecycle::{Server, runtime, start_logging};
use branchline_gateway::{App, Options};
use bytes::Bytes;
use http::Request;
use pyo3::prelude::*;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::call::NativeCall;
use crate::errors::{ConfigError, ForkError, RouterError, StartError, StateError};

struct Running {
    runtime: Runtime,
    stop: oneshot::Sender<()>,
    server: JoinHandle<()>,
    address: String,
    app: Arc<App>,
    service: InProcess,
}

/// A router with its options. Not shared between processes.
#[pyclass(module = "branchline_router._native")]
pub(crate) struct NativeRouter {
    options: Options,
    running: Option<Running>,
    process: u32,
}

#[pymethods]
impl NativeRouter {
    /// Resolves the options: arguments over environment over file.
    #[new]
    #[pyo3(signature = (arguments, config=None))]
    fn new(arguments: Vec<(String, Vec<String>)>, config: Option<PathBuf>) -> PyResult<Self> {
        let environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let options = resolve_arguments(arguments, config.as_deref(), environment).map_err(|faults| {
            ConfigError::new_err(faults.iter().map(Fault::to_string).collect::<Vec<_>>().join("\n"))
        })?;
        Ok(Self { options, running: None, process: std::process::id() })
    }

    /// Opens the port and serves in the background; answers the URL. Blocks, without the GIL, until it listens.
    fn start(&mut self, py: Python<'_>) -> PyResult<String> {
        self.check_process()?;
        if self.running.is_some() {
            return Err(StateError::new_err("the router is running already; stop it first"));
        }
        let options = self.options.clone();
        let running = py.detach(|| begin(options))?;
        let url = running.address.clone();
        self.running = Some(running);
        Ok(url)
    }

    /// Drains and stops. Blocks, without the GIL, until the last request has ended or was aborted.
    fn stop(&mut self, py: Python<'_>) -> PyResult<()> {
        self.check_process()?;
        let Some(Running { runtime, stop, server, .. }) = self.running.take() else { return Ok(()) };
        drop(stop);
        py.detach(|| {
            let ended = runtime.block_on(server);
            runtime.shutdown_timeout(Duration::from_secs(1));
            ended.map_err(|error| RouterError::new_err(format!("the router ended badly: {error}")))
        })
    }

    /// Sends a request without a socket; the callback gets (error, (status, headers)).
    fn send(&self, method: &str, path: &str, body: Vec<u8>, callback: Py<PyAny>) -> PyResult<NativeCall> {
        self.check_process()?;
        let Some(running) = &self.running else {
            return Err(StateError::new_err("the router does not run; start it first"));
        };
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = request
            .body(Bytes::from(body))
            .map_err(|error| RouterError::new_err(format!("'{method} {path}' is no request: {error}")))?;
        let handle = running.runtime.handle().clone();
        Ok(NativeCall::start(&running.app, running.service.clone(), handle, request, callback))
    }

    /// The URL while it runs.
    #[getter]
    fn url(&self) -> Option<String> {
        self.running.as_ref().map(|running| running.address.clone())
    }
}

impl NativeRouter {
    fn check_process(&self) -> PyResult<()> {
        match self.process == std::process::id() {
            true => Ok(()),
            false => {
                Err(ForkError::new_err("the router was made before a fork; make a new one in this process"))
            }
        }
    }
}

impl Drop for NativeRouter {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        if self.process == std::process::id() {
            // Nobody waits any more: end it without a drain.
            running.runtime.shutdown_background();
        } else {
            // Its threads are not in this process; joining them would hang.
            std::mem::forget(running.runtime);
        }
    }
}

fn begin(options: Options) -> PyResult<Running> {
    let fail = |error: &dyn std::fmt::Display| StartError::new_err(error.to_string());
    start_logging(&options).map_err(|error| fail(&error))?;
    let runtime = runtime(options.runtime_threads).map_err(|error| fail(&error))?;
    let server = runtime.block_on(Server::bind(options)).map_err(|error| fail(&error))?;
    let address = server.address().map_err(|error| fail(&error))?;
    let app = Arc::clone(server.app());
    let service = InProcess::new(&app);
    let (stop, stopped) = oneshot::channel::<()>();
    let server = runtime.spawn(server.run(async {
        // A dropped sender is the signal.
        drop(stopped.await);
    }));
    Ok(Running { runtime, stop, server, address: format!("http://{address}"), app, service })
}
