//! Keys, Host and Origin, body limits, probes, admin routes, and the end of a gateway's life.

use std::time::Duration;

use crate::kit::Gateway;
use branchline_testkit::{
    EngineSetup, FakeEngine, ScriptedWorker, Step, chunk, event_stream, last_chunk, response,
};

async fn plain_worker() -> ScriptedWorker {
    ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.expect("a free port")
}

#[tokio::test]
async fn keys_are_asked_for_everywhere_but_at_probes() {
    let worker = plain_worker().await;
    let gateway = Gateway::start(&[("api_key", "secret")], &[worker.url()]).await;
    for path in ["/v1/models", "/metrics", "/workers", "/server_info", "/nothing"] {
        let answer = gateway.get(path).await;
        assert_eq!(
            (answer.status, answer.json()["error"]["code"].as_str()),
            (401, Some("unauthenticated")),
            "{path}"
        );
        assert!(answer.header("www-authenticate").is_some());
    }
    for path in ["/health", "/readiness", "/liveness"] {
        assert_eq!(gateway.get(path).await.status, 200, "{path}");
    }
    for header in [("authorization", "Bearer secret"), ("x-api-key", "secret")] {
        assert_eq!(gateway.call("GET", "/workers", &[header], "").await.status, 200);
    }
    assert_eq!(worker.record().seen.len(), 0);
}

