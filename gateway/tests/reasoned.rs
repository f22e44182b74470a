//! Constrained answers of models that reason first: what the engine is asked for, and what clients get.

use branchline_testkit::{EngineSetup, FakeEngine};
use branchline_worker::proto::{self, FinishReason};
use serde_json::{Value, json};

use crate::apis::{Read, both, say};
use crate::kit::Gateway;

const CASES: &str = include_str!("../../tests/cases/grammar.jsonl");
const QWEN: &[(&str, &str)] = &[("reasoning_parser", "qwen3")];

fn case(id: &str) -> Value {
    let find = |line: &str| serde_json::from_str::<Value>(line).ok().filter(|case| case["id"] == id);
    CASES.lines().find_map(find).unwrap_or_else(|| panic!("no case {id}"))
}

/// An engine whose template ends prompts with `end`, and a gateway before it.
async fn after(end: &str, text: &str, finish: FinishReason) -> (FakeEngine, Gateway) {
    let mut setup = EngineSetup::default();
    setup.manifest = proto::TokenizerManifest {
        chat_template: Some(format!("{{{{ messages[0].content }}}}{end}")),
        ..setup.manifest.clone()
    };
    let engine = FakeEngine::start(setup).await.expect("a free port");
    say(&engine, text, 3, finish);
    let gateway = Gateway::start(QWEN, &[engine.url()]).await;
    (engine, gateway)
}

fn format() -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": {"type": "object"}}}})
}

