//! The world of SGLang's gateway, `smg:gateway`, mapped to ours.

use wasmtime::component::{ComponentType, Lift, Lower};

use crate::state::now_ms;
use crate::view::{
    Header, HeaderChanges, Reply, RequestAction, RequestChanges, RequestView, ResponseAction,
    ResponseChanges, ResponseView,
};

#[derive(Debug, ComponentType, Lower)]
#[component(record)]
pub(super) struct Request {
    method: String,
    path: String,
    query: String,
    headers: Vec<Header>,
    body: Vec<u8>,
    #[component(name = "request-id")]
    request_id: String,
    #[component(name = "now-epoch-ms")]
    now_epoch_ms: u64,
}

#[derive(Debug, ComponentType, Lower)]
#[component(record)]
pub(super) struct Response {
    status: u16,
    headers: Vec<Header>,
    body: Vec<u8>,
}

#[derive(Debug, ComponentType, Lift)]
#[component(record)]
pub(super) struct Modify {
    status: Option<u16>,
    #[component(name = "headers-set")]
    headers_set: Vec<Header>,
    #[component(name = "headers-add")]
    headers_add: Vec<Header>,
    #[component(name = "headers-remove")]
    headers_remove: Vec<String>,
    #[component(name = "body-replace")]
    body_replace: Option<Vec<u8>>,
}

#[derive(Debug, ComponentType, Lift)]
#[component(variant)]
pub(super) enum Action {
    #[component(name = "continue")]
    Continue,
    #[component(name = "reject")]
    Reject(u16),
    #[component(name = "modify")]
    Modify(Modify),
}

impl From<RequestView> for Request {
    fn from(view: RequestView) -> Self {
        Self {
            method: view.method,
            path: view.path,
            query: view.query,
            headers: view.headers,
            body: view.body.unwrap_or_default(),
            request_id: view.id,
            now_epoch_ms: now_ms(),
        }
    }
}

impl From<ResponseView> for Response {
    fn from(view: ResponseView) -> Self {
        Self { status: view.status, headers: view.headers, body: view.body.unwrap_or_default() }
    }
}

impl From<Modify> for HeaderChanges {
    fn from(modify: Modify) -> Self {
        Self { set: modify.headers_set, add: modify.headers_add, remove: modify.headers_remove }
    }
}

/// It can only name a status, so the words are ours.
fn reply(status: u16) -> Reply {
    let body = serde_json::json!({"error": {"message": "refused by middleware", "type": "middleware", "code": status}});
    let headers = vec![Header::new("content-type", "application/json")];
    Reply { status, headers, body: body.to_string().into_bytes() }
}

impl From<Action> for RequestAction {
    fn from(action: Action) -> Self {
        match action {
            Action::Continue => Self::Continue,
            Action::Reject(status) => Self::Reject(reply(status)),
            Action::Modify(mut modify) => {
                let body = modify.body_replace.take();
                Self::Modify(RequestChanges { body, headers: modify.into(), ..RequestChanges::default() })
            }
        }
    }
}

impl From<Action> for ResponseAction {
    fn from(action: Action) -> Self {
        match action {
            Action::Continue => Self::Continue,
            Action::Reject(status) => Self::Reject(reply(status)),
            Action::Modify(mut modify) => {
                let (status, body) = (modify.status, modify.body_replace.take());
                Self::Modify(ResponseChanges { status, body, headers: modify.into() })
            }
        }
    }
}