#[tokio::test]
async fn a_key_taken_out_of_its_file_opens_nothing_from_its_next_request_on() {
    let (folder, worker) = (tempfile::tempdir().expect("a folder"), plain_worker().await);
    let path = folder.path().join("keys");
    let write = |text: &str| std::fs::write(&path, text).expect("written");
    write("admin old\n");
    let given =
        [("api_key_file", path.to_str().expect("UTF-8")), ("user_api_key", "given"), ("admin_port", "0")];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let ask = |key: &str| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\ncontent-length: 2\r\n\r\n{{}}"
        )
    };
    let mut kept = gateway.connect().await;
    kept.write(ask("old").as_bytes()).await;
    kept.read_until("200 OK").await;
    write("admin new\n");
    let taken = async {
        while gateway.operate("GET", "/workers", &[("x-api-key", "new")], "").await.status != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(crate::kit::PATIENCE, taken).await.expect("the new key is taken");
    kept.write(ask("old").as_bytes()).await;
    kept.read_until("401 Unauthorized").await;
    assert_eq!(gateway.operate("GET", "/workers", &[("x-api-key", "old")], "").await.status, 401);
    for key in ["new", "given"] {
        assert_eq!(
            gateway.call("POST", "/v1/completions", &[("x-api-key", key)], "{}").await.status,
            200,
            "{key}"
        );
    }
    write("sha256:12\n");
    let counted =
        |outcome| format!("branchline_router_file_reads_total{{file=\"keys\",outcome=\"{outcome}\"}} 1\n");
    let refused = async {
        loop {
            let page = gateway.operate("GET", "/metrics", &[("x-api-key", "new")], "").await;
            assert_eq!(page.status, 200, "the last keys stay");
            if page.text().contains(&counted("refused")) {
                break page.text();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let page = tokio::time::timeout(crate::kit::PATIENCE, refused).await.expect("it is counted");
    assert!(page.contains(&counted("used")), "{page}");
}

#[tokio::test]
async fn admin_routes_refuse_rebound_names_and_foreign_pages() {
    let gateway = Gateway::start_cold(&[], &[]).await;
    for headers in [&[("host", "evil.example")][..], &[("origin", "https://evil.example")]] {
        let answer = gateway.call("GET", "/workers", headers, "").await;
        assert_eq!(
            (answer.status, answer.json()["error"]["code"].as_str()),
            (403, Some("permission_denied"))
        );
    }
    assert_eq!(gateway.get("/workers").await.status, 200);
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_whether_declared_or_not() {
    let worker = plain_worker().await;
    let gateway = Gateway::start(&[("max_payload_size", "1KiB")], &[worker.url()]).await;
    let answer = gateway.post("/v1/completions", &"x".repeat(1025)).await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (413, Some("payload_too_large")));
    let mut client = gateway.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    client.write(format!("{head}800\r\n{}\r\n", "x".repeat(0x800)).as_bytes()).await;
    client.read_until("413").await;
    assert_eq!(gateway.post("/v1/completions", &"x".repeat(1024)).await.status, 200);
    assert_eq!(worker.record().seen.len(), 1);
}

#[tokio::test]
async fn a_head_that_never_ends_is_given_up() {
    let gateway = Gateway::start_cold(&[("header_timeout", "100ms")], &[]).await;
    let mut client = gateway.connect().await;
    client.write(b"GET /health HTTP/1.1\r\nx: ").await;
    let mut rest = Vec::new();
    let end = tokio::io::AsyncReadExt::read_to_end(&mut client.stream, &mut rest);
    assert!(tokio::time::timeout(crate::kit::PATIENCE, end).await.is_ok(), "the connection stays open");
}

#[tokio::test]
async fn unknown_paths_and_wrong_methods_answer_in_the_error_shape() {
    let gateway = Gateway::start_cold(&[], &[]).await;
    let answer = gateway.get("/nothing").await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (404, Some("not_found")));
    let answer = gateway.call("PUT", "/health", &[], "").await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (405, Some("method_not_allowed")));
}

#[tokio::test]
async fn workers_are_listed_added_and_removed() {
    let worker = plain_worker().await;
    let gateway = Gateway::start_cold(&[], &[]).await;
    assert_eq!(gateway.get("/health").await.status, 503);
    let body = format!(r#"{{"url":"{}"}}"#, worker.url());
    let added = gateway.post("/workers", &body).await;
    assert_eq!(added.status, 202);
    assert_eq!(gateway.post("/workers", &body).await.status, 409);
    assert_eq!(gateway.post("/workers", r#"{"url":"ftp://x"}"#).await.status, 400);
    let ready = gateway.app.fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready()));
    tokio::time::timeout(crate::kit::PATIENCE, ready).await.expect("it becomes ready");
    assert_eq!(gateway.get("/health").await.json()["workers"][0]["url"], worker.url());
    let id = added.json()["id"].as_str().expect("an id").to_owned();
    assert_eq!(gateway.call("DELETE", &format!("/workers/{id}"), &[], "").await.status, 200);
    assert_eq!(gateway.get("/workers").await.json()["total"], 0);
    assert_eq!(gateway.call("DELETE", &format!("/workers/{id}"), &[], "").await.status, 404);
}

#[tokio::test]
async fn flush_answers_for_each_worker() {
    let good = plain_worker().await;
    let bad =
        ScriptedWorker::start(|_| vec![Step::Send(response(500, &[], b"no"))]).await.expect("a free port");
    let gateway = Gateway::start(&[], &[good.url(), bad.url()]).await;
    let answer = gateway.post("/flush_cache", "").await;
    assert_eq!(answer.status, 502);
    let body = answer.json();
    assert_eq!((&body["success"], &body["workers"][0]["status"]), (&false.into(), &200.into()));
    assert!(
        body["workers"][1]["error"]["message"].as_str().is_some_and(|text| text.contains("500")),
        "{body}"
    );
    assert_eq!(good.record().seen[0].target, "/flush_cache");
}

#[tokio::test]
async fn a_flush_succeeds_though_http_workers_have_no_such_path() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let lacking =
        ScriptedWorker::start(|_| vec![Step::Send(response(404, &[], b"no"))]).await.expect("a free port");
    let gateway = Gateway::start(&[], &[engine.url(), lacking.url()]).await;
    let answer = gateway.post("/flush_cache", "").await;
    let body = answer.json();
    assert_eq!((answer.status, &body["success"]), (200, &true.into()), "{body}");
    assert_eq!(body["workers"][0]["flushed_pages"], 64);
    assert_eq!(
        (&body["workers"][1]["supported"], &body["workers"][1]["status"]),
        (&false.into(), &404.into())
    );
    engine.kill();
    assert_eq!(gateway.post("/flush_cache", "").await.status, 502);
}

#[tokio::test]
async fn a_refusal_is_counted_once() {
    let gateway = Gateway::start_cold(&[], &[]).await;
    assert_eq!(gateway.get("/v1/models/none").await.status, 503);
    let page = gateway.get("/metrics").await.text();
    assert!(page.contains("branchline_router_errors_total{code=\"unavailable\"} 1\n"), "{page}");
    assert!(page.contains("route=\"/v1/models/{id}\",status=\"503\""), "{page}");
}

#[tokio::test]
async fn the_metrics_port_serves_metrics_and_nothing_else() {
    let gateway = Gateway::start_cold(&[("prometheus_port", "0"), ("api_key", "secret")], &[]).await;
    let address = gateway.metrics_address.expect("a second port");
    for (path, status) in [("/metrics", "HTTP/1.1 200"), ("/workers", "HTTP/1.1 404")] {
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("it listens");
        let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.expect("it reads");
        let mut text = String::new();
        tokio::io::AsyncReadExt::read_to_string(&mut stream, &mut text).await.expect("it answers");
        assert!(text.starts_with(status), "{text}");
    }
}

#[tokio::test]
async fn a_stop_lets_running_streams_end_and_takes_no_new_connection() {
    let worker = ScriptedWorker::start(|_| {
        let pause = Step::Pause(Duration::from_millis(300));
        vec![event_stream(), chunk(b"data: 1\n\n"), pause, chunk(b"data: [DONE]\n\n"), last_chunk()]
    })
    .await
    .expect("a free port");
    let mut gateway = Gateway::start(&[], &[worker.url()]).await;
    let mut client = gateway.send("POST", "/v1/completions", &[], r#"{"prompt":"x","stream":true}"#).await;
    client.read_until("data: 1").await;
    gateway.begin_stop();
    let answer = client.answer().await;
    assert_eq!((answer.text().as_str(), answer.complete), ("data: 1\n\ndata: [DONE]\n\n", true));
    gateway.ended().await;
    assert!(tokio::net::TcpStream::connect(gateway.address).await.is_err());
}

#[tokio::test]
async fn a_stream_that_outlives_the_drain_is_aborted() {
    let worker = ScriptedWorker::start(|_| vec![event_stream(), chunk(b"data: 1\n\n"), Step::Hold])
        .await
        .expect("a port");
    let gateway = Gateway::start(&[("drain_timeout", "50ms")], &[worker.url()]).await;
    let mut client = gateway.send("POST", "/v1/completions", &[], r#"{"prompt":"x","stream":true}"#).await;
    client.read_until("data: 1").await;
    gateway.stop().await;
    assert!(!client.answer().await.complete);
    assert!(worker.wait_for(|record| record.left == 1).await.is_some());
}
