//! Tool calls, reasoning, Anthropic's Messages and OpenAI's Responses over real HTTP, before a scripted engine.

use crate::kit::{Answer, Gateway};
use branchline_testkit::{Act, EngineSetup, FakeEngine, within};
use branchline_worker::proto::{self, FinishReason};
use serde_json::{Value, json};

const CASES: &str = include_str!("../../tests/cases/tools.jsonl");

fn case(id: &str) -> Value {
    let find = |line: &str| serde_json::from_str::<Value>(line).ok().filter(|case| case["id"] == id);
    CASES.lines().find_map(find).unwrap_or_else(|| panic!("no case {id}"))
}

/// An engine that says `text` in pieces of `size` characters, and a gateway before it.
async fn saying(
    text: &str,
    size: usize,
    finish: FinishReason,
    given: &[(&str, &str)],
) -> (FakeEngine, Gateway) {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    say(&engine, text, size, finish);
    let gateway = Gateway::start(given, &[engine.url()]).await;
    (engine, gateway)
}

/// Has an engine say `text` in pieces of `size` characters.
pub(crate) fn say(engine: &FakeEngine, text: &str, size: usize, finish: FinishReason) {
    let characters: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = characters.chunks(size).map(|piece| piece.iter().collect()).collect();
    engine.script(move |request| {
        let prompt =
            proto::PromptReport { prompt_tokens: request.token_ids.len() as u32, ..Default::default() };
        let mut acts = Vec::new();
        for (position, piece) in pieces.iter().enumerate() {
            acts.push(Act::send(proto::SequenceDelta {
                token_ids: vec![65],
                text: piece.clone(),
                prompt: (position == 0).then_some(prompt),
                ..Default::default()
            }));
        }
        acts.push(Act::finish(0, finish, pieces.len() as u32));
        acts
    });
}

fn tools(names: &[&str]) -> Value {
    names.iter().map(|name| json!({"type": "function", "function": {"name": name}})).collect()
}

