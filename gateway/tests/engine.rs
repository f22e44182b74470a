//! The API handlers over real HTTP, before a scripted engine on a real gRPC socket.

use std::time::Duration;

use crate::kit::{Answer, Gateway};
use branchline_testkit::{Act, EngineSetup, FakeEngine, within};
use branchline_worker::proto::{self, FinishReason, SequenceDelta};
use serde_json::{Value, json};

async fn engine() -> FakeEngine {
    FakeEngine::start(EngineSetup::default()).await.expect("a free port")
}

async fn pair() -> (FakeEngine, Gateway) {
    let engine = engine().await;
    engine.script(|request| speak(request, &["Hel", "lo"]));
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    (engine, gateway)
}

/// One token a text, for each sequence asked for, then a stop.
fn speak(request: &proto::GenerateRequest, texts: &[&str]) -> Vec<Act> {
    let prompt = proto::PromptReport { prompt_tokens: request.token_ids.len() as u32, cached_tokens: 4 };
    let sequences = request.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1);
    let mut acts = Vec::new();
    for index in 0..sequences {
        for (position, text) in texts.iter().enumerate() {
            acts.push(Act::send(SequenceDelta {
                index,
                token_ids: vec![65 + position as u32],
                text: (*text).into(),
                prompt: (index == 0 && position == 0).then_some(prompt),
                logprobs: request.logprobs.as_ref().map(|asked| columns(65 + position as u32, asked.top_k())),
                ..Default::default()
            }));
        }
        acts.push(Act::finish(index, FinishReason::Stop, texts.len() as u32));
    }
    acts
}

fn columns(id: u32, top: u32) -> proto::TokenLogprobs {
    let top = proto::TopLogprobs {
        token_ids: (0..top).map(|rank| 200 + rank).collect(),
        logprobs: (0..top).map(|rank| -1.0 - rank as f32).collect(),
    };
    proto::TokenLogprobs { token_ids: vec![id], logprobs: vec![-0.5], top: vec![top], ..Default::default() }
}

fn chat(more: Value) -> String {
    let mut body = json!({"model": "fake", "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body.to_string()
}

fn chunks(answer: &Answer) -> Vec<Value> {
    let events = answer.events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{}", answer.text());
    events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).expect("json")).collect()
}

fn contents(chunks: &[Value]) -> String {
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect()
}

#[tokio::test]
async fn a_chat_is_answered_whole_with_usage_and_cached_tokens() {
    let (engine, gateway) = pair().await;
    let answer = gateway.post("/v1/chat/completions", &chat(json!({}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let body = answer.json();
    let prompt = engine.submits()[0].request.clone().expect("a request");
    let rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    let count = prompt.token_ids.len();
    assert_eq!(prompt.token_ids[0], 256, "the template's own special token is one id");
    assert_eq!(count, rendered.len() - 2 * "<|im_start|>".len() - "<|im_end|>".len() + 3);
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "fake");
    assert_eq!(
        body["choices"][0]["message"],
        json!({"role": "assistant", "content": "Hello", "refusal": null})
    );
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert!(body["choices"][0]["logprobs"].is_null());
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": count, "completion_tokens": 2, "total_tokens": count + 2,
            "prompt_tokens_details": {"cached_tokens": 4}})
    );
}

#[tokio::test]
async fn api_default_temperature_is_absent_at_the_engine_unless_sent() {
    let (engine, gateway) = pair().await;
    gateway.post("/v1/chat/completions", &chat(json!({}))).await;
    gateway.post("/v1/chat/completions", &chat(json!({"temperature": 0, "top_p": 1, "top_k": -1}))).await;
    let sampling: Vec<_> =
        engine.submits().into_iter().map(|submit| submit.request.unwrap().sampling.unwrap()).collect();
    // The seed is the gateway's own, so that a continuation elsewhere draws the same numbers.
    let (max_tokens, seed) = (sampling[0].max_tokens, sampling[0].seed);
    let bare = proto::SamplingParams { max_tokens, seed, ..Default::default() };
    assert_eq!(sampling[0], bare);
    assert_eq!(
        (sampling[1].temperature, sampling[1].top_p, sampling[1].top_k),
        (Some(0.0), Some(1.0), Some(-1))
    );
}

