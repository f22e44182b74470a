//! The page at `/`: how its files are served, what it is told of its caller, and the list of choices that it shows.

use crate::kit::Gateway;
use branchline_testkit::{ScriptedWorker, Step, response};

#[tokio::test]
async fn the_page_and_its_files_come_with_their_kind_a_tag_and_a_strict_policy() {
    let gateway = Gateway::start_cold(&[("api_key", "boss")], &[]).await;
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/page/app.js", "text/javascript; charset=utf-8"),
        ("/page/base.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ] {
        let answer = gateway.get(path).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)), "{path}");
        let policy = answer.header("content-security-policy").unwrap_or_default();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
        assert_eq!(answer.header("cache-control"), Some("no-cache"), "{path}");
        assert_eq!(answer.header("x-content-type-options"), Some("nosniff"), "{path}");
        let tag = answer.header("etag").expect("a tag").to_owned();
        let known = format!("\"x\", W/{tag}");
        let again = gateway.call("GET", path, &[("if-none-match", known.as_str())], "").await;
        assert_eq!(
            (again.status, again.body.len(), again.header("etag")),
            (304, 0, Some(tag.as_str())),
            "{path}"
        );
        assert_eq!(gateway.call("GET", path, &[("if-none-match", "\"x\"")], "").await.status, 200, "{path}");
        let refused = gateway.post(path, "{}").await;
        assert_eq!((refused.status, refused.header("allow")), (405, Some("GET,HEAD")), "{path}");
    }
}

#[tokio::test]
async fn what_is_no_file_of_the_page_is_not_found() {
    let gateway = Gateway::start_cold(&[], &[]).await;
    for path in ["/page/none.js", "/page/index.html", "/page/..%2fmod.rs", "/page/", "/page/a/b"] {
        let answer = gateway.get(path).await;
        assert_eq!(
            (answer.status, answer.json()["error"]["code"].as_str()),
            (404, Some("not_found")),
            "{path}"
        );
    }
}

#[tokio::test]
async fn without_the_page_its_paths_are_like_any_other_that_does_not_exist() {
    let gateway = Gateway::start_cold(&[("page", "false"), ("admin_port", "0")], &[]).await;
    for path in ["/", "/page/app.js", "/page/about"] {
        assert_eq!(gateway.get(path).await.status, 404, "{path}");
        assert_eq!(gateway.operate("GET", path, &[], "").await.status, 404, "{path}");
    }
}

fn words(about: &serde_json::Value, fields: &[&str]) -> Vec<Option<bool>> {
    fields.iter().map(|field| about[*field].as_bool()).collect()
}

/// `(key, may_read, may_operate)` as the page is told.
async fn told(gateway: &Gateway, key: &str) -> (String, bool, bool) {
    let sent = [("x-api-key", key)];
    let headers = &sent[..usize::from(!key.is_empty())];
    let about = gateway.call("GET", "/page/about", headers, "").await;
    assert_eq!((about.status, about.header("cache-control")), (200, Some("no-store")));
    let about = about.json();
    let word = about["key"].as_str().unwrap_or_default().to_owned();
    (word, about["may_read"] == true, about["may_operate"] == true)
}

fn expected(word: &str, may_read: bool, may_operate: bool) -> (String, bool, bool) {
    (word.to_owned(), may_read, may_operate)
}

#[tokio::test]
async fn the_page_is_told_what_its_callers_key_opens() {
    let open = Gateway::start_cold(&[], &[]).await;
    assert_eq!(told(&open, "").await, expected("none", true, true));
    let rebound = open.call("GET", "/page/about", &[("host", "evil.example")], "").await.json();
    assert_eq!(words(&rebound, &["may_read", "may_operate"]), [Some(false), Some(false)]);
    let keyed = Gateway::start_cold(&[("api_key", "boss"), ("user_api_key", "user")], &[]).await;
    for (key, wanted) in [
        ("", expected("none", false, false)),
        ("user", expected("client", false, false)),
        ("wrong", expected("unknown", false, false)),
        ("boss", expected("admin", true, true)),
    ] {
        assert_eq!(told(&keyed, key).await, wanted, "{key}");
    }
    // Clients need no key, but there is an administrator: without that key all can be seen and nothing changed.
    let watched = Gateway::start_cold(&[("admin_api_key", "top")], &[]).await;
    for (key, wanted) in [
        ("", expected("none", true, false)),
        ("wrong", expected("unknown", true, false)),
        ("top", expected("admin", true, true)),
    ] {
        assert_eq!(told(&watched, key).await, wanted, "{key}");
    }
}

#[tokio::test]
async fn each_port_tells_the_page_what_it_serves() {
    let gateway = Gateway::start_cold(&[("admin_port", "0")], &[]).await;
    let public = gateway.get("/page/about").await.json();
    let apart = gateway.operate("GET", "/page/about", &[], "").await.json();
    let fields = ["clients", "operators", "may_read", "may_operate"];
    assert_eq!(words(&public, &fields), [true, false, false, false].map(Some));
    assert_eq!(words(&apart, &fields), [false, true, true, true].map(Some));
    assert_eq!(gateway.operate("GET", "/", &[], "").await.status, 200);
}

#[tokio::test]
async fn the_latest_choices_are_listed_last_first_for_operators_alone() {
    let worker =
        ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.expect("a free port");
    let gateway = Gateway::start(&[("api_key", "boss"), ("user_api_key", "user")], &[worker.url()]).await;
    for name in ["one", "two", "three"] {
        let sent = [("x-api-key", "user"), ("x-request-id", name)];
        assert_eq!(gateway.call("POST", "/v1/completions", &sent, r#"{"prompt":"x"}"#).await.status, 200);
    }
    let boss = [("x-api-key", "boss")];
    let listed = gateway.call("GET", "/explain?limit=2", &boss, "").await.json();
    let choices = listed["choices"].as_array().expect("choices").clone();
    let names: Vec<_> =
        choices.iter().map(|choice| choice["tag"].as_str().or(choice["request"].as_str())).collect();
    assert_eq!(names, [Some("three"), Some("two")]);
    assert!(choices.iter().all(|choice| choice["age_ms"].as_u64().is_some_and(|age| age < 60_000)));
    assert_eq!(choices[0]["reason"], "it was the only worker that could take the request");
    for (query, words) in [
        ("limit=0", "limit is 0; give 1 to 500"),
        ("limit=501", "limit is 501"),
        ("last=3", "unknown field `last`"),
    ] {
        let refused = gateway.call("GET", &format!("/explain?{query}"), &boss, "").await;
        let message = refused.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(refused.status == 400 && message.contains(words), "{query}: {message}");
    }
    assert_eq!(gateway.call("GET", "/explain", &[("x-api-key", "user")], "").await.status, 403);
    assert_eq!(gateway.get("/explain").await.status, 401);
}
