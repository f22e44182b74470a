//! on-response and on-error, in the opposite order of the request; then the stream's events.

use std::sync::Arc;

use axum::body::Body;
use branchline_core::{Error, ErrorCode};
use branchline_plugins::{
    Called, FailureView, Hook, Module, ResponseAction, ResponseView, apply_response, reply, visible,
};
use bytes::Bytes;
use http::response::Parts;
use http::{HeaderValue, Response, header};

use super::body::{Collected, collect};
use super::{View, events, quarantined};
use crate::app::App;
use crate::http::refuse;

/// An answer before its modules.
struct Answer {
    head: Parts,
    body: Body,
    /// Read whole already.
    whole: Option<Bytes>,
    /// Not the worker's any more: there are no events of a worker in it.
    replaced: bool,
}

pub(super) async fn run(
    app: &App,
    seen: &[Arc<Module>],
    view: &View,
    response: Response<Body>,
) -> Response<Body> {
    let (head, body) = response.into_parts();
    let mut answer = Answer { head, body, whole: None, replaced: false };
    for module in seen.iter().rev() {
        answer.meet(app, module, view).await;
    }
    answer.finish(app, seen, view)
}

fn is_stream(head: &Parts) -> bool {
    let kind = head.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    kind.get(..17).is_some_and(|start| start.eq_ignore_ascii_case(b"text/event-stream"))
}

async fn call(
    head: &Parts,
    module: &Arc<Module>,
    hook: Hook,
    view: &View,
    streaming: bool,
    body: Option<Bytes>,
) -> Called<ResponseAction> {
    let (request, status) = (view.show(module, None), head.status.as_u16());
    let headers = visible(&head.headers, &module.spec.grants);
    let body = body.map(Vec::from);
    if hook == Hook::OnError {
        let code = head.extensions.get::<ErrorCode>().map_or("", |code| code.name());
        return module.on_error(request, FailureView { status, code: code.to_owned(), headers, body }).await;
    }
    module.on_response(request, ResponseView { status, headers, streaming, body }).await
}

impl Answer {
    async fn meet(&mut self, app: &App, module: &Arc<Module>, view: &View) {
        let failing = self.head.status.as_u16() >= 400;
        let hook = match failing && module.wants(Hook::OnError) {
            true => Hook::OnError,
            false => Hook::OnResponse,
        };
        let streaming = is_stream(&self.head) && !self.replaced;
        // A contract that knows no streams can't be shown one.
        if !module.wants(hook) || (streaming && module.skips_streams()) {
            return;
        }
        if module.is_quarantined() {
            module.count_quarantined(hook);
            if !module.fails_open() {
                self.replace(quarantined(module));
            }
            return;
        }
        let body = match module.sees_response_body() && !streaming {
            true => match self.read(app, module).await {
                Ok(body) => Some(body),
                Err(None) => return,
                Err(Some(error)) => return self.replace(refuse(&error)),
            },
            false => None,
        };
        let called = call(&self.head, module, hook, view, streaming, body).await;
        match called.result {
            Ok(ResponseAction::Continue) => {}
            Ok(ResponseAction::Reject(answer)) => self.replace(reply(answer).map(Body::from)),
            Ok(ResponseAction::Modify(changes)) => {
                if let Some(body) = apply_response(&mut self.head, changes) {
                    self.body = Body::from(body.clone());
                    self.whole = Some(body);
                    self.replaced = true;
                }
            }
            Err(_) if module.fails_open() => {}
            Err(failure) => self.replace(refuse(&failure.refusal(&module.spec.name))),
        }
    }

    /// The whole body. `Err(None)`: the module is passed by; `Err(Some)`: the answer can't be given.
    async fn read(&mut self, app: &App, module: &Module) -> Result<Bytes, Option<Error>> {
        if let Some(whole) = &self.whole {
            return Ok(whole.clone());
        }
        let limit = app.options.wasm_body_limit.0;
        match collect(std::mem::take(&mut self.body), limit).await {
            Collected::Whole(whole) => {
                self.body = Body::from(whole.clone());
                self.whole = Some(whole.clone());
                Ok(whole)
            }
            Collected::TooLarge(body) if module.fails_open() => {
                self.body = body;
                Err(None)
            }
            Collected::TooLarge(_) => {
                let message = format!(
                    "the answer is over {limit} bytes, which middleware reads; raise --wasm-body-limit"
                );
                Err(Some(Error::new(ErrorCode::UpstreamFailed, message)))
            }
            Collected::Broken(reason) => {
                let message = format!("the worker's answer broke off ({reason}); try again");
                Err(Some(Error::new(ErrorCode::UpstreamFailed, message)))
            }
        }
    }

    /// Nothing of the old answer stays: neither body nor headers.
    fn replace(&mut self, response: Response<Body>) {
        let (head, body) = response.into_parts();
        *self = Self { head, body, whole: None, replaced: true };
    }

    fn finish(mut self, app: &App, seen: &[Arc<Module>], view: &View) -> Response<Body> {
        if is_stream(&self.head) && !self.replaced {
            let readers: Vec<_> =
                seen.iter().rev().filter(|module| module.wants(Hook::OnStreamEvent)).cloned().collect();
            if !readers.is_empty() && self.head.headers.contains_key(header::CONTENT_ENCODING) {
                if readers.iter().any(|module| !module.fails_open()) {
                    let message = "the worker compressed a stream that middleware has to read; turn its compression off";
                    self.replace(refuse(&Error::new(ErrorCode::UpstreamFailed, message)));
                }
            } else if !readers.is_empty() {
                self.head.headers.remove(header::CONTENT_LENGTH);
                self.body = events::filter(app, self.body, readers, view);
            }
        }
        Response::from_parts(self.head, self.body)
    }
}