#[tokio::test]
async fn a_streamed_chat_says_the_same_and_usage_only_when_asked() {
    let (_engine, gateway) = pair().await;
    for options in [json!(null), json!({"include_usage": false}), json!({"include_usage": true})] {
        let body = chat(json!({"stream": true, "stream_options": options}));
        let answer = gateway.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.header("content-type"), Some("text/event-stream"));
        let mut chunks = chunks(&answer);
        if options["include_usage"] == true {
            let last = chunks.pop().expect("a usage chunk");
            assert_eq!(last["choices"], json!([]));
            let usage = &last["usage"];
            let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
            assert_eq!(usage["total_tokens"].as_u64(), Some(sum));
        }
        assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
        assert_eq!(contents(&chunks), "Hello");
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
        for chunk in &chunks {
            assert_eq!(chunk["choices"].as_array().map(Vec::len), Some(1));
            assert!(chunk.get("usage").is_none());
        }
    }
}

#[tokio::test]
async fn logprobs_come_with_their_alternatives_in_both_families() {
    let (_engine, gateway) = pair().await;
    let body = chat(json!({"logprobs": true, "top_logprobs": 2, "n": 2}));
    let answer = gateway.post("/v1/chat/completions", &body).await.json();
    for choice in answer["choices"].as_array().unwrap() {
        let content = choice["logprobs"]["content"].as_array().unwrap();
        assert_eq!(content.len(), 2);
        assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    }
    let with = json!({"prompt": "Hi", "logprobs": 0}).to_string();
    let answer = gateway.post("/v1/completions", &with).await.json();
    assert_eq!(answer["choices"][0]["logprobs"]["token_logprobs"], json!([-0.5, -0.5]));
    let without = gateway.post("/v1/completions", &json!({"prompt": "Hi"}).to_string()).await.json();
    assert!(without["choices"][0]["logprobs"].is_null());
}

#[tokio::test]
async fn several_prompts_and_n_give_choices_in_order_streamed_or_not() {
    let (_engine, gateway) = pair().await;
    let body = json!({"prompt": ["a", "b"], "n": 2, "echo": true});
    let answer = gateway.post("/v1/completions", &body.to_string()).await.json();
    let texts: Vec<_> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (c["index"].clone(), c["text"].clone()))
        .collect();
    let right = [(0, "aHello"), (1, "aHello"), (2, "bHello"), (3, "bHello")];
    assert_eq!(texts, right.map(|(index, text)| (json!(index), json!(text))));
    assert_eq!(answer["usage"]["prompt_tokens"], 2);
    assert_eq!(answer["usage"]["completion_tokens"], 8);
    let body = json!({"prompt": ["a", "b"], "n": 2, "echo": true, "stream": true});
    let mut joined = vec![String::new(); 4];
    for chunk in chunks(&gateway.post("/v1/completions", &body.to_string()).await) {
        let choice = &chunk["choices"][0];
        joined[choice["index"].as_u64().unwrap() as usize].push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(joined, right.map(|(_, text)| text.to_owned()));
}

#[tokio::test]
async fn native_streams_are_cumulative_and_lists_answer_lists() {
    let (engine, gateway) = pair().await;
    let body = json!({"text": "Hi", "rid": "job-1", "return_logprob": true, "return_text_in_logprobs": true});
    let single = gateway.post("/generate", &body.to_string()).await.json();
    assert_eq!(single["text"], "Hello");
    assert_eq!(single["output_ids"], json!([65, 66]));
    let meta = &single["meta_info"];
    assert_eq!(meta["id"], "job-1");
    assert_eq!(meta["finish_reason"], json!({"type": "stop", "matched": null}));
    assert_eq!((&meta["prompt_tokens"], &meta["cached_tokens"]), (&json!(2), &json!(4)));
    assert_eq!(meta["output_token_logprobs"][0][1], 65);
    let sampling = engine.submits()[0].request.clone().unwrap().sampling.unwrap();
    assert_eq!(sampling.max_tokens, Some(128));
    let list = gateway.post("/generate", &json!({"input_ids": [[1], [2]]}).to_string()).await.json();
    assert_eq!(list.as_array().map(Vec::len), Some(2));
    let streamed =
        chunks(&gateway.post("/generate", &json!({"text": "Hi", "stream": true}).to_string()).await);
    let texts: Vec<_> = streamed.iter().map(|event| event["text"].as_str().unwrap().to_owned()).collect();
    assert!(texts.windows(2).all(|pair| pair[1].starts_with(&pair[0])), "{texts:?}");
    assert_eq!(texts.last().map(String::as_str), Some("Hello"));
    assert_eq!(streamed.last().unwrap()["meta_info"]["finish_reason"]["type"], "stop");
}

