//! What ends a request early before engines: aborts, deadlines, leaving clients; and the bound on connections.

use std::time::Duration;

use crate::kit::{Client, Gateway};
use branchline_testkit::{EngineSetup, FakeEngine, within};
use branchline_worker::proto::{Finish, FinishReason, SequenceDelta};
use serde_json::{Value, json};

async fn engine() -> FakeEngine {
    FakeEngine::start(EngineSetup::default()).await.expect("a free port")
}

fn word(handle: u64, text: &str) -> SequenceDelta {
    SequenceDelta { handle, token_ids: vec![65], text: text.into(), ..Default::default() }
}

fn stop(handle: u64) -> SequenceDelta {
    let finish = Finish { reason: FinishReason::Stop.into(), completion_tokens: 2, ..Default::default() };
    SequenceDelta { handle, finish: Some(finish), ..Default::default() }
}

/// A streamed `/generate` of this id.
async fn generate(gateway: &Gateway, rid: &str) -> Client {
    gateway
        .send("POST", "/generate", &[], &json!({"text": "a", "rid": rid, "stream": true}).to_string())
        .await
}

/// The handle under which the engine has this id, once it has it.
async fn handle_of(engine: &FakeEngine, rid: &str) -> u64 {
    let place = |engine: &FakeEngine| {
        let submits = engine.submits();
        let found =
            submits.iter().find(|s| s.request.as_ref().is_some_and(|request| request.request_id == rid));
        found.map(|submit| submit.handle)
    };
    within("the request", engine.wait_until(|engine| place(engine).is_some())).await;
    place(engine).expect("it has come")
}

async fn last_event(client: &mut Client) -> (Value, bool) {
    let answer = client.answer().await;
    let events = answer.events();
    let ended = events.last().is_some_and(|event| event == "[DONE]");
    let json = events.iter().rev().find(|event| *event != "[DONE]").expect("an event");
    (serde_json::from_str(json).expect("json"), ended)
}

#[tokio::test]
async fn an_abort_ends_its_own_stream_and_no_other() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let mut clients = Vec::new();
    for rid in ["job-1", "job-12", "xjob-1"] {
        let mut client = generate(&gateway, rid).await;
        engine.emit(vec![word(handle_of(&engine, rid).await, "one")]);
        client.read_until("one").await;
        clients.push(client);
    }
    let answer = gateway.post("/abort_request", r#"{"rid": "job-1"}"#).await;
    assert_eq!((answer.status, &answer.json()["aborted"]), (200, &json!(1)));
    let (event, ended) = last_event(&mut clients[0]).await;
    assert_eq!((&event["meta_info"]["finish_reason"]["type"], ended), (&json!("abort"), true));
    assert_eq!(event["text"], "one");
    for (position, rid) in [(1, "job-12"), (2, "xjob-1")] {
        let handle = handle_of(&engine, rid).await;
        engine.emit(vec![word(handle, "two"), stop(handle)]);
        let (event, _) = last_event(&mut clients[position]).await;
        assert_eq!(
            (&event["text"], &event["meta_info"]["finish_reason"]["type"]),
            (&json!("onetwo"), &json!("stop"))
        );
    }
    assert_eq!(engine.aborts().len(), 1);
    assert!(engine.cancels().is_empty(), "an ended request is not cancelled on top");
    assert!(gateway.app.live.is_empty());
}

#[tokio::test]
async fn messages_and_responses_are_aborted_by_the_clients_own_id() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let messages = json!([{"role": "user", "content": "a"}]);
    for (path, body) in [
        ("/v1/messages", json!({"rid": "m", "max_tokens": 9, "messages": messages, "stream": true})),
        ("/v1/responses", json!({"rid": "r", "input": "a", "stream": true})),
    ] {
        let rid = body["rid"].as_str().expect("a string").to_owned();
        let mut client = gateway.send("POST", path, &[], &body.to_string()).await;
        engine.emit(vec![word(handle_of(&engine, &rid).await, "one")]);
        client.read_until("one").await;
        let told = gateway.post("/abort_request", &json!({"rid": rid}).to_string()).await.json();
        assert_eq!(told["aborted"], 1, "{path}");
        client.answer().await;
    }
    assert_eq!(gateway.load(), 0);
    // What is stored keeps an id of its own: another answer of that name can't take its place.
    let body = json!({"rid": "r", "input": "a", "background": true}).to_string();
    let id = gateway.post("/v1/responses", &body).await.json()["id"].clone();
    assert!(id.as_str().is_some_and(|id| id.starts_with("resp_")), "{id}");
}

