//! The page at `/`: its files, as they lie in `files/` and inside the binary, and what it has to know of its caller.
//!
//! The files hold no secret and are served to anybody; all that they show comes from routes that ask for keys. There is
//! no build step, and the policy that goes with them lets them load and reach nothing but this gateway.

mod files;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Path, State};
use axum::response::Response;
use axum::routing::get;
use branchline_core::{Error, ErrorCode};
use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde_json::json;

use super::answer::{json as answer, refuse};
use crate::app::App;
use crate::guard::{KeyHash, Keys, Trusted};
use files::{File, INDEX};

/// Neither scripts nor styles from the markup, nothing of other sites, no frames, no markup made from text.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; trusted-types 'none'; \
                      require-trusted-types-for 'script'";

/// What is served beside the page.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Routes of clients.
    pub clients: bool,
    /// Routes of operators.
    pub operators: bool,
    /// Whether calls need a key.
    pub keyed: bool,
}

/// The page's routes; none where it is not wanted.
pub(super) fn routes(app: &App, place: Place) -> Router<Arc<App>> {
    if !app.options.page {
        return Router::new();
    }
    Router::new()
        .route("/", get(index))
        .route("/page/about", get(about))
        .route("/page/{file}", get(file))
        .layer(Extension(place))
}

async fn index(headers: HeaderMap) -> Response {
    serve(&INDEX, &headers)
}

async fn file(Path(name): Path<String>, headers: HeaderMap) -> Response {
    match files::find(&name) {
        Some(file) => serve(file, &headers),
        None => {
            let text = format!("the page has no file '{name}'; it begins at /");
            refuse(&Error::new(ErrorCode::NotFound, text))
        }
    }
}

/// What the page may offer its caller: which routes are on this port, whose key it sent and what that opens.
async fn about(
    State(app): State<Arc<App>>,
    Extension(place): Extension<Place>,
    key: Option<Extension<KeyHash>>,
    trusted: Option<Extension<Trusted>>,
    headers: HeaderMap,
) -> Response {
    let (reads, top) = (trusted.is_some(), app.options.admin_api_key.as_ref());
    // Where clients need no key, the gate looks at none; the administrator's is known all the same.
    let is_top = top.is_some_and(|key| Keys::only(key).accept(&headers).is_some());
    let sent = headers.contains_key(header::AUTHORIZATION) || headers.contains_key("x-api-key");
    let word = match (key.is_some() || is_top, reads) {
        (true, true) => "admin",
        (true, false) => "client",
        (false, _) if sent => "unknown",
        (false, _) => "none",
    };
    let mut response = answer(
        StatusCode::OK,
        &json!({
            "clients": place.clients,
            "operators": place.operators,
            "keyed": place.keyed,
            "key": word,
            "may_read": reads,
            // Nobody changes things by accident where there is an administrator.
            "may_operate": reads && (top.is_none() || word == "admin"),
        }),
    );
    set(&mut response, header::CACHE_CONTROL, "no-store");
    response
}

fn set(response: &mut Response, name: HeaderName, value: &'static str) {
    response.headers_mut().insert(name, HeaderValue::from_static(value));
}

/// A file, or 304 if the browser has it.
fn serve(file: &'static File, headers: &HeaderMap) -> Response {
    let tag = file.tag();
    let known = headers.get_all(header::IF_NONE_MATCH).iter().any(|value| names(value, tag));
    let mut response = Response::new(if known { Body::empty() } else { Body::from(file.bytes) });
    if known {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    } else {
        set(&mut response, header::CONTENT_TYPE, file.kind);
    }
    if let Ok(tag) = HeaderValue::from_str(tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    // Kept, but asked for again: the names stay the same from version to version.
    set(&mut response, header::CACHE_CONTROL, "no-cache");
    set(&mut response, header::CONTENT_SECURITY_POLICY, POLICY);
    set(&mut response, header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(&mut response, header::REFERRER_POLICY, "no-referrer");
    set(&mut response, HeaderName::from_static("cross-origin-opener-policy"), "same-origin");
    set(&mut response, HeaderName::from_static("cross-origin-resource-policy"), "same-origin");
    response
}

/// Whether an `if-none-match` has the tag, weakly compared (RFC 9110, 13.1.2).
fn names(value: &HeaderValue, tag: &str) -> bool {
    let Ok(text) = value.to_str() else { return false };
    text.split(',').map(str::trim).any(|one| one == "*" || one.strip_prefix("W/").unwrap_or(one) == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_found_among_several_weak_or_not() {
        for value in ["\"a\"", "W/\"a\"", "\"b\", \"a\"", "\"b\" ,W/\"a\"", "*"] {
            assert!(names(&HeaderValue::from_static(value), "\"a\""), "{value}");
        }
        for value in ["", "a", "\"b\"", "\"aa\"", "W/a"] {
            assert!(!names(&HeaderValue::from_static(value), "\"a\""), "{value}");
        }
    }
}