#[tokio::test]
async fn tokenize_and_detokenize_are_inverse_and_models_are_listed() {
    let (_engine, gateway) = pair().await;
    let tokens = gateway.post("/v1/tokenize", &json!({"prompt": "Hé"}).to_string()).await.json();
    assert_eq!(tokens, json!({"tokens": [72, 195, 169], "count": 3, "char_count": 2, "max_model_len": 2048}));
    let text = gateway.post("/v1/detokenize", &json!({"tokens": tokens["tokens"]}).to_string()).await.json();
    assert_eq!(text, json!({"text": "Hé"}));
    let models = gateway.get("/v1/models").await.json();
    assert_eq!(models["data"][0]["id"], "fake");
    assert_eq!(gateway.get("/v1/models/fake").await.json()["max_model_len"], 2048);
    assert_eq!(gateway.get("/v1/models/other").await.status, 404);
}

#[tokio::test]
async fn each_bad_request_names_its_field_and_costs_only_itself() {
    let (engine, gateway) = pair().await;
    let long = "x".repeat(2048);
    // More than the context even in the longest tokens.
    let hopeless = "x".repeat(30_000);
    let cases: Vec<(&str, String, u16, Value)> = vec![
        ("/v1/chat/completions", "{\"model\": }".into(), 400, json!("model")),
        ("/v1/chat/completions", "[".repeat(100_000), 400, Value::Null),
        ("/v1/chat/completions", chat(json!({"temperature": "hot"})), 400, json!("temperature")),
        ("/v1/chat/completions", chat(json!({"model": "other"})), 404, json!("model")),
        (
            "/v1/chat/completions",
            chat(json!({"response_format": {"type": "xml"}})),
            400,
            json!("response_format"),
        ),
        ("/v1/chat/completions", chat(json!({"max_tokens": 2048})), 400, json!("max_completion_tokens")),
        ("/v1/chat/completions", chat(json!({"messages": []})), 400, json!("messages")),
        ("/v1/chat/completions", chat(json!({"logit_bias": {"258": 1}})), 400, json!("logit_bias.258")),
        ("/v1/completions", json!({"prompt": [[-1]]}).to_string(), 400, json!("prompt[0][0]")),
        ("/v1/completions", json!({"prompt": [[258]]}).to_string(), 400, json!("prompt[0][0]")),
        ("/v1/completions", json!({"prompt": ""}).to_string(), 400, json!("prompt")),
        ("/v1/completions", json!({"prompt": long}).to_string(), 400, json!("prompt")),
        ("/v1/completions", json!({"prompt": hopeless}).to_string(), 400, json!("prompt")),
        ("/generate", json!({"text": hopeless}).to_string(), 400, json!("text")),
        (
            "/v1/chat/completions",
            chat(json!({"messages": [{"role": "user", "content": hopeless}]})),
            400,
            json!("messages"),
        ),
        ("/generate", json!({"input_ids": [1, 2.5]}).to_string(), 400, json!("input_ids[1]")),
        (
            "/generate",
            json!({"text": ["a", "b"], "sampling_params": [{}]}).to_string(),
            400,
            json!("sampling_params"),
        ),
        (
            "/generate",
            json!({"text": "a", "return_logprob": true, "logprob_start_len": 1}).to_string(),
            400,
            json!("logprob_start_len"),
        ),
    ];
    for (path, body, status, field) in cases {
        let answer = gateway.post(path, &body).await;
        let shown = &body[..body.len().min(120)];
        assert_eq!(answer.status, status, "{shown}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(error["param"], field, "{shown}: {error}");
        let message = error["message"].as_str().unwrap_or_default();
        assert!(!message.is_empty());
        assert_eq!(
            message.contains("at least 25"),
            body.contains(&hopeless),
            "refused untokenised: {message}"
        );
        assert!(error["type"].is_string() && error["code"].is_string());
    }
    assert!(engine.submits().is_empty(), "nothing bad reached the engine");
    assert_eq!(gateway.post("/v1/chat/completions", &chat(json!({}))).await.status, 200);
    let wrong = gateway.get("/v1/completions").await;
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("POST")));
    assert_eq!(wrong.json()["error"]["code"], "method_not_allowed");
    assert!(gateway.app.live.is_empty());
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request_streamed_or_not_and_before_the_first_piece() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    for (count, stream) in [(1, false), (2, true)] {
        let client =
            gateway.send("POST", "/v1/chat/completions", &[], &chat(json!({"stream": stream}))).await;
        within("the request", engine.wait_until(|engine| engine.submits().len() == count)).await;
        drop(client);
        within("its cancel", engine.wait_until(|engine| engine.cancels().len() == count)).await;
    }
    let mut client =
        gateway.send("POST", "/generate", &[], &json!({"text": "a", "stream": true}).to_string()).await;
    within("the request", engine.wait_until(|engine| engine.submits().len() == 3)).await;
    let handle = engine.submits()[2].handle;
    engine.emit(vec![SequenceDelta { handle, token_ids: vec![65], text: "A".into(), ..Default::default() }]);
    client.read_until("\"A\"").await;
    drop(client);
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 3)).await;
    assert_eq!(engine.cancels()[2], handle);
}

