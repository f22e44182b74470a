//! Modules on streams: events of workers and of our own engines, in every family, whole, in order and in time.

use crate::guests;
use crate::kit::Gateway;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_testkit::response;
use branchline_testkit::{
    Act, EngineSetup, FakeEngine, ScriptedWorker, Step, chunk, event_stream, last_chunk,
};
use branchline_worker::proto::{self, FinishReason, SequenceDelta};
use serde_json::{Value, json};

const CHAT: &str = r#"{"model":"fake","messages":[{"role":"user","content":"x"}],"stream":true}"#;
const PATH: &str = "/v1/chat/completions";

async fn load(gateway: &Gateway, mut settings: Value, bytes: &[u8]) -> String {
    settings["module"] = json!(STANDARD.encode(bytes));
    let answer = gateway.post("/wasm", &settings.to_string()).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["uuid"].as_str().expect("a uuid").to_owned()
}

async fn saying(pieces: &'static [&'static str]) -> ScriptedWorker {
    ScriptedWorker::start(move |_| {
        let mut steps = vec![event_stream()];
        steps.extend(pieces.iter().map(|piece| chunk(piece.as_bytes())));
        steps.push(last_chunk());
        steps
    })
    .await
    .expect("a free port")
}

/// Says "Hel" and "lo".
fn speak(request: &proto::GenerateRequest) -> Vec<Act> {
    let prompt = proto::PromptReport { prompt_tokens: request.token_ids.len() as u32, cached_tokens: 0 };
    let mut acts = Vec::new();
    for (position, text) in ["Hel", "lo"].into_iter().enumerate() {
        acts.push(Act::send(SequenceDelta {
            token_ids: vec![65 + position as u32],
            text: text.into(),
            prompt: (position == 0).then_some(prompt),
            ..Default::default()
        }));
    }
    acts.push(Act::finish(0, FinishReason::Stop, 2));
    acts
}

