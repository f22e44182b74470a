//! Middleware through a whole gateway: uploads over HTTP, real components, scripted workers.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_testkit::{ScriptedWorker, Step, chunk, event_stream, last_chunk, response};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use crate::guests;
use crate::kit::{Answer, Gateway};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#;
const PATH: &str = "/v1/chat/completions";

async fn answering(body: &'static str) -> ScriptedWorker {
    let kind = [("content-type", "application/json"), ("x-worker", "1")];
    ScriptedWorker::start(move |_| vec![Step::Send(response(200, &kind, body.as_bytes()))])
        .await
        .expect("a free port")
}

/// A stream of so many events, each sent when its turn is given.
async fn streaming(turns: &Arc<Semaphore>, events: usize) -> ScriptedWorker {
    let turns = Arc::clone(turns);
    ScriptedWorker::start(move |_| {
        let mut steps = vec![event_stream()];
        for index in 0..events {
            let event =
                format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{index}\"}}}}]}}\n\n");
            steps.extend([Step::Turn(Arc::clone(&turns)), chunk(event.as_bytes())]);
        }
        steps.push(chunk(b"data: [DONE]\n\n"));
        steps.push(last_chunk());
        steps
    })
    .await
    .expect("a free port")
}

async fn upload(gateway: &Gateway, settings: Value, bytes: &[u8]) -> Answer {
    let mut settings = settings;
    settings["module"] = json!(STANDARD.encode(bytes));
    gateway.post("/wasm", &settings.to_string()).await
}

