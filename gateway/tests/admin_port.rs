//! Operators' routes on a port of their own: gone from the public one, and asked for their own keys.

use crate::kit::Gateway;
use branchline_testkit::{ScriptedWorker, Step, response};

const OPERATORS: [(&str, &str); 10] = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("DELETE", "/workers/w0"),
    ("GET", "/list_workers"),
    ("GET", "/metrics"),
    ("GET", "/server_info"),
    ("POST", "/flush_cache"),
    ("POST", "/abort_request"),
    ("GET", "/explain/x"),
    ("GET", "/cache/tree"),
];

async fn worker() -> ScriptedWorker {
    ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.expect("a free port")
}

#[tokio::test]
async fn with_a_port_of_their_own_operators_routes_are_gone_from_the_public_one() {
    let worker = worker().await;
    let keys = [("admin_port", "0"), ("api_key", "boss"), ("user_api_key", "user")];
    for given in [&keys[..1], &keys] {
        let gateway = Gateway::start(given, &[worker.url()]).await;
        let boss = [("x-api-key", "boss")];
        for (method, path) in OPERATORS {
            let answer = gateway.call(method, path, &boss, "{}").await;
            assert_eq!(
                (answer.status, answer.json()["error"]["code"].as_str()),
                (404, Some("not_found")),
                "{path}"
            );
            if method == "GET" && !path.starts_with("/explain") {
                assert_ne!(gateway.operate(method, path, &boss, "").await.status, 404, "{path}");
            }
        }
        assert_eq!(gateway.operate("GET", "/workers", &boss, "").await.json()["total"], 1);
        let body = r#"{"prompt":"x"}"#;
        assert_eq!(gateway.call("POST", "/v1/completions", &boss, body).await.status, 200);
        assert_eq!(gateway.operate("POST", "/v1/completions", &boss, body).await.status, 404);
        for path in ["/health", "/readiness", "/liveness"] {
            assert_eq!(gateway.get(path).await.status, 200, "{path}");
            assert_eq!(gateway.operate("GET", path, &[], "").await.status, 200, "{path}");
        }
    }
}

#[tokio::test]
async fn the_public_port_tells_even_operators_nothing_of_workers() {
    let worker = worker().await;
    let gateway = Gateway::start(&[("admin_port", "0")], &[worker.url()]).await;
    assert_eq!(gateway.get("/health").await.json().get("workers"), None);
    assert_eq!(gateway.operate("GET", "/health", &[], "").await.json()["workers"][0]["url"], worker.url());
    let asked = [("x-branchline-explain", "1"), ("x-request-id", "mine")];
    let answer = gateway.call("POST", "/v1/completions", &asked, r#"{"prompt":"x"}"#).await;
    assert_eq!((answer.status, answer.header("x-branchline-explain")), (200, None));
}

#[tokio::test]
async fn the_operators_port_takes_admins_keys_only() {
    let given =
        [("admin_port", "0"), ("api_key", "boss"), ("user_api_key", "user"), ("admin_api_key", "top")];
    let gateway = Gateway::start_cold(&given, &[]).await;
    for (key, status) in [("boss", 200), ("top", 200), ("user", 403), ("wrong", 401)] {
        let answer = gateway.operate("GET", "/workers", &[("x-api-key", key)], "").await;
        assert_eq!(answer.status, status, "{key}");
    }
    let gateway = Gateway::start_cold(&[("admin_port", "0"), ("admin_api_key", "top")], &[]).await;
    assert_eq!(gateway.operate("GET", "/workers", &[], "").await.status, 401, "it has a key of its own");
    assert_eq!(gateway.get("/v1/models").await.status, 503, "clients need none");
}

#[tokio::test]
async fn the_operators_port_refuses_rebound_names_and_foreign_pages() {
    let gateway = Gateway::start_cold(&[("admin_port", "0")], &[]).await;
    for headers in [&[("host", "evil.example")][..], &[("origin", "https://evil.example")]] {
        assert_eq!(gateway.operate("GET", "/workers", headers, "").await.status, 403);
    }
}