#[tokio::test]
async fn abort_fan_out_at_gateway_reaches_the_engine_that_runs_it() {
    let engines = [engine().await, engine().await, engine().await];
    let urls = engines.each_ref().map(FakeEngine::url);
    let gateway = Gateway::start(&[("policy", "round_robin")], &urls).await;
    let mut client = generate(&gateway, "r7").await;
    let arrived =
        engines.iter().map(|engine| Box::pin(engine.wait_until(|engine| !engine.submits().is_empty())));
    let ((), owner, _) = within("the request", futures_util::future::select_all(arrived)).await;
    let called = std::time::Instant::now();
    assert_eq!(gateway.post("/abort_request", r#"{"rid": "r7"}"#).await.status, 200);
    let (event, _) = last_event(&mut client).await;
    assert_eq!(event["meta_info"]["finish_reason"]["type"], "abort");
    assert!(called.elapsed() < Duration::from_secs(1), "{:?}", called.elapsed());
    for (position, engine) in engines.iter().enumerate() {
        let ids: Vec<_> = engine.aborts().into_iter().map(|abort| abort.request_id).collect();
        assert_eq!(ids, vec!["r7"; usize::from(position == owner)]);
    }
    let unknown = gateway.post("/abort_request", r#"{"rid": "nobody"}"#).await;
    assert_eq!((unknown.status, &unknown.json()["aborted"]), (200, &json!(0)));
}

#[tokio::test]
async fn abort_all_ends_every_stream() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let mut clients = Vec::new();
    for rid in ["a", "b"] {
        clients.push(generate(&gateway, rid).await);
        handle_of(&engine, rid).await;
    }
    assert_eq!(gateway.post("/abort_request", r#"{"abort_all": true}"#).await.json()["aborted"], 2);
    for client in &mut clients {
        assert_eq!(last_event(client).await.0["meta_info"]["finish_reason"]["type"], "abort");
    }
}

#[tokio::test]
async fn abort_before_response_headers_reaches_the_engine() {
    for stream in [true, false] {
        let engine = engine().await;
        let gateway = Gateway::start(&[], &[engine.url()]).await;
        let body = json!({"messages": [{"role": "user", "content": "x"}], "stream": stream}).to_string();
        let client = gateway.send("POST", "/v1/chat/completions", &[], &body).await;
        within("the request", engine.wait_until(|engine| engine.submits().len() == 1)).await;
        drop(client);
        within("one cancel", engine.wait_until(|engine| engine.cancels().len() == 1)).await;
        assert_eq!(gateway.load(), 0);
        assert!(gateway.app.fleet.workers()[0].is_ready(), "leaving is not the engine's fault");
        assert!(!gateway.get("/metrics").await.text().contains("branchline_router_worker_failures_total{"));
    }
}

#[tokio::test]
async fn a_deadline_ends_a_request_before_and_in_its_answer() {
    let engine = engine().await;
    let gateway = Gateway::start(&[("request_timeout", "150ms")], &[engine.url()]).await;
    let answer = gateway.post("/generate", &json!({"text": "a"}).to_string()).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (504, &json!("deadline_exceeded")));
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 1)).await;
    let mut client = generate(&gateway, "begun").await;
    engine.emit(vec![word(handle_of(&engine, "begun").await, "one")]);
    let (event, ended) = last_event(&mut client).await;
    assert_eq!((&event["error"]["code"], ended), (&json!("deadline_exceeded"), false));
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 2)).await;
    assert_eq!(gateway.load(), 0);
}

#[tokio::test]
async fn an_engine_that_stays_silent_is_given_up_at_the_first_token_timeout() {
    let engine = engine().await;
    let gateway = Gateway::start(&[("first_token_timeout", "100ms")], &[engine.url()]).await;
    let answer = gateway.post("/generate", &json!({"text": "a"}).to_string()).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (504, &json!("deadline_exceeded")));
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 1)).await;
    // A stream that has begun is under another limit.
    let mut client = generate(&gateway, "begun").await;
    let handle = handle_of(&engine, "begun").await;
    engine.emit(vec![word(handle, "one")]);
    client.read_until("one").await;
    let waited = tokio::time::timeout(Duration::from_millis(200), client.read_until("error")).await;
    assert!(waited.is_err(), "nothing ends it");
    engine.emit(vec![stop(handle)]);
    assert!(last_event(&mut client).await.1);
}

#[tokio::test]
async fn a_stream_that_falls_silent_ends_in_one_error_event() {
    let engine = engine().await;
    let gateway = Gateway::start(&[("idle_timeout", "100ms")], &[engine.url()]).await;
    let mut client = generate(&gateway, "quiet").await;
    engine.emit(vec![word(handle_of(&engine, "quiet").await, "one")]);
    let (event, ended) = last_event(&mut client).await;
    assert_eq!((&event["error"]["code"], ended), (&json!("deadline_exceeded"), false));
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 1)).await;
}

#[tokio::test]
async fn a_connection_over_the_bound_waits_for_one_to_end() {
    let engine = engine().await;
    let gateway = Gateway::start(&[("max_connections", "1")], &[engine.url()]).await;
    let mut first = generate(&gateway, "first").await;
    let handle = handle_of(&engine, "first").await;
    let mut second = gateway.send("GET", "/liveness", &[], "").await;
    let early = tokio::time::timeout(Duration::from_millis(150), second.read_until("alive")).await;
    assert!(early.is_err(), "it is served beside the first");
    engine.emit(vec![word(handle, "one"), stop(handle)]);
    assert!(last_event(&mut first).await.1);
    drop(first);
    assert_eq!(second.answer().await.status, 200);
}

#[tokio::test]
async fn ids_that_repeat_in_a_batch_are_a_fault_of_the_request_and_live_ones_a_conflict() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let twice = json!({"text": ["a", "b"], "rid": ["same", "same"]}).to_string();
    let answer = gateway.post("/generate", &twice).await;
    let error = &answer.json()["error"];
    assert_eq!(
        (answer.status, &error["param"], &error["code"]),
        (400, &json!("rid"), &json!("invalid_argument"))
    );
    assert!(error["message"].as_str().is_some_and(|text| text.contains("same")), "{error}");
    let _held = generate(&gateway, "same").await;
    handle_of(&engine, "same").await;
    let body = json!({"text": ["a", "b"], "rid": ["other", "same"]}).to_string();
    assert_eq!(gateway.post("/generate", &body).await.status, 409);
    assert_eq!(gateway.app.live.len(), 1, "the refused batch left nothing behind");
}
