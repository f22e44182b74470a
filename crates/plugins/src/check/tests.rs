//! Answers of modules that must never reach HTTP, and what good ones do to heads.

use super::*;
use crate::view::Weight;

fn spec() -> Spec {
    let mut spec = Spec { name: "m".to_owned(), ..Spec::default() };
    spec.limits.output_kib = 1;
    spec
}

fn modify(changes: HeaderChanges) -> RequestAction {
    RequestAction::Modify(RequestChanges { headers: changes, ..RequestChanges::default() })
}

fn set(name: &str, value: &str) -> HeaderChanges {
    HeaderChanges { set: vec![Header::new(name, value)], ..HeaderChanges::default() }
}

fn refusal(action: RequestAction) -> Failure {
    request(action, &spec()).expect_err("a bad answer")
}

#[test]
fn headers_that_could_split_a_message_are_refused() {
    for (name, value) in [
        ("x-a", "1\r\nset-cookie: a=b"),
        ("x-a", "1\n2"),
        ("x-a", "\0"),
        ("x a", "1"),
        ("x-a\r\nx-b", "1"),
        ("", "1"),
        (":path", "/"),
    ] {
        assert_eq!(refusal(modify(set(name, value))).cause, Cause::BadOutput, "{name:?} {value:?}");
        let reply = Reply { status: 403, headers: vec![Header::new(name, value)], body: vec![] };
        assert_eq!(refusal(RequestAction::Reject(reply)).cause, Cause::BadOutput, "{name:?} {value:?}");
    }
    let many = HeaderChanges { add: vec![Header::new("x-a", "1"); 129], ..HeaderChanges::default() };
    assert_eq!(refusal(modify(many)).cause, Cause::BadOutput);
}

#[test]
fn statuses_that_are_none_of_an_answer_are_refused() {
    for status in [0, 99, 100, 101, 199, 600, 999, u16::MAX] {
        let reply = Reply { status, ..Reply::default() };
        assert_eq!(refusal(RequestAction::Reject(reply)).cause, Cause::BadOutput, "{status}");
        let changes = ResponseChanges { status: Some(status), ..ResponseChanges::default() };
        assert!(response(ResponseAction::Modify(changes), &spec()).is_err(), "{status}");
    }
}

#[test]
fn targets_and_methods_that_are_no_http_are_refused() {
    for (path, query) in [
        (Some("v1/x"), None),
        (Some(""), None),
        (Some("http://evil/"), None),
        (Some("/a b"), None),
        (Some("/a\r\nhost: x"), None),
        (Some("/a?b"), None),
        (None, Some("a b")),
        (None, Some("a\n")),
    ] {
        let changes = RequestChanges {
            path: path.map(str::to_owned),
            query: query.map(str::to_owned),
            ..RequestChanges::default()
        };
        assert_eq!(refusal(RequestAction::Modify(changes)).cause, Cause::BadOutput, "{path:?} {query:?}");
    }
    let changes = RequestChanges { method: Some("GET /".to_owned()), ..RequestChanges::default() };
    assert_eq!(refusal(RequestAction::Modify(changes)).cause, Cause::BadOutput);
}

#[test]
fn secrets_are_hidden_and_not_set_unless_granted() {
    let mut headers = HeaderMap::new();
    for name in ["authorization", "cookie", "x-api-key", "proxy-authorization", "x-plain"] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static("s"));
    }
    headers.insert("x-latin", HeaderValue::from_bytes(b"\xe9").expect("a value"));
    assert_eq!(visible(&headers, &Grants::default()), [Header::new("x-plain", "s")]);
    assert_eq!(visible(&headers, &Grants { secrets: true, ..Grants::default() }).len(), 5);
    assert!(request(modify(set("Authorization", "x")), &spec()).is_err());
    let granted = Spec { grants: Grants { secrets: true, ..Grants::default() }, ..spec() };
    assert!(request(modify(set("Authorization", "x")), &granted).is_ok());
}