async fn load(gateway: &Gateway, settings: Value, bytes: &[u8]) -> String {
    let answer = upload(gateway, settings, bytes).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["uuid"].as_str().expect("a uuid").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_uploaded_module_changes_requests_and_a_removed_one_does_not() {
    let worker = answering("{\"ok\":true}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let uuid = load(&gateway, json!({"name": "tag"}), &guests::adds_header("x-added", b"yes")).await;
    assert_eq!(gateway.post(PATH, CHAT).await.text(), "{\"ok\":true}");
    let gone = gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    assert_eq!(gone.status, 200, "{}", gone.text());
    gateway.post(PATH, CHAT).await;
    let record = worker.record();
    let seen: Vec<_> =
        record.requests(PATH).iter().map(|seen| seen.header("x-added").map(str::to_owned)).collect();
    assert_eq!(seen, [Some("yes".to_owned()), None]);
    assert!(record.requests(PATH).iter().all(|seen| seen.body == CHAT.as_bytes()), "bytes unchanged");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejection_reaches_no_worker_and_changes_fit_their_length() {
    let worker = answering("{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let uuid = load(&gateway, json!({"name": "gate"}), &guests::rejects(403, "not for you")).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!((answer.status, answer.text().as_str(), answer.complete), (403, "not for you", true));
    assert!(worker.record().requests(PATH).is_empty());
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    let other = r#"{"model":"m","messages":[],"longer":"than before, by far more than a few bytes"}"#;
    load(&gateway, json!({"name": "body"}), &guests::writes_body(other)).await;
    assert_eq!(gateway.post(PATH, CHAT).await.status, 200);
    let record = worker.record();
    let seen = record.requests(PATH)[0];
    assert_eq!(String::from_utf8_lossy(&seen.body), other);
    assert_eq!(seen.header("content-length"), Some(other.len().to_string().as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_routes_are_never_touched_nor_reached_by_a_rewrite() {
    let worker = answering("{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "sneaky"}), &guests::writes_path("/workers")).await;
    assert_eq!(gateway.get("/health").await.status, 200);
    assert_eq!(gateway.get("/wasm").await.json()["modules"].as_array().map(Vec::len), Some(1));
    let answer = gateway.post(PATH, r#"{"url":"http://127.0.0.1:1"}"#).await;
    assert_eq!(answer.status, 403, "{}", answer.text());
    assert_eq!(gateway.app.fleet.workers().len(), 1);
}

/// cases/wasm.jsonl: wasm-keeps-streaming.
#[tokio::test(flavor = "multi_thread")]
async fn wasm_keeps_streaming_behind_modules_that_ask_for_no_body() {
    let turns = Arc::new(Semaphore::new(0));
    let worker = streaming(&turns, 10).await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "tag"}), &guests::adds_header("x-added", b"yes")).await;
    load(&gateway, json!({"name": "mark"}), &guests::marks_responses(200, "x-seen", "1")).await;
    load(&gateway, json!({"name": "reader"}), &guests::reads_responses()).await;
    load(&gateway, json!({"name": "events"}), &guests::reads_events()).await;
    let mut client = gateway.send("POST", PATH, &[], CHAT).await;
    // The worker goes on only once the client has what was sent.
    for index in 0..10 {
        turns.add_permits(1);
        client.read_until(&format!("\"content\":\"{index}\"")).await;
    }
    let answer = client.answer().await;
    assert_eq!((answer.events().len(), answer.header("x-seen")), (11, Some("1")));
    assert_eq!(worker.record().requests(PATH)[0].header("x-added"), Some("yes"));
}

/// cases/wasm.jsonl: wasm-body-too-large.
#[tokio::test(flavor = "multi_thread")]
async fn wasm_body_too_large_is_said_not_hidden() {
    let worker = answering("{}").await;
    let options = [("wasm_body_limit", "100KiB"), ("max_payload_size", "640KiB")];
    let gateway = Gateway::start(&options, &[worker.url()]).await;
    let body = |kib: usize| format!(r#"{{"model":"m","pad":"{}"}}"#, "x".repeat(kib << 10));
    let bodies = [body(90), body(110), body(650)];
    for (body, status) in bodies.iter().zip([200, 200, 413]) {
        assert_eq!(gateway.post(PATH, body).await.status, status, "without a module");
    }
    load(&gateway, json!({"name": "reader"}), &guests::reads_body()).await;
    for (body, status) in bodies.iter().zip([200, 413, 413]) {
        let answer = gateway.post(PATH, body).await;
        assert_eq!(answer.status, status, "with a module");
        if status == 413 {
            assert!(answer.json()["error"]["message"].as_str().is_some_and(|text| text.contains("body")));
        }
    }
    let record = worker.record();
    let lengths: Vec<_> = record.requests(PATH).iter().map(|seen| seen.body.len()).collect();
    assert_eq!(lengths, [bodies[0].len(), bodies[1].len(), bodies[0].len()], "never empty, never cut");
}

/// cases/wasm.jsonl: wasm-endless-module.
#[tokio::test(flavor = "multi_thread")]
async fn wasm_endless_module_fails_open_or_closed_and_leaves_other_routes_alone() {
    let worker = answering("{\"ok\":1}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let limits = json!({"time_ms": 100, "memory_mib": 64});
    for (name, bytes, cause) in [
        ("spin", guests::spins(), "timeout"),
        ("grow", guests::grows(), "limit"),
        ("recurse", guests::recurses(), "trap"),
        ("trap", guests::traps(), "trap"),
    ] {
        for fail in ["open", "closed"] {
            let settings = json!({"name": format!("{name}-{fail}"), "fail": fail, "limits": limits,
                "routes": {"paths": [PATH]}, "quarantine_after": 0});
            let uuid = load(&gateway, settings, &bytes).await;
            let before = worker.record().requests(PATH).len();
            let hostile = futures_util::future::join_all((0..16).map(|_| gateway.post(PATH, CHAT)));
            let good = futures_util::future::join_all((0..16).map(|_| gateway.post("/v1/completions", CHAT)));
            let (hostile, good) = futures_util::join!(hostile, good);
            assert!(good.iter().all(|answer| answer.status == 200), "{name} {fail}");
            for answer in &hostile {
                match fail {
                    "open" => assert_eq!(answer.text(), "{\"ok\":1}", "{name}"),
                    _ => assert_eq!(answer.status, 503, "{name}: {}", answer.text()),
                }
            }
            let record = worker.record();
            let reached = record.requests(PATH).len() - before;
            assert_eq!(reached, if fail == "open" { 16 } else { 0 }, "{name} {fail}");
            assert!(record.requests(PATH).iter().all(|seen| seen.body == CHAT.as_bytes()));
            let counted = gateway.get("/metrics").await.text();
            let line = format!(
                "branchline_router_wasm_calls_total{{module=\"{name}-{fail}\",hook=\"on-request\",outcome=\"{cause}\"}} 16"
            );
            assert!(counted.contains(&line), "{line} is not in {counted}");
            gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_answer_leaks_nothing_of_the_workers() {
    let worker = answering("{\"secret\":\"of the worker\"}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    for (name, reads) in [("blind", false), ("reader", true)] {
        let bytes = guests::rejects_responses("on-response", 451, "withheld", reads);
        let uuid = load(&gateway, json!({"name": name}), &bytes).await;
        let answer = gateway.post(PATH, CHAT).await;
        assert_eq!((answer.status, answer.text().as_str(), answer.complete), (451, "withheld", true));
        assert_eq!(answer.header("x-worker"), None, "{name}");
        gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    }
    let uuid = load(&gateway, json!({"name": "writer"}), &guests::writes_responses("[1]")).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!(
        (answer.status, answer.text().as_str(), answer.header("content-length")),
        (200, "[1]", Some("3"))
    );
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    // What a module that must see an answer can't see does not pass.
    let trap = guests::with("stream-filter", "", &guests::export_trap("on-stream-event"));
    load(&gateway, json!({"name": "trap"}), &trap).await;
    assert_eq!(gateway.post(PATH, CHAT).await.text(), "{\"secret\":\"of the worker\"}", "it is no stream");
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_changed_dropped_and_stopped_one_by_one() {
    let worker = streaming(&Arc::new(Semaphore::new(usize::MAX >> 4)), 4).await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let uuid = load(&gateway, json!({"name": "stop"}), &guests::writes_events("{\"n\":1}", 2, true)).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!(answer.events(), ["{\"n\":1}", "{\"n\":1}", "{\"n\":1}", "[DONE]"], "{}", answer.text());
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    let uuid = load(&gateway, json!({"name": "cut"}), &guests::writes_events("{\"n\":2}", 1, false)).await;
    let events = gateway.post(PATH, CHAT).await.events();
    assert_eq!((events.len(), events[2].as_str()), (3, "[DONE]"), "{events:?}");
    let last: Value = serde_json::from_str(&events[1]).expect("JSON");
    assert_eq!(last["choices"][0]["finish_reason"], "content_filter");
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    load(&gateway, json!({"name": "trap"}), &guests::traps_on_events()).await;
    let events = gateway.post(PATH, CHAT).await.events();
    assert_eq!(events.len(), 1, "one error event and no end mark: {events:?}");
    assert!(events[0].contains("middleware 'trap' failed"), "{events:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_are_shown_to_on_error_and_to_no_other_hook() {
    let kind = [("content-type", "application/json")];
    let worker = ScriptedWorker::start(move |_| vec![Step::Send(response(500, &kind, b"{\"oops\":1}"))])
        .await
        .expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "soften"}), &guests::rejects_responses("on-error", 502, "sorry", false))
        .await;
    assert_eq!(gateway.post(PATH, CHAT).await.text(), "sorry");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_swaps_under_load_fail_no_request() {
    let worker = answering("{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let versions = [guests::adds_header("x-v", b"1"), guests::adds_header("x-v", b"2")];
    let uuid = load(&gateway, json!({"name": "swap"}), &versions[0]).await;
    let path = format!("/wasm/{uuid}");
    let swaps = async {
        for swap in 1..=100 {
            let body = json!({"module": STANDARD.encode(&versions[swap % 2])}).to_string();
            let answer = gateway.call("PUT", &path, &[], &body).await;
            assert_eq!((answer.status, answer.json()["version"].as_u64()), (200, Some(swap as u64 + 1)));
        }
    };
    let done = std::cell::Cell::new(false);
    // 200 a second, whatever becomes of those before, unless the machine can't keep up at all.
    let load = async {
        let mut ticks = tokio::time::interval(Duration::from_millis(5));
        let mut running = FuturesUnordered::new();
        let mut sent = 0;
        while !done.get() || !running.is_empty() {
            tokio::select! {
                _ = ticks.tick(), if !done.get() && running.len() < 100 => {
                    running.push(gateway.post(PATH, CHAT));
                    sent += 1;
                }
                Some(answer) = running.next(), if !running.is_empty() => assert_eq!(answer.status, 200),
            }
        }
        sent
    };
    let swaps = async {
        swaps.await;
        done.set(true);
    };
    let ((), sent) = futures_util::join!(swaps, load);
    let record = worker.record();
    let seen = record.requests(PATH);
    assert_eq!(seen.len(), sent);
    assert!(seen.iter().all(|seen| matches!(seen.header("x-v"), Some("1" | "2"))), "always one of the two");
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_are_listed_changed_tried_and_read_over_http() {
    let worker = answering("{}").await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let uuid = load(&gateway, json!({"name": "gate", "order": 3}), &guests::rejects(403, "no")).await;
    let path = format!("/wasm/{uuid}");
    let again = upload(&gateway, json!({"name": "gate", "order": 3}), &guests::rejects(403, "no")).await;
    assert_eq!((again.status, again.json()["uuid"].as_str()), (200, Some(uuid.as_str())));
    let sample = json!({"hook": "on-request", "request": {"path": "/x", "body": "text"}}).to_string();
    let tried = gateway.post(&format!("{path}/dry-run"), &sample).await.json();
    assert_eq!(tried["outcome"]["action"]["reject"]["body"], "no", "{tried}");
    assert!(tried["outcome"]["cost"]["micros"].as_u64().is_some_and(|micros| micros > 0));
    let off = gateway.call("PATCH", &path, &[], r#"{"enabled": false}"#).await;
    assert_eq!((off.status, off.json()["version"].as_u64()), (200, Some(2)), "{}", off.text());
    assert_eq!(gateway.post(PATH, CHAT).await.status, 200);
    let listed = gateway.get("/wasm").await.json();
    assert_eq!(listed["modules"][0]["module_meta"]["name"], "gate");
    assert_eq!(listed["metrics"]["total_executions"], 0, "a dry run is no execution: {listed}");
    for (method, path, body, status) in [
        ("PATCH", path.as_str(), r#"{"speed": 1}"#, 400),
        ("PATCH", path.as_str(), r#"{"name": "other"}"#, 400),
        ("PUT", path.as_str(), "{}", 400),
        ("GET", "/wasm/nonsense", "", 404),
        ("DELETE", "/wasm/00000000-0000-0000-0000-000000000000", "", 404),
        ("POST", "/wasm", "{}", 400),
        ("POST", "/wasm", "not json", 400),
        ("POST", "/wasm", r#"{"name": "x", "module": "§"}"#, 400),
        ("POST", "/wasm", r#"{"name": "x", "path": "/etc/passwd"}"#, 403),
    ] {
        let answer = gateway.call(method, path, &[], body).await;
        assert_eq!(answer.status, status, "{method} {path} {body}: {}", answer.text());
        assert!(answer.json()["error"]["message"].is_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_come_as_multipart_as_bytes_and_by_path_of_an_allowed_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let inside = folder.path().join("allowed");
    std::fs::create_dir(&inside).expect("a folder");
    let module = guests::smg_rejects(418);
    std::fs::write(inside.join("gate.wasm"), &module).expect("it writes");
    std::fs::write(folder.path().join("outside.wasm"), &module).expect("it writes");
    std::os::unix::fs::symlink(folder.path().join("outside.wasm"), inside.join("link.wasm")).expect("a link");
    let worker = answering("{}").await;
    let allowed = inside.to_str().expect("UTF-8");
    let gateway = Gateway::start(&[("wasm_upload_dirs", allowed)], &[worker.url()]).await;
    for (file, success) in
        [("gate.wasm", true), ("link.wasm", false), ("../outside.wasm", false), ("no.wasm", false)]
    {
        let body = json!({"modules": [{"name": "smg", "file_path": format!("{allowed}/{file}"),
            "module_type": "Middleware", "attach_points": [{"Middleware": "OnRequest"}]}]});
        let answer = gateway.post("/wasm", &body.to_string()).await.json();
        let result = &answer["modules"][0]["add_result"];
        assert_eq!(result.get("Success").is_some(), success, "{file}: {answer}");
        assert_eq!(result.get("Error").is_some(), !success, "{file}: {answer}");
    }
    assert_eq!(gateway.post(PATH, CHAT).await.status, 418);
    let listed = gateway.get("/wasm").await.json();
    let meta = &listed["modules"][0]["module_meta"];
    assert_eq!(meta["file_path"], json!(format!("{allowed}/gate.wasm")), "{listed}");
    assert_eq!(meta["attach_points"], json!([{"Middleware": "OnRequest"}]), "{listed}");
    let mut body = b"--b\r\ncontent-disposition: form-data; name=\"order\"\r\n\r\n-7\r\n--b\r\ncontent-disposition: form-data; name=\"module\"; filename=\"tag.wasm\"\r\n\r\n".to_vec();
    body.extend_from_slice(&guests::rejects(404, "multi"));
    body.extend_from_slice(b"\r\n--b--\r\n");
    let head = format!(
        "POST /wasm HTTP/1.1\r\nhost: {}\r\ncontent-type: multipart/form-data; boundary=b\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        gateway.address,
        body.len()
    );
    let mut client = gateway.connect().await;
    client.write(&[head.as_bytes(), &body].concat()).await;
    let answer = client.answer().await;
    assert_eq!(
        (answer.status, answer.json()["settings"]["order"].as_i64()),
        (201, Some(-7)),
        "{}",
        answer.text()
    );
    assert_eq!(gateway.post(PATH, CHAT).await.text(), "multi", "a lower order is asked first");
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_need_the_key_like_other_admin_routes_and_survive_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let worker = answering("{}").await;
    let options = [("api_key", "k"), ("wasm_dir", folder.path().to_str().expect("UTF-8"))];
    let key = [("authorization", "Bearer k")];
    let gateway = Gateway::start(&options, &[worker.url()]).await;
    let body = json!({"name": "gate", "module": STANDARD.encode(guests::rejects(403, "no"))}).to_string();
    assert_eq!(gateway.post("/wasm", &body).await.status, 401);
    assert_eq!(gateway.call("POST", "/wasm", &key, &body).await.status, 201);
    let foreign = [("authorization", "Bearer k"), ("origin", "https://elsewhere.example")];
    assert_eq!(gateway.call("GET", "/wasm", &foreign, "").await.status, 403);
    gateway.stop().await;
    let gateway = Gateway::start(&options, &[worker.url()]).await;
    assert_eq!(gateway.call("POST", PATH, &key, CHAT).await.status, 403);
    gateway.stop().await;
    std::fs::write(folder.path().join("modules/broken.json"), "{").expect("it writes");
    let options = crate::kit::options(&options, &[worker.url()]);
    let error = branchline_gateway::lifecycle::Server::bind(options).await.err().expect("half its modules");
    assert!(error.to_string().contains("broken.json"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_module_sends_every_request_to_its_pick_and_a_retry_elsewhere() {
    let picked = answering("\"picked\"").await;
    let other = answering("\"other\"").await;
    let gateway = Gateway::start(&[], &[other.url(), picked.url()]).await;
    load(&gateway, json!({"name": "canary"}), &guests::picks(1)).await;
    for _ in 0..8 {
        assert_eq!(gateway.post(PATH, CHAT).await.text(), "\"picked\"");
    }
    // A pick is a wish for the first attempt: who pushes back does not fail the request.
    picked.on(PATH, vec![Step::Send(response(503, &[("retry-after", "1")], b"{}"))]);
    assert_eq!(gateway.post(PATH, CHAT).await.text(), "\"other\"");
}
