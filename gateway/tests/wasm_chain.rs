//! Several modules at once: whom a request meets, in which order, and what a failing one does to it.

use crate::guests;
use crate::kit::{Answer, Gateway};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_testkit::{ScriptedWorker, Step, response};
use serde_json::{Value, json};

const CHAT: &str = r#"{"model":"small","messages":[{"role":"user","content":"x"}]}"#;
const PATH: &str = "/v1/chat/completions";

async fn answering(status: u16, body: &'static str) -> ScriptedWorker {
    let kind = [("content-type", "application/json"), ("x-worker", "1")];
    ScriptedWorker::start(move |_| vec![Step::Send(response(status, &kind, body.as_bytes()))])
        .await
        .expect("a free port")
}

async fn upload(gateway: &Gateway, mut settings: Value, bytes: &[u8]) -> Answer {
    settings["module"] = json!(STANDARD.encode(bytes));
    gateway.post("/wasm", &settings.to_string()).await
}

async fn load(gateway: &Gateway, settings: Value, bytes: &[u8]) -> String {
    let answer = upload(gateway, settings, bytes).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["uuid"].as_str().expect("a uuid").to_owned()
}

async fn remove(gateway: &Gateway, uuid: &str) {
    let answer = gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

fn header_of(worker: &ScriptedWorker, request: usize, name: &str) -> Option<String> {
    worker.record().requests(PATH)[request].header(name).map(str::to_owned)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_meet_modules_by_order_and_answers_in_the_opposite_order() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "late", "order": 9}), &guests::adds_header("x-v", b"late")).await;
    load(&gateway, json!({"name": "early", "order": -9}), &guests::adds_header("x-v", b"early")).await;
    load(&gateway, json!({"name": "first", "order": 1}), &guests::marks_responses(201, "x-seen", "first"))
        .await;
    load(&gateway, json!({"name": "second", "order": 2}), &guests::marks_responses(202, "x-seen", "second"))
        .await;
    let answer = gateway.post(PATH, CHAT).await;
    // The last to write wins: of requests the highest order, of answers the lowest.
    assert_eq!(header_of(&worker, 0, "x-v").as_deref(), Some("late"));
    assert_eq!((answer.status, answer.header("x-seen")), (201, Some("first")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_ends_the_chain_and_no_later_module_is_asked() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "gate", "order": 1}), &guests::rejects(402, "pay")).await;
    load(&gateway, json!({"name": "trap", "order": 2}), &guests::traps()).await;
    for _ in 0..3 {
        let answer = gateway.post(PATH, CHAT).await;
        assert_eq!((answer.status, answer.text().as_str()), (402, "pay"));
    }
    let listed = gateway.get("/wasm").await.json();
    assert_eq!(listed["modules"][0]["calls"], 3);
    assert_eq!(listed["modules"][1]["calls"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_choose_by_path_method_and_model() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let chat_only = json!({"name": "chat", "routes": {"paths": ["/v1/chat/*"], "methods": ["POST"]}});
    let uuid = load(&gateway, chat_only, &guests::rejects(418, "chat")).await;
    assert_eq!(gateway.post(PATH, CHAT).await.status, 418);
    assert_eq!(gateway.post("/v1/completions", CHAT).await.status, 200);
    remove(&gateway, &uuid).await;
    let one_model = json!({"name": "model", "routes": {"models": ["sm*"]}});
    load(&gateway, one_model, &guests::rejects(418, "model")).await;
    assert_eq!(gateway.post(PATH, CHAT).await.status, 418);
    for other in [r#"{"model":"large"}"#, r#"{"messages":[]}"#, "not json", r#"{"model":7}"#, ""] {
        assert_ne!(gateway.post(PATH, other).await.status, 418, "{other:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_one_module_names_routes_the_next() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let gold = json!({"name": "gold", "order": 2, "routes": {"tenants": ["gold"]}});
    load(&gateway, gold, &guests::adds_header("x-plan", b"best")).await;
    gateway.post(PATH, CHAT).await;
    assert_eq!(header_of(&worker, 0, "x-plan"), None, "nobody is gold yet");
    let naming = json!({"name": "naming", "order": 1});
    load(&gateway, naming, &guests::adds_header("x-tenant-id", b"gold")).await;
    gateway.post(PATH, CHAT).await;
    assert_eq!(header_of(&worker, 1, "x-plan").as_deref(), Some("best"));
    assert_eq!(header_of(&worker, 1, "x-tenant-id").as_deref(), Some("gold"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quarantined_module_refuses_or_is_passed_by_until_it_is_changed() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    for fail in ["closed", "open"] {
        let settings = json!({"name": fail, "fail": fail, "quarantine_after": 2});
        let uuid = load(&gateway, settings, &guests::traps()).await;
        let expected = if fail == "open" { 200 } else { 503 };
        for _ in 0..5 {
            assert_eq!(gateway.post(PATH, CHAT).await.status, expected);
        }
        let shown = gateway.get(&format!("/wasm/{uuid}")).await.json();
        assert_eq!((&shown["quarantined"], &shown["calls"]), (&json!(true), &json!(2)), "{shown}");
        let metrics = gateway.get("/metrics").await.text();
        assert!(metrics.contains(&format!("branchline_router_wasm_quarantined{{module=\"{fail}\"}} 1")));
        let skipped = format!("module=\"{fail}\",hook=\"on-request\",outcome=\"quarantined\"}} 3");
        assert!(metrics.contains(&skipped), "{skipped} is not in {metrics}");
        let logged = gateway.get(&format!("/wasm/{uuid}/logs?after=0")).await.json();
        let last = logged["lines"].as_array().and_then(|lines| lines.last()).cloned().unwrap_or_default();
        assert!(last["message"].as_str().is_some_and(|text| text.contains("quarantined")), "{logged}");
        let body = json!({"module": STANDARD.encode(guests::noop())}).to_string();
        let mended = gateway.call("PUT", &format!("/wasm/{uuid}"), &[], &body).await;
        assert_eq!(mended.json()["quarantined"], json!(false), "{}", mended.text());
        assert_eq!(gateway.post(PATH, CHAT).await.status, 200);
        remove(&gateway, &uuid).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_hooks_that_are_asked_for_are_called_and_none_while_it_is_off() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let module = guests::with(
        "filter",
        "",
        &[
            guests::about(false, false),
            guests::export_trap("on-request"),
            guests::export_trap("on-response"),
            guests::export_trap("on-stream-event"),
        ]
        .concat(),
    );
    let uuid = load(&gateway, json!({"name": "m", "hooks": ["OnStreamEvent"]}), &module).await;
    assert_eq!(gateway.post(PATH, CHAT).await.status, 200, "it is no stream");
    let path = format!("/wasm/{uuid}");
    let all = gateway.call("PATCH", &path, &[], r#"{"hooks": []}"#).await;
    assert_eq!(all.json()["hooks"], json!(["on-request", "on-response", "on-stream-event"]));
    assert_eq!(gateway.post(PATH, CHAT).await.status, 503);
    gateway.call("PATCH", &path, &[], r#"{"enabled": false}"#).await;
    assert_eq!(gateway.post(PATH, CHAT).await.status, 200);
    let wrong = gateway.call("PATCH", &path, &[], r#"{"hooks": ["on-route"]}"#).await;
    assert_eq!(
        (wrong.status, wrong.json()["error"]["param"].as_str()),
        (400, Some("hooks")),
        "{}",
        wrong.text()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_too_large_for_a_module_is_refused_or_passed_whole() {
    let body: &'static str = Box::leak(format!("\"{}\"", "x".repeat(200 << 10)).into_boxed_str());
    let worker = answering(200, body).await;
    let gateway = Gateway::start(&[("wasm_body_limit", "100KiB")], &[worker.url()]).await;
    for (fail, status) in [("closed", 502), ("open", 200)] {
        let settings = json!({"name": fail, "fail": fail});
        let uuid = load(&gateway, settings, &guests::reads_responses()).await;
        let answer = gateway.post(PATH, CHAT).await;
        assert_eq!((answer.status, answer.complete), (status, true), "{fail}");
        match fail {
            "open" => assert_eq!(answer.text(), body),
            _ => assert!(answer.text().contains("--wasm-body-limit"), "{}", answer.text()),
        }
        remove(&gateway, &uuid).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_breaks_off_before_a_reading_module_is_an_error_and_never_a_part() {
    let worker = ScriptedWorker::start(|_| {
        let head =
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"half\":";
        vec![Step::Send(head.to_vec()), Step::Reset]
    })
    .await
    .expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "reader"}), &guests::reads_responses()).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!(answer.status, 502, "{}", answer.text());
    assert!(answer.json()["error"]["message"].is_string() && !answer.text().contains("half\\\""));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_of_one_module_is_shown_to_the_on_error_of_another() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let soft = guests::rejects_responses("on-error", 503, "come back later", false);
    load(&gateway, json!({"name": "soft", "order": 1}), &soft).await;
    load(&gateway, json!({"name": "trap", "order": 2}), &guests::traps()).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!((answer.status, answer.text().as_str()), (503, "come back later"));
    assert!(worker.record().requests(PATH).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn error_answers_of_a_worker_go_to_on_error_or_else_to_on_response() {
    let worker = answering(500, "{\"stack\":\"of the worker\"}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let hides = guests::rejects_responses("on-response", 500, "hidden", true);
    let uuid = load(&gateway, json!({"name": "hides"}), &hides).await;
    assert_eq!(gateway.post(PATH, CHAT).await.text(), "hidden");
    remove(&gateway, &uuid).await;
    let good = guests::rejects_responses("on-error", 500, "softened", false);
    load(&gateway, json!({"name": "soft"}), &good).await;
    assert_eq!(gateway.post(PATH, CHAT).await.text(), "softened");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_response_module_withholds_the_answer_unless_it_fails_open() {
    let worker = answering(200, "{\"secret\":1}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let wit = "filter";
    let parts = [
        guests::about(false, false),
        guests::export_continue("on-request"),
        guests::export_trap("on-response"),
        guests::export_continue("on-stream-event"),
    ];
    let module = guests::with(wit, "", &parts.concat());
    let uuid = load(&gateway, json!({"name": "closed"}), &module).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!(answer.status, 503);
    assert!(!answer.text().contains("secret") && answer.header("x-worker").is_none(), "{}", answer.text());
    remove(&gateway, &uuid).await;
    load(&gateway, json!({"name": "open", "fail": "open"}), &module).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!(
        (answer.status, answer.text().as_str(), answer.header("x-worker")),
        (200, "{\"secret\":1}", Some("1"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn models_are_listed_through_modules_and_probes_past_them() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "gate"}), &guests::rejects(401, "who are you")).await;
    assert_eq!(gateway.get("/v1/models").await.status, 401);
    for path in ["/health", "/liveness", "/readiness", "/metrics", "/workers", "/server_info", "/wasm"] {
        assert_eq!(gateway.get(path).await.status, 200, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_is_one_for_all_connections() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "budget"}), &guests::budget(10)).await;
    let answers = futures_util::future::join_all((0..25).map(|_| gateway.post(PATH, CHAT))).await;
    let count = |status: u16| answers.iter().filter(|answer| answer.status == status).count();
    assert_eq!((count(200), count(429)), (10, 15));
    assert_eq!(worker.record().requests(PATH).len(), 10);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_the_call_it_waits_for() {
    let worker = answering(200, "{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let settings = json!({"name": "spin", "limits": {"time_ms": 60_000, "concurrency": 1}});
    let uuid = load(&gateway, settings, &guests::spins()).await;
    let client = gateway.send("POST", PATH, &[], CHAT).await;
    drop(client);
    // The one place of the module is free again long before its minute is over.
    let path = format!("/wasm/{uuid}");
    gateway.call("PATCH", &path, &[], r#"{"limits": {"time_ms": 100}}"#).await;
    assert_eq!(gateway.post(PATH, CHAT).await.status, 503);
    gateway.stop().await;
}