#[test]
fn a_body_over_the_output_limit_is_refused() {
    let changes = RequestChanges { body: Some(vec![0; 1025]), ..RequestChanges::default() };
    assert_eq!(refusal(RequestAction::Modify(changes)).cause, Cause::BadOutput);
    let big = NewEvent { name: None, data: "x".repeat(1025) };
    assert!(event(EventAction::Replace(vec![big]), &spec()).is_err());
}

#[test]
fn events_that_could_forge_others_are_refused() {
    for (name, data) in [(Some("a\nb"), "x"), (None, "a\rdata: b"), (None, "\0")] {
        let forged = NewEvent { name: name.map(str::to_owned), data: data.to_owned() };
        assert!(event(EventAction::Stop(vec![forged]), &spec()).is_err(), "{name:?} {data:?}");
    }
    let lines = NewEvent { name: Some("delta".to_owned()), data: "a\nb".to_owned() };
    assert!(event(EventAction::Replace(vec![lines]), &spec()).is_ok());
}

#[test]
fn only_candidates_can_be_picked_and_only_with_possible_weights() {
    let known = ["w1".to_owned(), "w2".to_owned()];
    let weigh = |pairs: &[(&str, f64)]| {
        let weights = pairs.iter().map(|(id, weight)| Weight { id: (*id).to_owned(), weight: *weight });
        route(RouteAction::Weigh(weights.collect()), &known)
    };
    assert!(weigh(&[("w1", 0.9), ("w2", 0.0)]).is_ok());
    for wrong in [
        weigh(&[("w1", f64::NAN)]),
        weigh(&[("w1", -1.0), ("w2", 2.0)]),
        weigh(&[("w1", 0.0)]),
        weigh(&[("w1", f64::MAX), ("w2", f64::MAX)]),
        weigh(&[("w3", 1.0)]),
        weigh(&[]),
        route(RouteAction::Pick("w3".to_owned()), &known),
        route(RouteAction::Filter(vec![]), &known),
        route(RouteAction::Filter(vec!["w1".to_owned(), "x".to_owned()]), &known),
    ] {
        assert_eq!(wrong.expect_err("impossible").cause, Cause::BadOutput);
    }
    assert!(route(RouteAction::Filter(vec!["w2".to_owned()]), &known).is_ok());
}

#[test]
fn a_change_sets_the_length_and_drops_what_described_the_old_body() {
    let request = http::Request::builder()
        .uri("http://host:1/old?a=1")
        .header("content-encoding", "gzip")
        .header("transfer-encoding", "chunked")
        .header("content-length", "99")
        .header("x-twice", "1")
        .body(())
        .expect("a request");
    let (mut head, ()) = request.into_parts();
    let headers = HeaderChanges {
        set: vec![Header::new("content-length", "5"), Header::new("x-new", "1")],
        add: vec![Header::new("x-twice", "2")],
        remove: vec!["host".to_owned()],
    };
    let changes = RequestChanges {
        method: Some("PUT".to_owned()),
        path: Some("/new".to_owned()),
        query: None,
        headers,
        body: Some(b"four".to_vec()),
    };
    assert_eq!(apply_request(&mut head, changes).as_deref(), Some(&b"four"[..]));
    assert_eq!((head.method.as_str(), head.uri.to_string().as_str()), ("PUT", "http://host:1/new?a=1"));
    assert_eq!(head.headers["content-length"], "4");
    assert!(
        !head.headers.contains_key("content-encoding") && !head.headers.contains_key("transfer-encoding")
    );
    assert_eq!(head.headers.get_all("x-twice").iter().count(), 2);
    assert_eq!(head.headers["x-new"], "1");
}

#[test]
fn a_change_of_headers_alone_leaves_the_framing() {
    let (mut head, ()) = http::Response::builder()
        .header("content-encoding", "gzip")
        .body(())
        .expect("a response")
        .into_parts();
    let changes = ResponseChanges { status: Some(203), headers: set("x-a", "1"), body: None };
    assert!(apply_response(&mut head, changes).is_none());
    assert_eq!((head.status.as_u16(), head.headers["content-encoding"].as_bytes()), (203, &b"gzip"[..]));
}