fn chat(more: Value) -> String {
    let mut body = json!({"model": "fake", "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body.to_string()
}

/// What a chat answer says, whole or streamed.
#[derive(Debug, PartialEq)]
pub(crate) struct Read {
    pub(crate) content: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<(String, String)>,
    pub(crate) finish: Value,
}

fn read_whole(answer: &Answer) -> Read {
    assert_eq!(answer.status, 200, "{}", answer.text());
    let choice = &answer.json()["choices"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let calls = choice["message"]["tool_calls"].as_array().into_iter().flatten();
    Read {
        content: text(&choice["message"]["content"]),
        reasoning: text(&choice["message"]["reasoning_content"]),
        calls: calls
            .map(|call| {
                assert!(
                    call["id"].as_str().is_some_and(|id| id.starts_with("call_"))
                        && call["type"] == "function"
                );
                (text(&call["function"]["name"]), text(&call["function"]["arguments"]))
            })
            .collect(),
        finish: choice["finish_reason"].clone(),
    }
}

fn read_stream(answer: &Answer) -> Read {
    let mut events = answer.events();
    assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", answer.text());
    let mut read =
        Read { content: String::new(), reasoning: String::new(), calls: Vec::new(), finish: Value::Null };
    for event in events {
        let event: Value = serde_json::from_str(&event).expect("json");
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        read.content.push_str(delta["content"].as_str().unwrap_or_default());
        read.reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            if let Some(name) = call["function"]["name"].as_str() {
                assert_eq!(call["index"], read.calls.len(), "{event}");
                assert!(call["id"].is_string() && call["type"] == "function", "{event}");
                read.calls.push((name.to_owned(), String::new()));
            }
            let index = call["index"].as_u64().expect("an index") as usize;
            read.calls[index].1.push_str(call["function"]["arguments"].as_str().expect("arguments"));
        }
        if !choice["finish_reason"].is_null() {
            read.finish = choice["finish_reason"].clone();
        }
    }
    read
}

/// The answer in both modes, which must say the same.
pub(crate) async fn both(gateway: &Gateway, more: Value) -> Read {
    let whole = read_whole(&gateway.post("/v1/chat/completions", &chat(more.clone())).await);
    let mut streamed = more;
    streamed["stream"] = true.into();
    let stream = read_stream(&gateway.post("/v1/chat/completions", &chat(streamed)).await);
    assert_eq!(stream, whole);
    whole
}

const HERMES: &[(&str, &str)] = &[("tool_call_parser", "hermes")];

#[tokio::test]
async fn tools_two_calls_in_one_piece_are_two_calls_on_the_wire() {
    let case = case("tools-two-calls-in-one-piece");
    let text = case["given"]["text"].as_str().unwrap();
    for size in [1, 7, 10_000] {
        let (_engine, gateway) = saying(text, size, FinishReason::Stop, HERMES).await;
        let read = both(&gateway, json!({"tools": tools(&["get_weather", "get_time"])})).await;
        assert_eq!((read.content.as_str(), &read.finish), ("", &json!("tool_calls")));
        assert_eq!(read.calls[0], ("get_weather".into(), "{\"city\": \"Oslo\"}".into()));
        assert_eq!(read.calls[1], ("get_time".into(), "{\"tz\": \"UTC\"}".into()));
    }
}

#[tokio::test]
async fn tools_json_answer_is_content_on_the_wire() {
    let case = case("tools-json-answer-is-content");
    for text in case["given"]["texts"].as_array().unwrap() {
        let text = text.as_str().unwrap();
        let (_engine, gateway) =
            saying(text, 1, FinishReason::Stop, &[("tool_call_parser", "llama3_json")]).await;
        let read = both(&gateway, json!({"tools": tools(&["get_weather"])})).await;
        assert_eq!((read.content.as_str(), read.calls.len(), &read.finish), (text, 0, &json!("stop")));
    }
}

#[tokio::test]
async fn tools_truncated_call_is_length() {
    let case = case("tools-truncated-call-is-length");
    let text = case["given"]["engine_text"].as_str().unwrap();
    let (_engine, gateway) = saying(text, 5, FinishReason::Length, HERMES).await;
    let read = both(&gateway, json!({"tools": tools(&["save"])})).await;
    assert_eq!(read.finish, case["right"]["finish_reason"][0]);
    assert_eq!(read.calls, [("save".to_owned(), "{\"note\": \"abc".to_owned())]);
}

#[tokio::test]
async fn tools_choice_none_is_text() {
    let case = case("tools-choice-none-is-text");
    let text = case["given"]["engine_text"].as_str().unwrap();
    let (_engine, gateway) = saying(text, 3, FinishReason::Stop, HERMES).await;
    let read =
        both(&gateway, json!({"tools": tools(&["get_weather", "get_time"]), "tool_choice": "none"})).await;
    assert_eq!((read.content.as_str(), read.calls.len(), &read.finish), (text, 0, &json!("stop")));
}

#[tokio::test]
async fn tools_required_streams_calls() {
    let case = case("tools-required-streams-calls");
    let given = &case["given"];
    for (choice, text) in given["tool_choice_each"]
        .as_array()
        .unwrap()
        .iter()
        .zip(given["engine_text_each"].as_array().unwrap())
    {
        let (engine, gateway) = saying(text.as_str().unwrap(), 1, FinishReason::Stop, &[]).await;
        let read = both(&gateway, json!({"tools": tools(&["add"]), "tool_choice": choice})).await;
        assert_eq!((read.content.as_str(), &read.finish), ("", &json!("tool_calls")), "{choice}");
        assert_eq!(read.calls, [("add".to_owned(), "{\"a\": 1}".to_owned())]);
        let grammar = engine.submits()[0].request.clone().unwrap().grammar.unwrap();
        assert!(matches!(grammar.form, Some(proto::grammar::Form::JsonSchema(_))), "{grammar:?}");
    }
}

#[tokio::test]
async fn one_call_at_most_is_told_where_one_was_asked_for() {
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let (_engine, gateway) = saying(&format!("{call}\n{call}"), 4, FinishReason::Stop, HERMES).await;
    let read = both(&gateway, json!({"tools": tools(&["f"]), "parallel_tool_calls": false})).await;
    assert_eq!((read.calls.len(), read.finish), (1, json!("tool_calls")));
}

#[tokio::test]
async fn reasoning_has_a_field_of_its_own_unless_it_is_to_stay_in_the_text() {
    let text = "<think>\nplan it\n</think>\n\n4";
    let (_engine, gateway) = saying(text, 2, FinishReason::Stop, &[("reasoning_parser", "qwen3")]).await;
    let read = both(&gateway, json!({})).await;
    assert_eq!((read.reasoning.as_str(), read.content.as_str()), ("plan it", "4"));
    let raw = both(&gateway, json!({"separate_reasoning": false})).await;
    assert_eq!((raw.reasoning.as_str(), raw.content.as_str()), ("", text));
}

#[tokio::test]
async fn the_template_decides_which_parsers_a_model_gets() {
    let setup = EngineSetup::default();
    let template =
        "{# <tool_call> <think> #}{{ tools }}{{ messages[0].content }}<|im_start|>assistant\n<think>\n";
    let manifest =
        proto::TokenizerManifest { chat_template: Some(template.into()), ..setup.manifest.clone() };
    let engine = FakeEngine::start(EngineSetup { manifest, ..setup }).await.expect("a free port");
    engine.script(|_| {
        vec![
            Act::tokens(&[65], "why</think>\n\n<tool_call>{\"name\": \"f\"}</tool_call>"),
            Act::finish(0, FinishReason::Stop, 1),
        ]
    });
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let read = both(&gateway, json!({"tools": tools(&["f"])})).await;
    assert_eq!((read.reasoning.as_str(), read.content.as_str()), ("why", ""));
    assert_eq!(read.calls, [("f".to_owned(), "{}".to_owned())]);
}

#[tokio::test]
async fn constraints_reach_the_engine_from_every_family() {
    let (engine, gateway) = saying("{}", 1, FinishReason::Stop, &[]).await;
    let schema = json!({"type": "object"});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let flat = json!({"type": "json_schema", "name": "x", "schema": schema});
    for (path, body) in [
        ("/v1/chat/completions", chat(json!({"response_format": format}))),
        ("/v1/completions", json!({"prompt": "a", "guided_json": schema}).to_string()),
        ("/generate", json!({"text": "a", "sampling_params": {"json_schema": schema}}).to_string()),
        ("/v1/responses", json!({"input": "a", "text": {"format": flat}}).to_string()),
    ] {
        let answer = gateway.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path} {}", answer.text());
        let last = engine.submits().pop().unwrap().request.unwrap();
        let wanted = proto::grammar::Form::JsonSchema(schema.to_string());
        assert_eq!(last.grammar.unwrap().form, Some(wanted), "{path}");
    }
}

/// Names and data of events.
fn named(answer: &Answer) -> Vec<(String, Value)> {
    let parse = |event: &str| {
        let name = event.lines().find_map(|line| line.strip_prefix("event: "))?;
        let data = event.lines().find_map(|line| line.strip_prefix("data: "))?;
        Some((name.to_owned(), serde_json::from_str::<Value>(data).expect("json")))
    };
    let events: Vec<_> = answer.text().split("\n\n").filter_map(parse).collect();
    assert!(events.iter().all(|(name, data)| data["type"] == name.as_str()), "{events:?}");
    events
}

fn names_of(events: &[(String, Value)]) -> Vec<&str> {
    events.iter().map(|(name, _)| name.as_str()).collect()
}

const MESSAGE: &str =
    r#"{"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}"#;

fn message(more: Value) -> String {
    let mut body: Value = serde_json::from_str(MESSAGE).expect("json");
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body.to_string()
}

#[tokio::test]
async fn a_message_of_anthropics_api_is_answered_whole_and_as_events() {
    let text = "<think>why</think>I look.<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>";
    let given = [HERMES[0], ("reasoning_parser", "qwen3")];
    let (_engine, gateway) = saying(text, 4, FinishReason::Stop, &given).await;
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let whole = gateway.post("/v1/messages", &message(json!({"tools": tools}))).await;
    assert_eq!(whole.status, 200, "{}", whole.text());
    let whole = whole.json();
    let kinds: Vec<_> =
        whole["content"].as_array().unwrap().iter().map(|block| block["type"].clone()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    assert_eq!(
        (&whole["content"][2]["input"], &whole["stop_reason"]),
        (&json!({"x": 1}), &json!("tool_use"))
    );
    assert!(whole["usage"]["input_tokens"].as_u64().is_some_and(|tokens| tokens > 0));
    let stream = gateway.post("/v1/messages", &message(json!({"tools": tools, "stream": true}))).await;
    let events = named(&stream);
    let names = names_of(&events);
    assert_eq!((names[0], names[1]), ("message_start", "content_block_start"));
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    let starts: Vec<_> = events.iter().filter(|(name, _)| name == "content_block_start").collect();
    let stops = names.iter().filter(|name| **name == "content_block_stop").count();
    assert_eq!((starts.len(), stops), (3, 3));
    assert_eq!(starts[2].1["content_block"]["name"], "f");
    let json: String = events.iter().filter_map(|(_, data)| data["delta"]["partial_json"].as_str()).collect();
    assert_eq!(json, "{\"x\": 1}");
    assert_eq!(events[names.len() - 2].1["delta"]["stop_reason"], "tool_use");
}

#[tokio::test]
async fn errors_on_anthropics_paths_have_its_shape_wherever_they_arise() {
    let (_engine, gateway) = saying("x", 1, FinishReason::Stop, &[("api_key", "k")]).await;
    let locked = gateway.post("/v1/messages", MESSAGE).await;
    assert_eq!((locked.status, &locked.json()["error"]["type"]), (401, &json!("authentication_error")));
    let key = [("x-api-key", "k")];
    for (body, kind) in [
        (message(json!({"max_tokens": null})), "invalid_request_error"),
        (message(json!({"model": "other"})), "not_found_error"),
        ("{".to_owned(), "invalid_request_error"),
    ] {
        let answer = gateway.call("POST", "/v1/messages", &key, &body).await;
        let length = answer.header("content-length").map(str::to_owned);
        assert!(
            answer.complete && length.is_none_or(|length| length == answer.body.len().to_string()),
            "{body}"
        );
        assert_eq!(
            (&answer.json()["type"], &answer.json()["error"]["type"]),
            (&json!("error"), &json!(kind)),
            "{body}"
        );
    }
    let chat = gateway.call("POST", "/v1/chat/completions", &key, "{").await;
    assert_eq!(chat.json()["error"]["code"], "invalid_argument");
}

#[tokio::test]
async fn tokens_of_a_message_are_counted_without_an_engine() {
    let (engine, gateway) = saying("x", 1, FinishReason::Stop, &[]).await;
    let counted = gateway.post("/v1/messages/count_tokens", &message(json!({"max_tokens": null}))).await;
    let tokens = counted.json()["input_tokens"].as_u64().expect("a count");
    assert!(engine.submits().is_empty());
    let answer = gateway.post("/v1/messages", MESSAGE).await;
    assert_eq!(answer.json()["usage"]["input_tokens"], tokens);
}

#[tokio::test]
async fn a_response_is_answered_stored_continued_and_deleted() {
    let (engine, gateway) = saying("Hello", 2, FinishReason::Stop, &[]).await;
    let first = gateway.post("/v1/responses", r#"{"input": "Hi", "instructions": "Be kind"}"#).await;
    assert_eq!(first.status, 200, "{}", first.text());
    let first = first.json();
    assert_eq!(
        (&first["status"], &first["output"][0]["content"][0]["text"]),
        (&json!("completed"), &json!("Hello"))
    );
    let id = first["id"].as_str().unwrap().to_owned();
    assert_eq!(gateway.get(&format!("/v1/responses/{id}")).await.json(), first);
    let items = gateway.get(&format!("/v1/responses/{id}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"][0]["text"], "Hi");
    let again = json!({"input": "More", "previous_response_id": id}).to_string();
    let second = gateway.post("/v1/responses", &again).await.json();
    assert_eq!(second["previous_response_id"], id.as_str());
    let lengths: Vec<_> =
        engine.submits().iter().map(|one| one.request.as_ref().unwrap().token_ids.len()).collect();
    assert!(lengths[1] > lengths[0], "the second prompt has the first turn: {lengths:?}");
    let deleted = gateway.call("DELETE", &format!("/v1/responses/{id}"), &[], "").await;
    assert_eq!(deleted.json()["deleted"], true);
    assert_eq!(gateway.get(&format!("/v1/responses/{id}")).await.status, 404);
    let lost = gateway.post("/v1/responses", &again).await;
    assert_eq!((lost.status, &lost.json()["error"]["param"]), (400, &json!("previous_response_id")));
    let unstored = gateway.post("/v1/responses", r#"{"input": "Hi", "store": false}"#).await.json();
    assert_eq!(gateway.get(&format!("/v1/responses/{}", unstored["id"].as_str().unwrap())).await.status, 404);
}

#[tokio::test]
async fn a_streamed_response_tells_every_step_in_order_and_ends_as_it_should() {
    for (finish, last, status) in [
        (FinishReason::Stop, "response.completed", "completed"),
        (FinishReason::Length, "response.incomplete", "incomplete"),
    ] {
        let (_engine, gateway) = saying("Hello", 3, finish, &[]).await;
        let events = named(&gateway.post("/v1/responses", r#"{"input": "Hi", "stream": true}"#).await);
        assert_eq!(
            names_of(&events),
            [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                last,
            ]
        );
        let numbers: Vec<_> =
            events.iter().map(|(_, data)| data["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
        let response = &events[9].1["response"];
        assert_eq!(
            (&response["status"], &response["output"][0]["content"][0]["text"]),
            (&json!(status), &json!("Hello"))
        );
    }
}

#[tokio::test]
async fn stream_terminal_event_per_family_at_an_engine() {
    for (path, body, last) in [
        ("/v1/responses", json!({"input": "Hi", "stream": true}).to_string(), "response.failed"),
        ("/v1/messages", message(json!({"stream": true})), "error"),
    ] {
        let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
        engine.script(|_| {
            vec![Act::tokens(&[65], "The"), Act::Wait(std::time::Duration::from_millis(50)), Act::Die]
        });
        let gateway = Gateway::start(&[], &[engine.url()]).await;
        let events = named(&gateway.post(path, &body).await);
        let names = names_of(&events);
        assert_eq!(names.last(), Some(&last), "{names:?}");
        let good = ["response.completed", "message_stop", "message_delta"];
        assert!(!names.iter().any(|name| good.contains(name)), "{names:?}");
        let said = events.last().unwrap().1.to_string();
        assert!(said.contains("\"message\":"), "{said}");
    }
}

#[tokio::test]
async fn an_aborted_message_is_an_error_and_no_end_of_a_turn() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    engine.script(|_| vec![Act::tokens(&[65], "The"), Act::finish(0, FinishReason::Abort, 1)]);
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let whole = gateway.post("/v1/messages", &message(json!({}))).await;
    assert_eq!((whole.status, whole.json()["type"].as_str()), (499, Some("error")), "{}", whole.text());
    let events = named(&gateway.post("/v1/messages", &message(json!({"stream": true}))).await);
    let names = names_of(&events);
    assert_eq!(names.last(), Some(&"error"), "{names:?}");
    assert!(!names.contains(&"message_stop") && !names.contains(&"message_delta"), "{names:?}");
}

#[tokio::test]
async fn a_background_response_runs_on_and_can_be_cancelled() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let started = gateway.post("/v1/responses", r#"{"input": "Hi", "background": true}"#).await.json();
    assert_eq!(started["status"], "in_progress");
    within("the request", engine.wait_until(|engine| engine.submits().len() == 1)).await;
    let path = format!("/v1/responses/{}", started["id"].as_str().unwrap());
    assert_eq!(gateway.get(&path).await.json()["status"], "in_progress");
    let busy = json!({"input": "x", "previous_response_id": started["id"]}).to_string();
    assert_eq!(gateway.post("/v1/responses", &busy).await.status, 409);
    let cancelled = gateway.post(&format!("{path}/cancel"), "").await;
    assert_eq!(cancelled.json()["status"], "cancelled");
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 1)).await;
    assert_eq!(gateway.get(&path).await.json()["status"], "cancelled");
    engine.script(|_| vec![Act::tokens(&[65], "done"), Act::finish(0, FinishReason::Stop, 1)]);
    let second = gateway.post("/v1/responses", r#"{"input": "Hi", "background": true}"#).await.json();
    let path = format!("/v1/responses/{}", second["id"].as_str().unwrap());
    let ended = async {
        while gateway.get(&path).await.json()["status"] != "completed" {
            tokio::task::yield_now().await;
        }
    };
    within("its end", ended).await;
    assert_eq!(gateway.get(&path).await.json()["output"][0]["content"][0]["text"], "done");
}

#[tokio::test]
async fn a_response_is_seen_by_its_own_key_only() {
    let (_engine, gateway) = saying("x", 1, FinishReason::Stop, &[("api_key", "one,two")]).await;
    let keys = gateway.app.options.api_key.len();
    let key = if keys == 2 { "one" } else { "one,two" };
    let made =
        gateway.call("POST", "/v1/responses", &[("x-api-key", key)], r#"{"input": "Hi"}"#).await.json();
    let path = format!("/v1/responses/{}", made["id"].as_str().unwrap());
    assert_eq!(gateway.call("GET", &path, &[("x-api-key", key)], "").await.status, 200);
    if keys == 2 {
        assert_eq!(gateway.call("GET", &path, &[("x-api-key", "two")], "").await.status, 404);
    }
}

#[tokio::test]
async fn what_engines_cannot_make_is_refused_by_the_models_name() {
    let (_engine, gateway) = saying("x", 1, FinishReason::Stop, &[]).await;
    for path in ["/v1/embeddings", "/v1/rerank", "/rerank", "/v1/classify"] {
        let answer = gateway.post(path, r#"{"model": "fake", "input": "x"}"#).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!("model")), "{path}");
        assert!(answer.text().contains("'fake'") || answer.text().contains("fake"), "{}", answer.text());
    }
}

#[tokio::test]
async fn the_default_model_can_be_looked_up() {
    let (_engine, gateway) = saying("x", 1, FinishReason::Stop, &[]).await;
    assert_eq!(gateway.get("/v1/models/default").await.json()["id"], "fake");
    assert_eq!(gateway.get("/v1/models/other").await.status, 404);
}
