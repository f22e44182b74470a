//! `/wasm` from an operator's side: every shape of an upload, dry runs of every hook, faults in words.

use crate::guests;
use crate::kit::{Answer, Gateway};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_testkit::{ScriptedWorker, Step, response};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::{Value, json};

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#;
const PATH: &str = "/v1/chat/completions";

async fn gateway() -> (ScriptedWorker, Gateway) {
    let kind = [("content-type", "application/json")];
    let worker = ScriptedWorker::start(move |_| vec![Step::Send(response(200, &kind, b"{}"))])
        .await
        .expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    (worker, gateway)
}

/// Sends bytes that need not be text.
async fn send(gateway: &Gateway, method: &str, path: &str, kind: &str, body: &[u8]) -> Answer {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        gateway.address,
        body.len()
    );
    let mut client = gateway.connect().await;
    client.write(&[head.as_bytes(), body].concat()).await;
    client.answer().await
}

async fn load(gateway: &Gateway, name: &str, bytes: &[u8]) -> String {
    let body = json!({"name": name, "module": STANDARD.encode(bytes)}).to_string();
    let answer = gateway.post("/wasm", &body).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    format!("/wasm/{}", answer.json()["uuid"].as_str().expect("a uuid"))
}

fn parts(fields: &[(&str, &str)], module: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        let part = format!("--b\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n");
        body.extend_from_slice(part.as_bytes());
    }
    let head = "--b\r\ncontent-disposition: form-data; name=\"module\"; filename=\"file.wasm\"\r\n\r\n";
    body.extend_from_slice(head.as_bytes());
    body.extend_from_slice(module);
    body.extend_from_slice(b"\r\n--b--\r\n");
    body
}

