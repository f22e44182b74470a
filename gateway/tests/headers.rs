//! Cases of the areas headers and security at the gateway: what of a client's request may reach a worker.

use crate::kit::Gateway;
use branchline_testkit::{
    EngineSetup, FakeEngine, ScriptedWorker, Seen, Step, chunk, event_stream, last_chunk, response,
};
use serde_json::json;

async fn echo() -> ScriptedWorker {
    let script = |seen: &Seen| match String::from_utf8_lossy(&seen.body).contains("\"stream\":true") {
        true => vec![event_stream(), chunk(b"data: [DONE]\n\n"), last_chunk()],
        false => vec![Step::Send(response(200, &[("x-request-id", "workers-own")], b"{}"))],
    };
    ScriptedWorker::start(script).await.expect("a free port")
}

fn all<'a>(seen: &'a Seen, name: &str) -> Vec<&'a str> {
    seen.headers.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str()).collect()
}

#[tokio::test]
async fn headers_one_authorization_reaches_a_worker_and_never_the_gateways_own_key() {
    for (given, own, right) in [
        (vec![("api_key", "GATEWAY-KEY")], Some("WORKER-KEY"), vec!["Bearer WORKER-KEY"]),
        (vec![("api_key", "GATEWAY-KEY"), ("worker_token", "ALL")], None, vec!["Bearer ALL"]),
        (vec![("user_api_key", "GATEWAY-KEY")], None, vec![]),
        (vec![], Some("WORKER-KEY"), vec!["Bearer WORKER-KEY"]),
        (vec![], None, vec!["Bearer GATEWAY-KEY"]),
    ] {
        let worker = echo().await;
        let gateway = Gateway::start(&given, &[]).await;
        let spec = branchline_worker::WorkerSpec {
            api_key: own.map(str::to_owned),
            ..branchline_worker::WorkerSpec::new(worker.url())
        };
        gateway.app.workers.add(&gateway.app.fleet, spec).expect("a good worker");
        gateway.app.fleet.wait_until(|fleet| fleet.workers().iter().any(|worker| worker.is_ready())).await;
        for body in [r#"{"prompt":"x"}"#, r#"{"prompt":"x","stream":true}"#] {
            let headers = [("authorization", "Bearer GATEWAY-KEY"), ("x-api-key", "GATEWAY-KEY")];
            assert_eq!(gateway.call("POST", "/v1/completions", &headers, body).await.status, 200);
            let seen = worker.record().seen.last().cloned().expect("a request");
            assert_eq!(all(&seen, "authorization"), right, "{given:?} {own:?}");
            assert_eq!(all(&seen, "x-api-key").is_empty(), !given.is_empty());
        }
    }
}

#[tokio::test]
async fn headers_custom_pass_hop_by_hop_stop() {
    let worker = echo().await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let headers = [
        ("x-my-label", "team=a"),
        ("traceparent", trace),
        ("x-request-id", "req-42"),
        ("connection", "X-Drop-Me"),
        ("x-drop-me", "1"),
        ("te", "trailers"),
        ("proxy-authorization", "x"),
        ("keep-alive", "timeout=5"),
        ("upgrade", "h2c"),
        ("x-multi", "1"),
        ("x-multi", "2"),
    ];
    let answer = gateway.call("POST", "/v1/completions", &headers, r#"{"prompt":"x"}"#).await;
    let seen = worker.record().seen.remove(0);
    for (name, value) in [("x-my-label", "team=a"), ("x-request-id", "req-42")] {
        assert_eq!(all(&seen, name), [value]);
    }
    assert!(
        seen.header("traceparent").is_some_and(|value| value.contains("0af7651916cd43dd8448eb211c80319c"))
    );
    assert_eq!(all(&seen, "x-multi"), ["1", "2"]);
    for name in ["x-drop-me", "te", "proxy-authorization", "keep-alive", "upgrade", "transfer-encoding"] {
        assert!(all(&seen, name).is_empty(), "{name} reached the worker");
    }
    let ids: Vec<_> = answer.headers.iter().filter(|(name, _)| name == "x-request-id").collect();
    assert_eq!(ids.len(), 1);
    assert_eq!(answer.header("x-request-id"), Some("req-42"));
}

#[tokio::test]
async fn security_client_chosen_peer_is_never_called_nor_passed_on() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let peer = listener.local_addr().expect("bound").to_string();
    let worker = echo().await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let url = format!("http://{peer}");
    let headers = [
        ("x-prefiller-host-port", peer.as_str()),
        ("x-prefiller-url", &url),
        ("x-gateway-destination-endpoint", &peer),
        ("x-gateway-destination-endpoint-subset", &peer),
        ("x-encoder-hosts-ports", &peer),
    ];
    assert_eq!(gateway.call("POST", "/v1/completions", &headers, r#"{"prompt":"x"}"#).await.status, 200);
    let seen = worker.record().seen.remove(0);
    for (name, _) in headers {
        assert_eq!(seen.header(name), None);
    }
    for (name, value) in [
        ("bootstrap_host", json!("127.0.0.1")),
        ("bootstrap_port", json!(9999)),
        ("bootstrap_room", json!(0)),
        ("kv_transfer_params", json!({"remote_host": "127.0.0.1", "remote_port": 9999})),
    ] {
        for path in ["/v1/completions", "/v1/chat/completions", "/generate", "/v1/embeddings"] {
            let answer = gateway.post(path, &json!({"prompt": "x", name: value}).to_string()).await;
            assert_eq!(
                (answer.status, answer.json()["error"]["param"].as_str()),
                (400, Some(name)),
                "{path}"
            );
        }
    }
    assert_eq!(worker.record().seen.len(), 1);
    let called = tokio::time::timeout(std::time::Duration::from_millis(50), listener.accept()).await;
    assert!(called.is_err(), "somebody connected");
}

#[tokio::test]
async fn security_sentinel_field_is_refused_before_an_engine_sees_it() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    for (name, value) in [
        ("bootstrap_host", json!("2.2.2.2")),
        ("bootstrap_room", json!(0)),
        ("kv_transfer_params", json!({"do_remote_decode": true})),
    ] {
        let answer = gateway.post("/generate", &json!({"input_ids": [1, 2], name: value}).to_string()).await;
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(name)));
    }
    assert!(engine.submits().is_empty());
}

