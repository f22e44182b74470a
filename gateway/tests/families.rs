//! The API families beside each other: the same turn read and written by each, relayed for HTTP workers, refused by name.

use crate::kit::{Answer, Gateway};
use branchline_testkit::{
    Act, EngineSetup, FakeEngine, ScriptedWorker, Step, chunk, event_stream, last_chunk, response, within,
};
use branchline_worker::proto::{self, FinishReason};
use serde_json::{Value, json};

const TURN: &str = "<think>\nI look\nit up.\n</think>\n\nSoon: <tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": [1, \"}\"]}}\n</tool_call>\n<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>";
const PARSERS: &[(&str, &str)] = &[("tool_call_parser", "hermes"), ("reasoning_parser", "qwen3")];

/// A gateway before an engine that says `text` in pieces of these many characters, the last size for all the rest.
async fn saying(text: &str, sizes: &[usize], given: &[(&str, &str)]) -> (FakeEngine, Gateway) {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let mut rest: Vec<char> = text.chars().collect();
    let mut pieces = Vec::new();
    let mut sizes = sizes.iter().copied();
    let mut size = sizes.next().expect("a size");
    while !rest.is_empty() {
        let tail = rest.split_off(size.min(rest.len()));
        pieces.push(rest.iter().collect::<String>());
        rest = tail;
        size = sizes.next().unwrap_or(size);
    }
    engine.script(move |request| {
        let prompt =
            proto::PromptReport { prompt_tokens: request.token_ids.len() as u32, ..Default::default() };
        let mut acts: Vec<Act> = (0..)
            .zip(&pieces)
            .map(|(position, piece)| {
                Act::send(proto::SequenceDelta {
                    // Several tokens a delta, as speculation has it.
                    token_ids: vec![65; 1 + position % 3],
                    text: piece.clone(),
                    prompt: (position == 0).then_some(prompt),
                    ..Default::default()
                })
            })
            .collect();
        acts.push(Act::finish(0, FinishReason::Stop, pieces.len() as u32));
        acts
    });
    let gateway = Gateway::start(given, &[engine.url()]).await;
    (engine, gateway)
}

/// What a turn says, whatever the family: reasoning, text, calls, end.
#[derive(Debug, PartialEq)]
struct Said {
    reasoning: String,
    text: String,
    calls: Vec<(String, Value)>,
    end: String,
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn arguments(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"))
}

fn chat_said(body: &Value) -> Said {
    let choice = &body["choices"][0];
    let calls = choice["message"]["tool_calls"].as_array().into_iter().flatten();
    Said {
        reasoning: word(&choice["message"]["reasoning_content"]),
        text: word(&choice["message"]["content"]),
        calls: calls
            .map(|call| (word(&call["function"]["name"]), arguments(&word(&call["function"]["arguments"]))))
            .collect(),
        end: word(&choice["finish_reason"]),
    }
}

fn message_said(body: &Value) -> Said {
    let blocks = body["content"].as_array().expect("blocks");
    let joined = |kind: &str, key: &str| {
        blocks.iter().filter(|block| block["type"] == kind).map(|block| word(&block[key])).collect::<String>()
    };
    let calls = blocks.iter().filter(|block| block["type"] == "tool_use");
    Said {
        reasoning: joined("thinking", "thinking"),
        text: joined("text", "text"),
        calls: calls.map(|call| (word(&call["name"]), call["input"].clone())).collect(),
        end: word(&body["stop_reason"]),
    }
}

fn response_said(body: &Value) -> Said {
    let items = body["output"].as_array().expect("items");
    let joined = |kind: &str| {
        items
            .iter()
            .filter(|item| item["type"] == kind)
            .map(|item| word(&item["content"][0]["text"]))
            .collect::<String>()
    };
    let calls = items.iter().filter(|item| item["type"] == "function_call");
    Said {
        reasoning: joined("reasoning"),
        text: joined("message"),
        calls: calls.map(|call| (word(&call["name"]), arguments(&word(&call["arguments"])))).collect(),
        end: word(&body["status"]),
    }
}

fn events(answer: &Answer) -> Vec<Value> {
    let all = answer.events();
    all.iter().map(|event| serde_json::from_str(event).unwrap_or_else(|_| json!(event))).collect()
}

/// The message that the stream's events build, as a client would.
fn message_of(answer: &Answer) -> Value {
    let mut message = Value::Null;
    let mut partial = String::new();
    for event in events(answer) {
        match event["type"].as_str().expect("a type") {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                let blocks = message["content"].as_array_mut().expect("blocks");
                assert_eq!(event["index"], blocks.len(), "{event}");
                blocks.push(event["content_block"].clone());
                partial.clear();
            }
            "content_block_delta" => {
                let block = &mut message["content"][event["index"].as_u64().expect("an index") as usize];
                let delta = &event["delta"];
                match delta["type"].as_str().expect("a type") {
                    "text_delta" => {
                        block["text"] = format!("{}{}", word(&block["text"]), word(&delta["text"])).into()
                    }
                    "thinking_delta" => {
                        block["thinking"] =
                            format!("{}{}", word(&block["thinking"]), word(&delta["thinking"])).into();
                    }
                    "input_json_delta" => partial.push_str(&word(&delta["partial_json"])),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                let block = &mut message["content"][event["index"].as_u64().expect("an index") as usize];
                if block["type"] == "tool_use" {
                    block["input"] = arguments(&partial);
                }
            }
            "message_delta" => message["stop_reason"] = event["delta"]["stop_reason"].clone(),
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message
}

fn definitions(family: &str) -> Value {
    let names = ["f", "g"];
    match family {
        "chat" => {
            names.map(|name| json!({"type": "function", "function": {"name": name}})).into_iter().collect()
        }
        "responses" => names.map(|name| json!({"type": "function", "name": name})).into_iter().collect(),
        _ => {
            names.map(|name| json!({"name": name, "input_schema": {"type": "object"}})).into_iter().collect()
        }
    }
}

#[tokio::test]
async fn every_family_says_the_same_of_a_turn_however_it_is_cut() {
    for sizes in [&[10_000][..], &[1], &[2], &[3, 7, 1, 40], &[8, 13, 5]] {
        let (_engine, gateway) = saying(TURN, sizes, PARSERS).await;
        let mut said = Vec::new();
        let messages = json!([{"role": "user", "content": "Hi"}]);
        let chat = json!({"messages": messages, "tools": definitions("chat")}).to_string();
        said.push(chat_said(&gateway.post("/v1/chat/completions", &chat).await.json()));
        let message = |stream: bool| {
            json!({"messages": messages, "max_tokens": 50, "stream": stream, "tools": definitions("messages")}).to_string()
        };
        said.push(message_said(&gateway.post("/v1/messages", &message(false)).await.json()));
        said.push(message_said(&message_of(&gateway.post("/v1/messages", &message(true)).await)));
        let response = |stream: bool| {
            json!({"input": "Hi", "stream": stream, "tools": definitions("responses")}).to_string()
        };
        said.push(response_said(&gateway.post("/v1/responses", &response(false)).await.json()));
        let last = events(&gateway.post("/v1/responses", &response(true)).await).pop().expect("a last event");
        said.push(response_said(&last["response"]));
        for (one, end) in
            said.into_iter().zip(["tool_calls", "tool_use", "tool_use", "completed", "completed"])
        {
            let calls = vec![("f".to_owned(), json!({"x": [1, "}"]})), ("g".to_owned(), json!({}))];
            let wanted =
                Said { reasoning: "I look\nit up.".into(), text: "Soon:".into(), calls, end: end.into() };
            let one = Said { text: one.text.trim_end().to_owned(), ..one };
            assert_eq!(one, wanted, "{sizes:?}");
        }
    }
}

#[tokio::test]
async fn a_streamed_response_repeats_its_texts_in_the_closing_events() {
    let (_engine, gateway) = saying(TURN, &[4], PARSERS).await;
    let body = json!({"input": "Hi", "stream": true, "tools": definitions("responses")}).to_string();
    let events = events(&gateway.post("/v1/responses", &body).await);
    for (delta, done, key) in [
        ("response.output_text.delta", "response.output_text.done", "text"),
        ("response.reasoning_text.delta", "response.reasoning_text.done", "text"),
        ("response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments"),
    ] {
        let of = |kind: &str, key: &str| {
            events
                .iter()
                .filter(|event| event["type"] == kind)
                .map(|event| word(&event[key]))
                .collect::<String>()
        };
        assert!(!of(delta, "delta").is_empty(), "{delta}");
        assert_eq!(of(delta, "delta"), of(done, key), "{delta}");
    }
    let added = events.iter().filter(|event| event["type"] == "response.output_item.added");
    let indices: Vec<_> = added.map(|event| event["output_index"].as_u64().expect("an index")).collect();
    assert_eq!(indices, (0..indices.len() as u64).collect::<Vec<_>>());
}

#[tokio::test]
async fn marks_stay_in_the_text_where_no_parser_is_asked_for() {
    let off = [("tool_call_parser", "none"), ("reasoning_parser", "none")];
    let (_engine, gateway) = saying(TURN, &[6], &off).await;
    let chat =
        json!({"messages": [{"role": "user", "content": "Hi"}], "tools": definitions("chat")}).to_string();
    let said = chat_said(&gateway.post("/v1/chat/completions", &chat).await.json());
    assert_eq!((said.text.as_str(), said.calls.len(), said.end.as_str()), (TURN, 0, "stop"));
}

#[tokio::test]
async fn logprobs_are_told_once_a_token_also_where_text_becomes_a_call() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    engine.script(|_| {
        let piece = |text: &str| {
            Act::send(proto::SequenceDelta {
                token_ids: vec![65, 66],
                text: text.to_owned(),
                logprobs: Some(proto::TokenLogprobs {
                    token_ids: vec![65, 66],
                    logprobs: vec![-0.5, -0.25],
                    ..Default::default()
                }),
                ..Default::default()
            })
        };
        vec![
            piece("<tool_call>{\"name\": "),
            piece("\"f\", \"arguments\": {}}"),
            piece("</tool_call>"),
            Act::finish(0, FinishReason::Stop, 6),
        ]
    });
    let gateway = Gateway::start(PARSERS, &[engine.url()]).await;
    let ask = |stream: bool| {
        json!({"messages": [{"role": "user", "content": "Hi"}], "tools": definitions("chat"), "logprobs": true,
            "stream": stream})
        .to_string()
    };
    let whole = gateway.post("/v1/chat/completions", &ask(false)).await.json();
    assert_eq!(whole["choices"][0]["logprobs"]["content"].as_array().map(Vec::len), Some(6), "{whole}");
    let stream = gateway.post("/v1/chat/completions", &ask(true)).await;
    let told: usize = events(&stream)
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array().map(Vec::len))
        .sum();
    assert_eq!(told, 6, "{}", stream.text());
}

#[tokio::test]
async fn bad_requests_of_each_family_are_refused_by_their_path_and_reach_no_engine() {
    let (engine, gateway) = saying("x", &[1], PARSERS).await;
    for (path, body, field) in [
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}),
            "tools[0].function",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "tools": definitions("chat"), "tool_choice": "perhaps"}),
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}),
            "tool_choice",
        ),
        ("/v1/responses", json!({}), "input"),
        ("/v1/responses", json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        (
            "/v1/responses",
            json!({"input": [{"type": "function_call_output", "output": "x"}]}),
            "input[0].call_id",
        ),
        ("/v1/responses", json!({"input": [{"type": "reasoning", "summary": []}]}), "input"),
        ("/v1/responses", json!({"input": "x", "previous_response_id": "resp_none"}), "previous_response_id"),
    ] {
        let answer = gateway.post(path, &body.to_string()).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(field)),
            "{body} {}",
            answer.text()
        );
    }
    for (body, part) in [
        (json!({"max_tokens": 5}), "messages"),
        (json!({"max_tokens": -1, "messages": [{"role": "user", "content": "x"}]}), "max_tokens"),
        (
            json!({"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "tools": [{"input_schema": {}}]}),
            "tools[0].name",
        ),
        (
            json!({"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "any"}}),
            "tool_choice",
        ),
    ] {
        let answer = gateway.post("/v1/messages", &body.to_string()).await;
        assert_eq!((answer.status, &answer.json()["type"]), (400, &json!("error")), "{body}");
        assert!(answer.text().contains(part), "{body} {}", answer.text());
    }
    assert!(engine.submits().is_empty());
}

#[tokio::test]
async fn the_store_of_responses_is_bounded_and_forgets_the_oldest() {
    let (_engine, gateway) = saying("Hello", &[5], &[("response_store_size", "8KiB")]).await;
    let mut ids = Vec::new();
    for _ in 0..20 {
        let made = gateway.post("/v1/responses", r#"{"input": "Hi"}"#).await.json();
        ids.push(word(&made["id"]));
    }
    let mut found = Vec::new();
    for id in &ids {
        found.push(gateway.get(&format!("/v1/responses/{id}")).await.status == 200);
    }
    let kept = found.iter().filter(|found| **found).count();
    assert!((1..20).contains(&kept), "{found:?}");
    assert!(found[20 - kept..].iter().all(|found| *found), "{found:?}");
}

#[tokio::test]
async fn what_is_too_big_to_store_is_answered_and_not_kept() {
    let (_engine, gateway) = saying("Hello", &[5], &[("response_store_size", "1KiB")]).await;
    let body = json!({"input": "x".repeat(1_200)}).to_string();
    let made = gateway.post("/v1/responses", &body).await;
    assert_eq!(made.status, 200, "{}", made.text());
    assert_eq!(gateway.get(&format!("/v1/responses/{}", word(&made.json()["id"]))).await.status, 404);
}

#[tokio::test]
async fn a_deleted_background_response_stops_and_stays_deleted() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let made = gateway.post("/v1/responses", r#"{"input": "Hi", "background": true}"#).await.json();
    let path = format!("/v1/responses/{}", word(&made["id"]));
    within("the request", engine.wait_until(|engine| engine.submits().len() == 1)).await;
    assert_eq!(gateway.call("DELETE", &path, &[], "").await.status, 200);
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 1)).await;
    assert_eq!(gateway.get(&path).await.status, 404);
}

#[tokio::test]
async fn a_background_response_whose_engine_dies_is_failed() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    engine.script(|_| vec![Act::tokens(&[65], "The"), Act::Die]);
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let made = gateway.post("/v1/responses", r#"{"input": "Hi", "background": true}"#).await.json();
    let path = format!("/v1/responses/{}", word(&made["id"]));
    let ended = async {
        while gateway.get(&path).await.json()["status"] == "in_progress" {
            tokio::task::yield_now().await;
        }
    };
    within("its end", ended).await;
    let failed = gateway.get(&path).await.json();
    assert_eq!(failed["status"], "failed");
    assert!(failed["error"]["message"].is_string() && failed["output"].is_array(), "{failed}");
    let cancelled = gateway.post(&format!("{path}/cancel"), "").await.json();
    assert_eq!(cancelled["status"], "failed", "what has ended stays as it is");
}

#[tokio::test]
async fn only_background_responses_can_be_cancelled_and_unknown_ones_are_named() {
    let (_engine, gateway) = saying("x", &[1], &[]).await;
    let made = gateway.post("/v1/responses", r#"{"input": "Hi"}"#).await.json();
    let refused = gateway.post(&format!("/v1/responses/{}/cancel", word(&made["id"])), "").await;
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("response_id")));
    for (method, path) in [
        ("GET", "/v1/responses/resp_none"),
        ("DELETE", "/v1/responses/resp_none"),
        ("POST", "/v1/responses/resp_none/cancel"),
        ("GET", "/v1/responses/resp_none/input_items"),
    ] {
        let answer = gateway.call(method, path, &[], "").await;
        assert_eq!(answer.status, 404, "{method} {path}");
        assert!(answer.text().contains("resp_none"), "{}", answer.text());
    }
}

#[tokio::test]
async fn a_model_of_an_http_worker_gets_every_family_byte_for_byte() {
    let worker = ScriptedWorker::start(|_| Vec::new()).await.expect("a free port");
    worker.serve_models(&["theirs"]);
    let whole = br#"{"anything": [1, 2.50, "\u00e9"]}"#;
    let stream = "event: message_start\ndata: {\"type\":\"message_start\"}\n\nevent: message_stop\ndata: {\"type\":\"message_stop\"}\n\n";
    const PATHS: [&str; 9] = [
        "/v1/embeddings",
        "/v1/rerank",
        "/rerank",
        "/v2/rerank",
        "/score",
        "/v1/classify",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
    ];
    for path in PATHS {
        worker.on(path, vec![Step::Send(response(200, &[("x-theirs", "yes")], whole))]);
    }
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url(), engine.url()]).await;
    let body = r#"{"model": "theirs", "input": "x", "documents": ["a"], "unknown_field": {"kept": 1.0}}"#;
    for path in PATHS {
        let answer = gateway.post(path, body).await;
        assert_eq!(
            (answer.status, answer.body.as_slice(), answer.header("x-theirs")),
            (200, &whole[..], Some("yes")),
            "{path}"
        );
        let record = worker.record();
        let seen = record.requests(path);
        assert_eq!(String::from_utf8_lossy(&seen.last().expect("it came").body), body, "{path}");
    }
    worker.on("/v1/messages", vec![event_stream(), chunk(stream.as_bytes()), last_chunk()]);
    let answer = gateway.post("/v1/messages", r#"{"model": "theirs", "stream": true}"#).await;
    assert_eq!((answer.text(), answer.complete), (stream.to_owned(), true));
    assert!(engine.submits().is_empty());
}

#[tokio::test]
async fn a_model_of_our_engines_beside_one_of_an_http_worker_is_refused_by_its_name() {
    let worker = ScriptedWorker::start(|_| Vec::new()).await.expect("a free port");
    worker.serve_models(&["theirs"]);
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url(), engine.url()]).await;
    for path in
        ["/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/score", "/v1/classify", "/classify"]
    {
        let answer = gateway.post(path, r#"{"model": "fake", "input": "x"}"#).await;
        assert_eq!(answer.status, 400, "{path} {}", answer.text());
        assert_eq!(
            (&answer.json()["error"]["param"], &answer.json()["error"]["code"]),
            (&json!("model"), &json!("unimplemented"))
        );
        assert!(answer.text().contains("fake") && answer.text().contains(path), "{}", answer.text());
    }
}
