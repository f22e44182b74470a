//! Whether a module's answer can be used, and its use on HTTP heads. What is not valid HTTP never leaves here.

use std::str::FromStr as _;

use bytes::Bytes;
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, COOKIE, HOST, PROXY_AUTHORIZATION,
    SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Uri, request};

use crate::failure::{Cause, Failure};
use crate::grants::Grants;
use crate::spec::Spec;
use crate::view::{
    EventAction, Header, HeaderChanges, NewEvent, Reply, RequestAction, RequestChanges, ResponseAction,
    ResponseChanges, RouteAction,
};

type Checked = std::result::Result<(), Failure>;

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
/// Hidden from modules, and not theirs to set, unless granted.
const SECRETS: [HeaderName; 5] = [AUTHORIZATION, COOKIE, SET_COOKIE, PROXY_AUTHORIZATION, API_KEY];
/// Of the connection or of the body's length: the gateway's own.
const FRAMING: [HeaderName; 8] =
    [CONNECTION, KEEP_ALIVE, CONTENT_LENGTH, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];
/// Header changes of one answer.
const HEADERS_CAP: usize = 128;
/// Bytes of names and values of one answer.
const HEADER_BYTES_CAP: usize = 32 << 10;
/// Bytes of path and query.
const URI_CAP: usize = 8 << 10;
/// Events that one event may become.
const EVENTS_CAP: usize = 64;

fn bad(detail: impl Into<String>) -> Failure {
    Failure::new(Cause::BadOutput, detail)
}

fn is_secret(name: &HeaderName) -> bool {
    SECRETS.contains(name)
}

fn parse(header: &Header) -> std::result::Result<(HeaderName, HeaderValue), Failure> {
    let name = HeaderName::from_str(&header.name)
        .map_err(|_| bad(format!("{:?} is not a header's name", clip(&header.name))))?;
    let value = HeaderValue::from_str(&header.value)
        .map_err(|_| bad(format!("the value of header {name} has line ends or control characters")))?;
    Ok((name, value))
}

fn clip(text: &str) -> String {
    text.chars().take(64).collect()
}

fn headers<'a>(given: impl Iterator<Item = &'a Header>, grants: &Grants) -> Checked {
    let (mut count, mut bytes) = (0, 0);
    for header in given {
        let (name, value) = parse(header)?;
        count += 1;
        bytes += name.as_str().len() + value.len();
        if count > HEADERS_CAP || bytes > HEADER_BYTES_CAP {
            return Err(bad(format!("more than {HEADERS_CAP} headers or {HEADER_BYTES_CAP} bytes of them")));
        }
        if is_secret(&name) && !grants.secrets {
            return Err(bad(format!("header {name} is secret and `grants.secrets` is off")));
        }
    }
    Ok(())
}

fn changes(changes: &HeaderChanges, grants: &Grants) -> Checked {
    headers(changes.set.iter().chain(&changes.add), grants)?;
    if changes.remove.len() > HEADERS_CAP {
        return Err(bad(format!("more than {HEADERS_CAP} headers to remove")));
    }
    for name in &changes.remove {
        let parsed = HeaderName::from_str(name)
            .map_err(|_| bad(format!("{:?} is not a header's name", clip(name))))?;
        if is_secret(&parsed) && !grants.secrets {
            return Err(bad(format!("header {parsed} is secret and `grants.secrets` is off")));
        }
    }
    Ok(())
}

fn status(status: u16) -> Checked {
    match status {
        200..=599 => Ok(()),
        _ => Err(bad(format!("status {status} is not one of an answer; give 200 to 599"))),
    }
}

fn size(length: usize, spec: &Spec) -> Checked {
    let cap = (spec.limits.output_kib as usize) << 10;
    match length <= cap {
        true => Ok(()),
        false => Err(bad(format!("an answer of {length} bytes is over `limits.output_kib`"))),
    }
}

fn reply_is_good(reply: &Reply, spec: &Spec) -> Checked {
    status(reply.status)?;
    headers(reply.headers.iter(), &spec.grants)?;
    size(reply.body.len(), spec)
}

/// The path and query after a change.
fn target(old: &Uri, changes: &RequestChanges) -> std::result::Result<Option<PathAndQuery>, Failure> {
    if changes.path.is_none() && changes.query.is_none() {
        return Ok(None);
    }
    let path = changes.path.as_deref().unwrap_or(old.path());
    let query = changes.query.as_deref().or(old.query()).unwrap_or_default();
    if !path.starts_with('/') || path.contains(['?', '#']) || path.len() + query.len() > URI_CAP {
        return Err(bad(format!("path {:?} does not begin with / or is too long", clip(path))));
    }
    let text = if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") };
    let target = PathAndQuery::try_from(text).map_err(|error| bad(format!("path or query: {error}")))?;
    Ok(Some(target))
}

/// An answer of on-request.
pub(crate) fn request(action: RequestAction, spec: &Spec) -> std::result::Result<RequestAction, Failure> {
    match &action {
        RequestAction::Continue => {}
        RequestAction::Reject(reply) => reply_is_good(reply, spec)?,
        RequestAction::Modify(modify) => {
            changes(&modify.headers, &spec.grants)?;
            size(modify.body.as_ref().map_or(0, Vec::len), spec)?;
            target(&Uri::from_static("/"), modify)?;
            if let Some(method) = &modify.method {
                Method::from_str(method).map_err(|_| bad(format!("{:?} is not a method", clip(method))))?;
            }
        }
    }
    Ok(action)
}

