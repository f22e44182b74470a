//! How long a client wants its answer (`x-branchline-deadline-ms`): in every API family, streamed or not, by engines and
//! by HTTP workers.

use std::time::Duration;

use crate::kit::{Answer, Gateway};
use branchline_testkit::{Act, EngineSetup, FakeEngine, ScriptedWorker, Step, chunk, event_stream};
use serde_json::{Value, json};

/// Families: path, a request, and how the family names the code of an error.
fn families() -> Vec<(&'static str, Value)> {
    let message = json!([{"role": "user", "content": "x"}]);
    vec![
        ("/v1/completions", json!({"model": "fake", "prompt": "x", "max_tokens": 9})),
        ("/v1/chat/completions", json!({"model": "fake", "messages": message, "max_tokens": 9})),
        ("/generate", json!({"text": "x", "sampling_params": {"max_new_tokens": 9}})),
        ("/v1/messages", json!({"model": "fake", "messages": message, "max_tokens": 9})),
        ("/v1/responses", json!({"model": "fake", "input": "x", "max_output_tokens": 9})),
    ]
}

async fn ask(gateway: &Gateway, path: &str, body: &Value, ms: u64) -> Answer {
    let ms = ms.to_string();
    gateway.call("POST", path, &[("x-branchline-deadline-ms", &ms)], &body.to_string()).await
}

/// The answer of a stream that had begun when its time was over, however slow the machine is.
async fn begun(gateway: &Gateway, path: &str, body: &Value) -> Answer {
    for ms in [500, 2_000, 7_000] {
        let answer = ask(gateway, path, body, ms).await;
        if answer.status == 200 {
            return answer;
        }
        assert_eq!(answer.status, 504, "{path}: {}", answer.text());
    }
    panic!("{path}: no stream begins within its time");
}

fn tells_failure(path: &str, answer: &Answer) {
    let text = answer.text();
    let event = match path {
        "/v1/messages" => "event: error\n",
        "/v1/responses" => "event: response.failed\n",
        _ => "data: {\"error\":",
    };
    assert!(text.contains(event), "{path}: {text}");
    for end in ["[DONE]", "message_stop", "response.completed", "\"finish_reason\":\"stop\""] {
        assert!(!text.contains(end), "{path} looks complete: {text}");
    }
}

#[tokio::test]
async fn an_engines_answer_ends_with_its_time_in_the_words_of_each_family() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    engine.script(|_| vec![Act::tokens(&[65], "A"), Act::Wait(Duration::from_secs(600))]);
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    for (path, mut body) in families() {
        let late = ask(&gateway, path, &body, 100).await;
        assert_eq!(late.status, 504, "{path}: {}", late.text());
        assert!(late.text().contains("deadline"), "{path}: {}", late.text());
        body["stream"] = json!(true);
        tells_failure(path, &begun(&gateway, path, &body).await);
    }
    let asked = engine.submits().len();
    engine.wait_until(|engine| engine.cancels().len() == asked).await;
    assert_eq!(gateway.load(), 0, "the engine was told each time");
}

#[tokio::test]
async fn an_http_workers_answer_ends_with_its_time_in_the_words_of_each_family() {
    let worker = ScriptedWorker::start(|seen| match seen.header("x-silent") {
        Some(_) => vec![Step::Hold],
        None => vec![event_stream(), chunk(b"data: {\"text\":\"A\"}\n\n"), Step::Hold],
    })
    .await
    .expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    for (path, mut body) in families() {
        body["model"] = json!("m");
        let headers = [("x-branchline-deadline-ms", "100"), ("x-silent", "1")];
        let late = gateway.call("POST", path, &headers, &body.to_string()).await;
        assert_eq!(late.status, 504, "{path}: {}", late.text());
        body["stream"] = json!(true);
        tells_failure(path, &begun(&gateway, path, &body).await);
    }
    assert_eq!(gateway.load(), 0);
}
