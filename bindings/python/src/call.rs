//! A request of this process, answered by the router's own threads: head first, then the body as it is asked for.
//!
//! A callback is called exactly once, `callback(error, value)`, whatever happens, also if the router is stopped.

use std::sync::Arc;

use branchline_gateway::App;
use branchline_gateway::http::{Answered, InProcess};
use bytes::Bytes;
use http::Request;
use http_body::Body as _;
use http_body_util::BodyExt as _;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// A callback that is owed an answer.
struct Owed(Option<Py<PyAny>>);

impl Owed {
    fn pay(mut self, settle: impl FnOnce(Python<'_>, &Py<PyAny>) -> PyResult<Py<PyAny>>) {
        if let Some(callback) = self.0.take() {
            // Nobody is owed anything by an interpreter that has ended.
            let _ = Python::try_attach(|py| report(py, settle(py, &callback)));
        }
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if let Some(callback) = self.0.take() {
            let message = "the request was ended: it was cancelled, or the router stopped";
            let _ = Python::try_attach(|py| report(py, callback.call1(py, (message, py.None()))));
        }
    }
}

/// What a callback raises concerns its owner; it is shown where Python shows such things.
fn report(py: Python<'_>, outcome: PyResult<Py<PyAny>>) {
    if let Err(error) = outcome {
        error.write_unraisable(py, None);
    }
}

type Held = Arc<Mutex<Option<(Answered, TaskTrackerToken)>>>;

/// One request on its way.
#[pyclass(module = "branchline_router._native")]
pub(crate) struct NativeCall {
    body: Held,
    handle: Handle,
    ended: CancellationToken,
}

impl NativeCall {
    /// Sends a request; the callback gets (status, headers).
    pub(crate) fn start(
        app: &Arc<App>,
        service: InProcess,
        handle: Handle,
        request: Request<Bytes>,
        callback: Py<PyAny>,
    ) -> Self {
        let (body, ended) = (Held::default(), app.stop.child_token());
        let (held, stop, owed) = (Arc::clone(&body), ended.clone(), Owed(Some(callback)));
        // A stop waits for it as for any other request.
        let token = app.tracker.token();
        handle.spawn(async move {
            let answered = tokio::select! {
                () = stop.cancelled() => return,
                answered = service.call(request) => answered,
            };
            let (head, rest) = answered.into_parts();
            let headers: Vec<(String, String)> = head
                .headers
                .iter()
                .map(|(name, value)| {
                    (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
                })
                .collect();
            *held.lock().await = Some((rest, token));
            owed.pay(|py, callback| callback.call1(py, (py.None(), (head.status.as_u16(), headers))));
            // The body goes with the call or the router, read or not.
            stop.cancelled().await;
            drop(held.lock().await.take());
        });
        Self { body, handle, ended }
    }
}

#[pymethods]
impl NativeCall {
    /// Asks for the next bytes; the callback gets them, or none at the end.
    fn read(&self, callback: Py<PyAny>) {
        let (held, stop, owed) = (Arc::clone(&self.body), self.ended.clone(), Owed(Some(callback)));
        self.handle.spawn(async move {
            let mut held = held.lock().await;
            let next = tokio::select! {
                () = stop.cancelled() => return,
                next = next(&mut held) => next,
            };
            owed.pay(|py, callback| match next {
                Ok(Some(data)) => callback.call1(py, (py.None(), PyBytes::new(py, &data))),
                Ok(None) => callback.call1(py, (py.None(), py.None())),
                Err(message) => callback.call1(py, (message, py.None())),
            });
        });
    }

    /// Ends the request; its worker is told at once. Nothing happens if it has ended.
    fn cancel(&self) {
        self.ended.cancel();
    }
}

impl Drop for NativeCall {
    fn drop(&mut self) {
        self.cancel();
    }
}

async fn next(held: &mut Option<(Answered, TaskTrackerToken)>) -> Result<Option<Bytes>, String> {
    loop {
        let Some((body, _)) = held else { return Ok(None) };
        if body.is_end_stream() {
            *held = None;
            return Ok(None);
        }
        match body.frame().await {
            None => {
                *held = None;
                return Ok(None);
            }
            Some(Err(error)) => return Err(format!("the answer broke off: {error}")),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) if !data.is_empty() => return Ok(Some(data)),
                _ => {}
            },
        }
    }
}