/// An answer of on-response or on-error.
pub(crate) fn response(action: ResponseAction, spec: &Spec) -> std::result::Result<ResponseAction, Failure> {
    match &action {
        ResponseAction::Continue => {}
        ResponseAction::Reject(reply) => reply_is_good(reply, spec)?,
        ResponseAction::Modify(modify) => {
            changes(&modify.headers, &spec.grants)?;
            size(modify.body.as_ref().map_or(0, Vec::len), spec)?;
            modify.status.map_or(Ok(()), status)?;
        }
    }
    Ok(action)
}

/// An answer of on-stream-event.
pub(crate) fn event(action: EventAction, spec: &Spec) -> std::result::Result<EventAction, Failure> {
    let (EventAction::Replace(events) | EventAction::Stop(events)) = &action else { return Ok(action) };
    if events.len() > EVENTS_CAP {
        return Err(bad(format!("{} events for one; give at most {EVENTS_CAP}", events.len())));
    }
    size(events.iter().map(|event| event.data.len()).sum(), spec)?;
    for NewEvent { name, data } in events {
        let name = name.as_deref().unwrap_or_default();
        if name.len() > 128 || name.contains(['\r', '\n', '\0']) || data.contains(['\r', '\0']) {
            return Err(bad("an event has carriage returns, zero bytes or line ends in its name"));
        }
    }
    Ok(action)
}

/// An answer of on-route, against the candidates it was shown.
pub(crate) fn route(action: RouteAction, known: &[String]) -> std::result::Result<RouteAction, Failure> {
    let is_known = |id: &String| match known.contains(id) {
        true => Ok(()),
        false => Err(bad(format!("{:?} is no candidate", clip(id)))),
    };
    match &action {
        RouteAction::Continue => {}
        RouteAction::Filter(ids) if ids.is_empty() => return Err(bad("a filter that leaves nobody")),
        RouteAction::Filter(ids) => ids.iter().try_for_each(is_known)?,
        RouteAction::Pick(id) => is_known(id)?,
        RouteAction::Weigh(weights) => {
            weights.iter().try_for_each(|weight| is_known(&weight.id))?;
            let sum: f64 = weights.iter().map(|weight| weight.weight).sum();
            let good = weights.iter().all(|weight| weight.weight.is_finite() && weight.weight >= 0.0);
            if !good || !sum.is_finite() || sum <= 0.0 {
                return Err(bad("weights must be finite, 0 or more, and not all 0"));
            }
        }
    }
    Ok(action)
}

/// The headers that a module may see.
pub fn visible(headers: &HeaderMap, grants: &Grants) -> Vec<Header> {
    headers
        .iter()
        .filter(|(name, _)| grants.secrets || !is_secret(name))
        .filter_map(|(name, value)| {
            let value = std::str::from_utf8(value.as_bytes()).ok()?;
            Some(Header::new(name.as_str(), value))
        })
        .collect()
}

/// Applies checked changes. Framing headers stay the gateway's.
fn apply_headers(headers: &mut HeaderMap, changes: &HeaderChanges) {
    let free = |name: &HeaderName| !FRAMING.contains(name);
    for name in changes.remove.iter().filter_map(|name| HeaderName::from_str(name).ok()).filter(free) {
        headers.remove(name);
    }
    let parsed = |list: &[Header]| -> Vec<_> {
        list.iter().filter_map(|header| parse(header).ok()).filter(|(name, _)| free(name)).collect()
    };
    for (name, value) in parsed(&changes.set) {
        headers.insert(name, value);
    }
    for (name, value) in parsed(&changes.add) {
        headers.append(name, value);
    }
}

/// Makes the head fit a body that a module wrote.
fn reframe(headers: &mut HeaderMap, length: usize) {
    for name in [CONTENT_ENCODING, TRANSFER_ENCODING] {
        headers.remove(name);
    }
    for digest in ["content-md5", "digest", "content-digest", "repr-digest", "etag"] {
        headers.remove(digest);
    }
    headers.insert(CONTENT_LENGTH, HeaderValue::from(length as u64));
}

/// Applies checked changes to a request's head; gives the new body, if there is one.
pub fn apply_request(head: &mut request::Parts, changes: RequestChanges) -> Option<Bytes> {
    if let Some(method) = changes.method.as_deref().and_then(|method| Method::from_str(method).ok()) {
        head.method = method;
    }
    if let Ok(Some(target)) = target(&head.uri, &changes) {
        let mut parts = std::mem::take(&mut head.uri).into_parts();
        parts.path_and_query = Some(target);
        head.uri = Uri::from_parts(parts).unwrap_or_default();
    }
    apply_headers(&mut head.headers, &changes.headers);
    let body = changes.body.map(Bytes::from)?;
    reframe(&mut head.headers, body.len());
    Some(body)
}

/// Applies checked changes to an answer's head; gives the new body, if there is one.
pub fn apply_response(head: &mut http::response::Parts, changes: ResponseChanges) -> Option<Bytes> {
    if let Some(status) = changes.status.and_then(|status| StatusCode::from_u16(status).ok()) {
        head.status = status;
    }
    apply_headers(&mut head.headers, &changes.headers);
    let body = changes.body.map(Bytes::from)?;
    reframe(&mut head.headers, body.len());
    Some(body)
}

/// A checked reply as an answer.
pub fn reply(reply: Reply) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    *response.status_mut() = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let changes = HeaderChanges { add: reply.headers, ..HeaderChanges::default() };
    apply_headers(response.headers_mut(), &changes);
    *response.body_mut() = Bytes::from(reply.body);
    response
}

#[cfg(test)]
mod tests;