async fn engine() -> FakeEngine {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    engine.script(speak);
    engine
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_module_changes_passes_byte_for_byte_however_it_is_cut() {
    const PIECES: &[&str] = &[
        ": keep-alive\n\nda",
        "ta: {\"a\":1}\r\n\r",
        "\ndata: {\"b\":\ndata: 2}\n",
        "\nid: 7\nevent: x\ndata: {}\n\n:bye\n\ndata: [DO",
        "NE]\n\n",
    ];
    let worker = saying(PIECES).await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "reader"}), &guests::reads_events()).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!((answer.text(), answer.complete), (PIECES.concat(), true));
    let metrics = gateway.get("/metrics").await.text();
    let calls = "module=\"reader\",hook=\"on-stream-event\",outcome=\"continue\"} 4";
    assert!(metrics.contains(calls), "comments are no events: {metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_modules_pass_each_other_what_they_made_of_an_event() {
    let worker = saying(&["data: {\"n\":0}\n\n", "data: [DONE]\n\n"]).await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    // Answers meet the higher order first: its events are what the lower one sees and replaces.
    load(&gateway, json!({"name": "outer", "order": 1}), &guests::writes_events("outer", 99, true)).await;
    load(&gateway, json!({"name": "inner", "order": 2}), &guests::writes_events("inner", 99, true)).await;
    assert_eq!(gateway.post(PATH, CHAT).await.events(), ["outer", "outer"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_that_traps_in_a_stream_fails_open_or_ends_it_in_the_familys_error() {
    const PIECES: &[&str] = &["data: {\"n\":0}\n\n", "data: {\"n\":1}\n\n", "data: [DONE]\n\n"];
    let worker = saying(PIECES).await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let open = json!({"name": "open", "fail": "open", "quarantine_after": 0});
    let uuid = load(&gateway, open, &guests::traps_on_events()).await;
    assert_eq!(gateway.post(PATH, CHAT).await.text(), PIECES.concat());
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    load(&gateway, json!({"name": "closed"}), &guests::traps_on_events()).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!((answer.status, answer.events().len(), answer.complete), (200, 1, true));
    assert!(!answer.text().contains("\"n\"") && !answer.text().contains("[DONE]"), "{}", answer.text());
    let messages = gateway.post("/v1/messages", CHAT).await;
    assert!(messages.text().starts_with("event: error\n"), "{}", messages.text());
    let error: Value = serde_json::from_str(&messages.events()[0]).expect("JSON");
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("overloaded_error")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_stream_lets_the_worker_go() {
    let worker = ScriptedWorker::start(|_| {
        vec![
            event_stream(),
            chunk(b"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n"),
            Step::Hold,
        ]
    })
    .await
    .expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "stop"}), &guests::writes_events("{}", 0, false)).await;
    let events = gateway.post(PATH, CHAT).await.events();
    assert_eq!(events.len(), 2, "{events:?}");
    assert!(events[0].contains("content_filter") && events[1] == "[DONE]", "{events:?}");
    assert!(worker.wait_for(|record| record.left == 1).await.is_some(), "the worker is told to stop");
    assert_eq!(gateway.load(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_are_asked_for_plain_streams_and_compressed_ones_do_not_slip_by() {
    let kind = [("content-type", "text/event-stream"), ("content-encoding", "gzip")];
    let worker = ScriptedWorker::start(move |_| vec![Step::Send(response(200, &kind, b"\x1f\x8bbytes"))])
        .await
        .expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let uuid = load(&gateway, json!({"name": "closed"}), &guests::reads_events()).await;
    let asked = [("accept-encoding", "gzip, br")];
    let answer = gateway.call("POST", PATH, &asked, CHAT).await;
    assert_eq!(answer.status, 502, "{}", answer.text());
    assert!(!answer.body.starts_with(b"\x1f\x8b"));
    assert_eq!(worker.record().requests(PATH)[0].header("accept-encoding"), Some("identity"));
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    load(&gateway, json!({"name": "open", "fail": "open"}), &guests::reads_events()).await;
    let answer = gateway.call("POST", PATH, &asked, CHAT).await;
    assert_eq!((answer.status, answer.body.as_slice()), (200, &b"\x1f\x8bbytes"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_our_own_engines_pass_modules_too() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let uuid = load(&gateway, json!({"name": "reader"}), &guests::reads_events()).await;
    let plain = gateway.post(PATH, CHAT).await.events();
    let said: String = plain
        .iter()
        .filter_map(|event| serde_json::from_str::<Value>(event).ok())
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(said, "Hello", "{plain:?}");
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    load(&gateway, json!({"name": "stop"}), &guests::writes_events("{\"n\":1}", 1, true)).await;
    assert_eq!(gateway.post(PATH, CHAT).await.events(), ["{\"n\":1}", "{\"n\":1}", "[DONE]"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_our_own_engines_are_read_changed_and_withheld() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let whole = r#"{"model":"fake","messages":[{"role":"user","content":"x"}]}"#;
    let uuid = load(&gateway, json!({"name": "mark"}), &guests::marks_responses(203, "x-seen", "1")).await;
    let answer = gateway.post(PATH, whole).await;
    assert_eq!((answer.status, answer.header("x-seen")), (203, Some("1")));
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "Hello");
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    load(&gateway, json!({"name": "writer"}), &guests::writes_responses("{\"own\":1}")).await;
    assert_eq!(gateway.post(PATH, whole).await.text(), "{\"own\":1}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_module_chooses_among_engines_for_chats_completions_and_batches() {
    let (first, second) = (engine().await, engine().await);
    let gateway = Gateway::start(&[], &[first.url(), second.url()]).await;
    load(&gateway, json!({"name": "canary"}), &guests::picks(1)).await;
    for _ in 0..4 {
        assert_eq!(gateway.post(PATH, CHAT).await.status, 200);
    }
    let batch = r#"{"model":"fake","prompt":["a","b","c"]}"#;
    assert_eq!(gateway.post("/v1/completions", batch).await.status, 200);
    assert_eq!(gateway.post("/generate", r#"{"text":["a","b"]}"#).await.status, 200);
    assert_eq!((first.submits().len(), second.submits().len()), (0, 9));
    let metrics = gateway.get("/metrics").await.text();
    assert!(metrics.contains("module=\"canary\",hook=\"on-route\",outcome=\"route\"} 9"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_module_that_answers_nonsense_refuses_the_request_unless_it_fails_open() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    // The second of one candidate is nobody.
    let uuid = load(&gateway, json!({"name": "closed"}), &guests::picks(1)).await;
    let answer = gateway.post(PATH, CHAT).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert!(engine.submits().is_empty());
    gateway.call("DELETE", &format!("/wasm/{uuid}"), &[], "").await;
    load(&gateway, json!({"name": "open", "fail": "open"}), &guests::picks(1)).await;
    assert_eq!(gateway.post(PATH, CHAT).await.status, 200);
    assert_eq!(engine.submits().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_of_sglangs_gateway_is_not_shown_a_stream() {
    let worker = saying(&["data: {\"n\":0}\n\n", "data: [DONE]\n\n"]).await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    load(&gateway, json!({"name": "smg"}), &guests::smg_adds_header("x-smg", "1")).await;
    assert_eq!(gateway.post(PATH, CHAT).await.events(), ["{\"n\":0}", "[DONE]"]);
    assert_eq!(worker.record().requests(PATH)[0].header("x-smg"), Some("1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn many_streams_at_once_each_have_their_own_instance() {
    let worker = saying(&["data: a\n\n", "data: b\n\n", "data: c\n\n", "data: [DONE]\n\n"]).await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    // The guest counts by the index it is shown: the third event of each stream ends it.
    load(&gateway, json!({"name": "third"}), &guests::writes_events("x", 2, true)).await;
    let answers = futures_util::future::join_all((0..40).map(|_| gateway.post(PATH, CHAT))).await;
    for answer in answers {
        assert_eq!(answer.events(), ["x", "x", "x", "[DONE]"]);
    }
}