#[tokio::test]
async fn security_key_compare_tells_nothing_about_the_key() {
    let worker = echo().await;
    let gateway = Gateway::start(&[("api_key", "k-0123456789abcdef")], &[worker.url()]).await;
    let mut bodies = Vec::new();
    for key in ["", "k", "k-0123456789abcdeX", "k-0123456789abcdef0", "K-0123456789ABCDEF"] {
        let bearer = format!("Bearer {key}");
        let answer = gateway.call("GET", "/v1/models", &[("authorization", bearer.as_str())], "").await;
        assert_eq!(answer.status, 401, "{key:?}");
        bodies.push(answer.text());
    }
    assert!(bodies.iter().all(|body| *body == bodies[0] && !body.contains("0123456789")), "{bodies:?}");
    let good = gateway.call("GET", "/v1/models", &[("authorization", "Bearer k-0123456789abcdef")], "").await;
    assert_eq!(good.status, 200);
}

#[tokio::test]
async fn each_role_reaches_its_routes_and_only_operators_see_the_workers() {
    let worker = echo().await;
    let given = [
        ("api_key", "admin"),
        ("user_api_key", "sha256:04f8996da763b7a969b1028ee3007569eaf3a635486ddab211d512c85b9df8fb"),
    ];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let call = async |path: &str, key: &str| {
        let headers = [("x-api-key", key)];
        let headers = if key.is_empty() { &[][..] } else { &headers[..] };
        gateway.call("GET", path, headers, "").await
    };
    for path in ["/workers", "/metrics", "/server_info", "/list_workers", "/explain/x"] {
        assert_eq!(call(path, "").await.status, 401, "{path}");
        assert_eq!(call(path, "wrong").await.status, 401, "{path}");
        assert_eq!(call(path, "user").await.status, 403, "{path}");
        assert_ne!(call(path, "admin").await.status / 100, 401 / 100 * 100, "{path}");
    }
    for key in ["user", "admin"] {
        assert_eq!(call("/v1/models", key).await.status, 200);
    }
    for (key, seen) in [("", false), ("wrong", false), ("user", false), ("admin", true)] {
        let health = call("/health", key).await;
        assert_eq!(health.status, 200);
        assert_eq!(health.text().contains(&worker.url()), seen, "{key}: {}", health.text());
        assert_eq!(health.json()["workers_ready"], 1);
    }
}

#[tokio::test]
async fn the_first_model_is_found_by_its_alias() {
    let worker = echo().await;
    worker.serve_models(&["org/model"]);
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let known = gateway.app.fleet.wait_until(|fleet| !fleet.names().is_empty());
    tokio::time::timeout(crate::kit::PATIENCE, known).await.expect("its models are known");
    let answer = gateway.get("/v1/models/default").await;
    assert_eq!((answer.status, answer.json()["id"].as_str()), (200, Some("org/model")));
    assert_eq!(gateway.get("/v1/models/other").await.status, 404);
}