#[tokio::test]
async fn stream_upstream_dies_mid_way_at_an_engine_leaves_one_error_event_and_no_end_mark() {
    let engine = engine().await;
    engine.script(|_| vec![Act::tokens(&[65], "The answer"), Act::Wait(Duration::from_millis(50)), Act::Die]);
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    for (path, body) in [
        ("/v1/chat/completions", chat(json!({"stream": true}))),
        ("/generate", json!({"text": "a", "stream": true}).to_string()),
    ] {
        let answer = gateway.post(path, &body).await;
        let events = answer.events();
        let errors: Vec<Value> = events
            .iter()
            .map(|event| serde_json::from_str::<Value>(event).expect("json"))
            .filter(|event| event.get("error").is_some())
            .collect();
        assert_eq!(errors.len(), 1, "{events:?}");
        assert!(errors[0]["error"]["message"].is_string() && errors[0]["error"]["type"].is_string());
        assert!(events[0].contains("assistant") || events[0].contains("The answer"));
        assert!(!answer.text().contains("[DONE]") && !answer.text().contains("\"finish_reason\":\"stop\""));
        engine.restart().await.expect("the same port");
        let ready =
            gateway.app.fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready()));
        within("the engine is used again", ready).await;
    }
}

#[tokio::test]
async fn an_engine_that_dies_before_the_first_piece_is_replaced_or_named() {
    let (bad, good) = (engine().await, engine().await);
    good.script(|request| speak(request, &["ok"]));
    let gateway = Gateway::start(&[("policy", "round_robin")], &[bad.url(), good.url()]).await;
    bad.script(|_| vec![Act::Die]);
    for _ in 0..2 {
        let answer = gateway.post("/v1/chat/completions", &chat(json!({}))).await;
        assert_eq!(
            (answer.status, answer.json()["choices"][0]["message"]["content"].clone()),
            (200, json!("ok"))
        );
    }
    good.script(|_| vec![Act::Die]);
    let answer = gateway.post("/v1/chat/completions", &chat(json!({}))).await;
    assert!(matches!(answer.status, 502 | 503), "{}", answer.text());
    assert!(answer.header("retry-after").is_some());
    let none = gateway.post("/v1/chat/completions", &chat(json!({}))).await;
    assert!(matches!(none.status, 502 | 503), "{}", none.text());
}

#[tokio::test]
async fn a_silent_prefill_gets_keep_alive_comments() {
    let engine = engine().await;
    engine.script(|request| {
        let mut acts = vec![Act::Wait(Duration::from_millis(300))];
        acts.extend(speak(request, &["late"]));
        acts
    });
    let gateway = Gateway::start(&[("keep_alive_interval", "50ms")], &[engine.url()]).await;
    let answer = gateway.post("/v1/chat/completions", &chat(json!({"stream": true}))).await;
    assert!(answer.text().starts_with(": keep-alive\n\n"), "{}", answer.text());
    assert_eq!(contents(&chunks(&answer)), "late");
}

#[tokio::test]
async fn an_id_is_refused_while_a_request_with_it_runs() {
    let engine = engine().await;
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let body = json!({"text": "a", "rid": "job-1"}).to_string();
    let client = gateway.send("POST", "/generate", &[], &body).await;
    within("the request", engine.wait_until(|engine| engine.submits().len() == 1)).await;
    let second = gateway.post("/generate", &body).await;
    assert_eq!((second.status, second.json()["error"]["param"].clone()), (409, json!("rid")));
    drop(client);
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 1)).await;
    assert!(gateway.app.live.abort("job").is_none());
}
