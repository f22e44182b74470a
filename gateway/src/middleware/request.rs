//! on-request: each module that fits, in order, until one answers itself.

use std::sync::Arc;

use axum::body::Body;
use branchline_core::{Error, ErrorCode, Result};
use branchline_plugins::{Hook, Module, RequestAction, apply_request, reply};
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use serde::Deserialize;

use super::body::Pending;
use super::route::RouteHooks;
use super::{View, ask_for_plain, quarantined, tenant};
use crate::app::App;
use crate::guard::{Access, route_of};
use crate::http::refuse;

/// What becomes of a request.
pub(super) enum Verdict {
    /// A module answered, or nobody needs to see the answer.
    Answer(Response<Body>),
    /// The gateway refuses it; on-error may see that.
    Refused { seen: Vec<Arc<Module>>, view: View, response: Response<Body> },
    /// It goes on.
    Pass { seen: Vec<Arc<Module>>, view: View, request: Request<Body> },
}

/// A request before its modules.
struct Way<'a> {
    app: &'a App,
    head: Parts,
    body: Pending,
    id: String,
    /// Known once the body has been read.
    model: Option<Option<String>>,
    seen: Vec<Arc<Module>>,
}

enum Step {
    Next,
    Answer(Response<Body>),
}

pub(super) async fn run(app: &App, head: Parts, body: Body) -> Verdict {
    let chain = app.plugins.chain();
    let id = format!("req-{}", uuid::Uuid::new_v4().simple());
    let mut way = Way { app, head, body: Pending::Coming(body), id, model: None, seen: Vec::new() };
    for module in chain.iter() {
        match way.meet(module).await {
            Ok(Step::Next) => {}
            Ok(Step::Answer(response)) => return Verdict::Answer(response),
            Err(error) => {
                let (seen, view) = (std::mem::take(&mut way.seen), way.view());
                return Verdict::Refused { seen, view, response: refuse(&error) };
            }
        }
    }
    way.pass()
}

impl Way<'_> {
    async fn meet(&mut self, module: &Arc<Module>) -> Result<Step> {
        let routes = &module.spec.routes;
        let (method, path) = (self.head.method.as_str(), self.head.uri.path());
        let wanted = Hook::ALL.into_iter().any(|hook| module.wants(hook));
        if !wanted || !routes.may_match(method, path, tenant(&self.head.headers)) {
            return Ok(Step::Next);
        }
        if module.waits_for_request_body() {
            let model = self.model().await?;
            if !module.spec.routes.matches_model(model.as_deref()) {
                return Ok(Step::Next);
            }
        }
        self.seen.push(Arc::clone(module));
        if !module.wants(Hook::OnRequest) {
            return Ok(Step::Next);
        }
        if module.is_quarantined() {
            module.count_quarantined(Hook::OnRequest);
            return Ok(match module.fails_open() {
                true => Step::Next,
                false => Step::Answer(quarantined(module)),
            });
        }
        self.call(module).await
    }

    async fn call(&mut self, module: &Arc<Module>) -> Result<Step> {
        let body = match module.sees_request_body() {
            true => Some(self.body.whole(self.app).await?),
            false => None,
        };
        let view = self.view().show(module, body);
        match module.on_request(view).await.result {
            Ok(RequestAction::Continue) => Ok(Step::Next),
            Ok(RequestAction::Reject(answer)) => Ok(Step::Answer(reply(answer).map(Body::from))),
            Ok(RequestAction::Modify(changes)) => {
                if let Some(body) = apply_request(&mut self.head, changes) {
                    self.body = Pending::Whole(body);
                    self.model = None;
                }
                // The gate has judged the old path; operators' routes have other rules.
                if route_of(self.head.uri.path()).access != Access::Client {
                    let message = format!(
                        "middleware '{}' sent the request to an operator's path; tell the operator",
                        module.spec.name
                    );
                    return Err(Error::new(ErrorCode::PermissionDenied, message));
                }
                Ok(Step::Next)
            }
            Err(_) if module.fails_open() => Ok(Step::Next),
            Err(failure) => Err(failure.refusal(&module.spec.name)),
        }
    }

    /// The model that the body names.
    async fn model(&mut self) -> Result<Option<String>> {
        if self.model.is_none() {
            let body = self.body.whole(self.app).await?;
            self.model = Some(named(&body));
        }
        Ok(self.model.clone().flatten())
    }

    fn view(&self) -> View {
        View::of(self.id.clone(), self.model.clone().flatten(), &self.head)
    }

    fn pass(mut self) -> Verdict {
        ask_for_plain(&mut self.head, &self.seen);
        if let (Pending::Whole(body), None) = (&self.body, &self.model) {
            self.model = Some(named(body));
        }
        let view = self.view();
        let routers: Vec<_> =
            self.seen.iter().filter(|module| module.wants(Hook::OnRoute)).cloned().collect();
        if !routers.is_empty() {
            let tenant = tenant(&self.head.headers).map(str::to_owned);
            let hooks = RouteHooks { modules: routers, id: self.id.clone(), tenant };
            self.head.extensions.insert(Arc::new(hooks));
        }
        let request = Request::from_parts(self.head, self.body.into_body());
        Verdict::Pass { seen: self.seen, view, request }
    }
}

/// The body's model; none if it is no JSON object with one.
fn named(body: &Bytes) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        model: Option<String>,
    }
    serde_json::from_slice::<Named>(body).ok()?.model
}