fn message(answer: &Answer) -> String {
    answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn bare_bytes_are_loaded_with_their_settings_in_the_query() {
    let (_worker, gateway) = gateway().await;
    let path = "/wasm?name=gate&order=-4&fail=open&hooks=on-request&config=%7B%22a%22:1%7D";
    let answer = send(&gateway, "POST", path, "application/wasm", &guests::rejects(403, "no")).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    let settings = &answer.json()["settings"];
    assert_eq!(
        (&settings["name"], &settings["order"], &settings["fail"]),
        (&json!("gate"), &json!(-4), &json!("open"))
    );
    assert_eq!((&settings["config"], &settings["hooks"]), (&json!({"a": 1}), &json!(["on-request"])));
    assert_eq!(gateway.post(PATH, CHAT).await.status, 403);
    let nameless = send(&gateway, "POST", "/wasm", "application/wasm", &guests::noop()).await;
    assert_eq!(nameless.status, 400);
    assert!(message(&nameless).contains("`name`"), "{}", nameless.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_port_of_their_own_operators_load_modules_there_and_clients_meet_them_here() {
    let worker = ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await;
    let worker = worker.expect("a free port");
    let options = [("admin_port", "0"), ("api_key", "boss"), ("user_api_key", "user")];
    let gateway = Gateway::start(&options, &[worker.url()]).await;
    let (boss, user) = ([("x-api-key", "boss")], [("x-api-key", "user")]);
    let body = json!({"name": "gate", "module": STANDARD.encode(guests::rejects(418, "no"))}).to_string();
    for key in [&boss, &user] {
        assert_eq!(gateway.call("POST", "/wasm", key, &body).await.status, 404, "not on the public port");
        assert_eq!(gateway.call("GET", "/wasm", key, "").await.status, 404);
    }
    assert_eq!(gateway.operate("POST", "/wasm", &user, &body).await.status, 403, "no operator's key");
    let loaded = gateway.operate("POST", "/wasm", &boss, &body).await;
    assert_eq!(loaded.status, 201, "{}", loaded.text());
    assert_eq!(gateway.call("POST", PATH, &user, CHAT).await.status, 418);
    let path = format!("/wasm/{}", loaded.json()["uuid"].as_str().expect("a uuid"));
    for (method, path, body) in [
        ("GET", path.clone(), ""),
        ("GET", format!("{path}/logs"), ""),
        ("POST", format!("{path}/dry-run"), "{}"),
        ("PATCH", path.clone(), r#"{"order": 1}"#),
        ("DELETE", path.clone(), ""),
    ] {
        assert_eq!(gateway.call(method, &path, &boss, body).await.status, 404, "{method} {path}");
        assert_eq!(gateway.operate(method, &path, &boss, body).await.status, 200, "{method} {path}");
    }
    assert_eq!(gateway.call("POST", PATH, &user, CHAT).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_form_takes_settings_as_one_object_or_field_by_field() {
    let (_worker, gateway) = gateway().await;
    let fields = [("settings", r#"{"order": 2, "limits": {"time_ms": 50}}"#), ("attach_points", "OnRequest")];
    let kind = "multipart/form-data; boundary=b";
    let answer = send(&gateway, "POST", "/wasm", kind, &parts(&fields, &guests::noop())).await;
    let settings = answer.json()["settings"].clone();
    assert_eq!((answer.status, &settings["name"]), (201, &json!("file")), "{}", answer.text());
    assert_eq!((&settings["order"], &settings["limits"]["time_ms"]), (&json!(2), &json!(50)));
    let path = format!("/wasm/{}", answer.json()["uuid"].as_str().expect("a uuid"));
    let swapped =
        send(&gateway, "PUT", &path, kind, &parts(&[("order", "7")], &guests::rejects(403, ""))).await;
    assert_eq!(
        (swapped.status, &swapped.json()["settings"]["order"]),
        (200, &json!(7)),
        "{}",
        swapped.text()
    );
    assert_eq!(swapped.json()["settings"]["limits"]["time_ms"], 50, "what is not named stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_forms_and_settings_are_refused_in_words() {
    let (_worker, gateway) = gateway().await;
    let form = "multipart/form-data; boundary=b";
    for (kind, body, words) in [
        ("multipart/form-data", b"x".to_vec(), "multipart"),
        (form, b"no boundary here".to_vec(), "multipart"),
        (form, parts(&[("order", "first")], &guests::noop()), "`order`"),
        (form, parts(&[("settings", "[]")], &guests::noop()), "`settings`"),
        (form, parts(&[("hooks", "on-sunday")], &guests::noop()), "on-sunday"),
        (form, parts(&[("limits", r#"{"memory_mib": 0}"#)], &guests::noop()), "limits.memory_mib"),
        (form, parts(&[("colour", "1")], &guests::noop()), "colour"),
        ("application/json", br#"{"name": "x", "module": 5}"#.to_vec(), "`module`"),
        ("application/json", br#"{"modules": [5]}"#.to_vec(), "object"),
        ("text/plain", b"hello".to_vec(), "multipart/form-data"),
    ] {
        let answer = send(&gateway, "POST", "/wasm", kind, &body).await;
        let text = answer.text();
        assert_eq!(answer.status, 400, "{kind}: {text}");
        assert!(text.contains(words), "{words} is not in {text}");
    }
    assert_eq!(gateway.get("/wasm").await.json()["modules"], json!([]));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_hook_can_be_tried_on_a_sample() {
    let (worker, gateway) = gateway().await;
    let response = load(&gateway, "response", &guests::marks_responses(203, "x-seen", "1")).await;
    let sample = json!({"response": {"status": 200, "body": "text"}});
    let tried = gateway.post(&format!("{response}/dry-run"), &sample.to_string()).await.json();
    assert_eq!(
        (&tried["hook"], &tried["outcome"]["action"]["modify"]["status"]),
        (&json!("on-response"), &json!(203))
    );
    let failure =
        load(&gateway, "failure", &guests::rejects_responses("on-error", 502, "sorry", false)).await;
    let sample = json!({"failure": {"status": 500, "code": "internal"}});
    let tried = gateway.post(&format!("{failure}/dry-run"), &sample.to_string()).await.json();
    assert_eq!(tried["outcome"]["action"]["reject"]["body"], "sorry", "{tried}");
    let stream = load(&gateway, "stream", &guests::writes_events("x", 1, true)).await;
    let sample = json!({"events": [{"data": "a"}, {"data": "b", "name": "delta"}]});
    let tried = gateway.post(&format!("{stream}/dry-run"), &sample.to_string()).await.json();
    let events = &tried["outcome"]["events"];
    assert_eq!(events[0]["action"]["replace"][0]["data"], "x", "{tried}");
    assert_eq!(events[1]["action"]["stop"][0]["data"], "x", "one instance sees both: {tried}");
    let route = load(&gateway, "route", &guests::picks(0)).await;
    let sample = json!({"hook": "OnRoute", "route": {"candidates": [{"id": "w9", "url": "http://w9"}]}});
    let tried = gateway.post(&format!("{route}/dry-run"), &sample.to_string()).await.json();
    assert_eq!(tried["outcome"]["action"]["pick"], "w9", "{tried}");
    let listed = gateway.get("/wasm").await.json();
    assert_eq!(listed["metrics"]["total_executions"], 0);
    assert!(worker.record().requests(PATH).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sample_that_is_none_of_the_module_is_refused_and_a_trap_is_shown() {
    let (_worker, gateway) = gateway().await;
    let trap = load(&gateway, "trap", &guests::traps()).await;
    let path = format!("{trap}/dry-run");
    for (sample, words) in [
        ("[]", "no JSON object"),
        (r#"{"hook": "on-route"}"#, "on-request"),
        (r#"{"hook": 5}"#, "`hook`"),
        (r#"{"request": {"speed": 1}}"#, "`request`"),
        (r#"{"request": {"headers": {"a": "b"}}}"#, "`request`"),
        (r#"{"weather": "fine"}"#, "`weather`"),
    ] {
        let answer = gateway.post(&path, sample).await;
        assert_eq!(answer.status, 400, "{sample}: {}", answer.text());
        assert!(message(&answer).contains(words), "{words} is not in {}", answer.text());
    }
    for _ in 0..30 {
        let tried = gateway.post(&path, "{}").await.json();
        assert_eq!(tried["outcome"]["failure"]["cause"], "trap", "{tried}");
        assert!(tried["log"][0]["message"].as_str().is_some_and(|line| line.contains("failed (trap)")));
    }
    let shown = gateway.get(&trap).await.json();
    assert_eq!((&shown["quarantined"], &shown["failures"]), (&json!(false), &json!(0)), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_read_from_where_the_last_look_ended() {
    let (_worker, gateway) = gateway().await;
    let module = load(&gateway, "chatter", &guests::chatters(3)).await;
    gateway.post(PATH, CHAT).await;
    let lines = |answer: &Value| answer["lines"].as_array().map_or(0, Vec::len);
    let first = gateway.get(&format!("{module}/logs")).await.json();
    assert_eq!((lines(&first), &first["lines"][0]["message"]), (3, &json!("hi")), "{first}");
    gateway.post(PATH, CHAT).await;
    let rest = gateway.get(&format!("{module}/logs?after=3")).await.json();
    assert_eq!((lines(&rest), &rest["lines"][0]["number"]), (3, &json!(4)), "{rest}");
    assert_eq!(lines(&gateway.get(&format!("{module}/logs?after=99")).await.json()), 0);
    assert_eq!(gateway.get(&format!("{module}/logs?after=x")).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn uploads_of_one_name_at_once_leave_one_module() {
    let (_worker, gateway) = gateway().await;
    let modules: Vec<_> = (0..8).map(|number| guests::rejects(403, &format!("number {number}"))).collect();
    let uploads = modules.iter().map(|bytes| {
        let body = json!({"name": "one", "module": STANDARD.encode(bytes)}).to_string();
        let gateway = &gateway;
        async move { gateway.post("/wasm", &body).await.status }
    });
    let mut statuses = futures_util::future::join_all(uploads).await;
    statuses.sort_unstable();
    assert_eq!(statuses, [201, 409, 409, 409, 409, 409, 409, 409]);
    assert_eq!(gateway.get("/wasm").await.json()["modules"].as_array().map(Vec::len), Some(1));
    assert_eq!(gateway.post(PATH, CHAT).await.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn methods_that_a_path_has_not_are_told_from_unknown_paths() {
    let (_worker, gateway) = gateway().await;
    let module = load(&gateway, "m", &guests::noop()).await;
    for (method, path, status) in [
        ("PUT", "/wasm".to_owned(), 405),
        ("POST", module.clone(), 405),
        ("GET", format!("{module}/dry-run"), 405),
        ("POST", format!("{module}/logs"), 405),
        ("GET", format!("{module}/nothing"), 404),
    ] {
        let answer = gateway.call(method, &path, &[], "{}").await;
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
        assert!(!message(&answer).is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn signatures_are_taken_in_every_shape_of_an_upload() {
    let pair = Ed25519KeyPair::from_seed_unchecked(&[9; 32]).expect("a seed");
    let key = STANDARD.encode(pair.public_key());
    let worker = ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await;
    let worker = worker.expect("a free port");
    let gateway = Gateway::start(&[("wasm_trusted_keys", key.as_str())], &[worker.url()]).await;
    let module = guests::rejects(403, "no");
    let signature = STANDARD.encode(pair.sign(&module));
    let json = |name: &str, signature: Value| {
        json!({"name": name, "module": STANDARD.encode(&module), "signature": signature}).to_string()
    };
    let unsigned = gateway.post("/wasm", &json("a", Value::Null)).await;
    assert_eq!(unsigned.status, 400, "null is no signature: {}", unsigned.text());
    let other = gateway.post("/wasm", &json("a", json!(STANDARD.encode(pair.sign(b"other"))))).await;
    assert_eq!((other.status, other.json()["error"]["param"].as_str()), (403, Some("signature")));
    let loaded = gateway.post("/wasm", &json("a", json!(signature))).await;
    assert_eq!((loaded.status, &loaded.json()["signature"]), (201, &json!(signature)), "{}", loaded.text());
    let form = parts(&[("name", "b"), ("signature", &signature)], &module);
    let kind = "multipart/form-data; boundary=b";
    assert_eq!(send(&gateway, "POST", "/wasm", kind, &form).await.status, 201);
    let spelled = signature.replace('+', "%2B").replace('/', "%2F").replace('=', "%3D");
    let path = format!("/wasm?name=c&signature={spelled}");
    let bare = send(&gateway, "POST", &path, "application/wasm", &module).await;
    assert_eq!(bare.status, 201, "{}", bare.text());
    assert_eq!(send(&gateway, "POST", "/wasm?name=d", "application/wasm", &module).await.status, 403);
    let path = format!("/wasm/{}", loaded.json()["uuid"].as_str().expect("a uuid"));
    assert_eq!(gateway.call("PUT", &path, &[], &json("a", json!("AAAA"))).await.status, 403);
    let patch = json!({"signature": signature}).to_string();
    assert_eq!(gateway.call("PATCH", &path, &[], &patch).await.status, 400);
    assert_eq!(gateway.post(PATH, CHAT).await.status, 403, "the module still answers");
}