fn with(more: &Value) -> Value {
    let mut body = format();
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn asked(engine: &FakeEngine) -> proto::Grammar {
    engine.submits()[0].request.clone().expect("a request").grammar.expect("a constraint")
}

#[tokio::test]
async fn grammar_starts_after_thinking_on_the_wire() {
    let case = case("grammar-starts-after-thinking");
    let (given, right) = (&case["given"], &case["right"]);
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    let (engine, gateway) = after("<think>\n", &word(&given["engine_text"]), FinishReason::Stop).await;
    let read = both(&gateway, json!({"response_format": given["response_format"]})).await;
    assert_eq!(read.reasoning.trim(), word(&right["reasoning_content_stripped"]));
    assert_eq!(read.content.trim(), word(&right["content_stripped"]));
    let marks = asked(&engine).reasoning.expect("the marks of the model's reasoning");
    assert_eq!((marks.begin.as_str(), marks.end.as_str(), marks.implicit), ("<think>", "</think>", false));
    let off = &given["thinking_off_variant"];
    let (_engine, gateway) =
        after("<think>\n\n</think>\n\n", &word(&off["engine_text"]), FinishReason::Stop).await;
    let read = both(&gateway, json!({"response_format": given["response_format"]})).await;
    assert_eq!((read.reasoning.as_str(), read.content), ("", word(&right["thinking_off"]["content"])));
}

#[tokio::test]
async fn grammar_no_thinking_is_content() {
    let case = case("grammar-no-thinking-is-content");
    for (number, given) in case["given"]["cases"].as_array().unwrap().iter().enumerate() {
        let finish = if given["finish"] == "stop" { FinishReason::Stop } else { FinishReason::Length };
        let end = if given["thinking"] == "off" { "" } else { "<think>" };
        let (_engine, gateway) = after(end, given["engine_text"].as_str().unwrap(), finish).await;
        let Read { content, reasoning, .. } =
            both(&gateway, with(&json!({"separate_reasoning": given["separate_reasoning"]}))).await;
        let right = |key: &str| match case["right"][key][number].as_str().unwrap() {
            "null or empty" | "empty or absent" | "absent" => String::new(),
            text => text.to_owned(),
        };
        assert_eq!((content, reasoning), (right("content"), right("reasoning_content")), "{given}");
    }
}

#[tokio::test]
async fn a_budget_best_effort_and_the_report_reach_the_engine() {
    let (engine, gateway) = after("", "{}", FinishReason::Stop).await;
    let more = json!({"thinking_budget": 40, "enforcement": "best_effort", "return_grammar_info": true});
    both(&gateway, with(&more)).await;
    let grammar = asked(&engine);
    assert_eq!(grammar.reasoning.as_ref().and_then(|one| one.max_tokens), Some(40));
    assert_eq!((grammar.enforcement(), grammar.report), (proto::Enforcement::BestEffort, true));
}

#[tokio::test]
async fn a_messages_budget_of_thinking_bounds_it_before_a_constraint() {
    let (engine, gateway) = after("", "{}", FinishReason::Stop).await;
    let body = json!({
        "model": "fake", "max_tokens": 64, "thinking": {"type": "enabled", "budget_tokens": 40},
        "messages": [{"role": "user", "content": "x"}],
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    });
    assert_eq!(gateway.post("/v1/messages", &body.to_string()).await.status, 200);
    assert_eq!(asked(&engine).reasoning.and_then(|one| one.max_tokens), Some(40));
}

#[tokio::test]
async fn a_forced_call_whose_reasoning_is_to_stay_in_the_text_has_none() {
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    for (separate, reasons) in [(true, true), (false, false)] {
        let (engine, gateway) = after("", "{\"a\": 1}", FinishReason::Stop).await;
        let choice = json!({"type": "function", "function": {"name": "f"}});
        let body = json!({"tools": tools, "tool_choice": choice, "separate_reasoning": separate});
        let read = both(&gateway, body).await;
        assert_eq!(read.calls, [("f".to_owned(), "{\"a\": 1}".to_owned())]);
        assert_eq!(asked(&engine).reasoning.is_some(), reasons);
    }
}

#[tokio::test]
async fn generate_reasons_before_a_constraint_only_if_asked() {
    for (more, reasons) in [(json!({}), None), (json!({"require_reasoning": true}), Some(true))] {
        let (engine, gateway) = after("", "ab", FinishReason::Stop).await;
        let mut body = json!({"text": "x", "sampling_params": {"regex": "ab"}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(gateway.post("/generate", &body.to_string()).await.status, 200);
        assert_eq!(asked(&engine).reasoning.map(|marks| marks.implicit), reasons);
    }
}

#[tokio::test]
async fn a_budget_without_reasoning_is_refused_by_name() {
    let (_engine, gateway) = after("", "x", FinishReason::Stop).await;
    for (body, field) in [
        (json!({"thinking_budget": 3}), "thinking_budget"),
        (with(&json!({"enforcement": "perhaps"})), "enforcement"),
        (with(&json!({"thinking_budget": -1})), "thinking_budget"),
    ] {
        let mut body = body;
        body["model"] = "fake".into();
        body["messages"] = json!([{"role": "user", "content": "x"}]);
        let answer = gateway.post("/v1/chat/completions", &body.to_string()).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(field)));
    }
}

#[tokio::test]
async fn how_a_constraint_was_met_is_told_in_every_form() {
    let (engine, gateway) = after("", "{}", FinishReason::Stop).await;
    engine.script(|request| {
        let prompt =
            proto::PromptReport { prompt_tokens: request.token_ids.len() as u32, ..Default::default() };
        let report = proto::GrammarReport {
            backend: "b".into(),
            reason: "because".into(),
            compile_ms: 2.0,
            mask_p99_ms: 0.5,
            constrained_tokens: 4,
            forced_tokens: 1,
            complete: true,
            enforced: true,
            valid: None,
        };
        vec![branchline_testkit::Act::send(proto::SequenceDelta {
            token_ids: vec![65],
            text: "{}".into(),
            prompt: Some(prompt),
            finish: Some(proto::Finish {
                reason: FinishReason::Stop.into(),
                completion_tokens: 4,
                grammar: Some(report),
                ..Default::default()
            }),
            ..Default::default()
        })]
    });
    let right = json!({"backend": "b", "reason": "because", "compile_ms": 2.0, "mask_p99_ms": 0.5,
        "forced_share": 0.25, "complete": true, "enforced": true});
    let chat = json!({"model": "fake", "messages": [{"role": "user", "content": "x"}]});
    for (path, body, place) in [
        ("/v1/chat/completions", chat.clone(), "/choices/0/grammar_info"),
        ("/v1/completions", json!({"model": "fake", "prompt": "x"}), "/choices/0/grammar_info"),
        ("/generate", json!({"text": "x"}), "/meta_info/grammar_info"),
    ] {
        let answer = gateway.post(path, &body.to_string()).await;
        assert_eq!(answer.json().pointer(place), Some(&right), "{path}: {}", answer.text());
    }
    let mut streamed = chat;
    streamed["stream"] = true.into();
    let answer = gateway.post("/v1/chat/completions", &streamed.to_string()).await;
    let told = answer.events().iter().filter(|event| event.contains("\"grammar_info\"")).count();
    assert_eq!(told, 1, "{}", answer.text());
}
