//! Adapters before scripted engines: requests go to who holds them, lists follow what others load, changes reach all.

use std::time::Duration;

use crate::kit::Gateway;
use branchline_testkit::{Act, EngineSetup, FakeEngine, within};
use branchline_worker::proto::{CacheNamespace, FinishReason, GenerateRequest};
use serde_json::{Value, json};

async fn engines(count: usize) -> (Vec<FakeEngine>, Gateway) {
    let mut all = Vec::new();
    for _ in 0..count {
        let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
        engine.script(|_| vec![Act::tokens(&[65], "A"), Act::finish(0, FinishReason::Stop, 1)]);
        all.push(engine);
    }
    let urls: Vec<_> = all.iter().map(FakeEngine::url).collect();
    let gateway = Gateway::start(&[], &urls).await;
    (all, gateway)
}

async fn ask(gateway: &Gateway, model: &str) -> (u16, Value) {
    let answer = gateway.post("/v1/completions", &json!({"model": model, "prompt": "x"}).to_string()).await;
    (answer.status, answer.json())
}

fn requests(engine: &FakeEngine) -> Vec<GenerateRequest> {
    engine.submits().into_iter().filter_map(|submit| submit.request).collect()
}

async fn listed(gateway: &Gateway) -> Vec<(String, Value)> {
    let models = gateway.get("/v1/models").await.json();
    let models = models["data"].as_array().cloned().unwrap_or_default();
    models
        .iter()
        .map(|one| (one["id"].as_str().unwrap_or_default().to_owned(), one["parent"].clone()))
        .collect()
}

/// Waits until the gateway lists an adapter that it did not load itself.
async fn until_listed(gateway: &Gateway, name: &str) {
    within("the adapter to be listed", async {
        while !listed(gateway).await.iter().any(|(own, _)| own == name) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_request_goes_to_the_engine_that_holds_its_adapter_bound_to_its_digest() {
    let (engines, gateway) = engines(3).await;
    engines[1].hold_adapter("sql", "d1");
    until_listed(&gateway, "fake:sql").await;
    for _ in 0..6 {
        let (status, body) = ask(&gateway, "fake:sql").await;
        assert_eq!((status, &body["model"]), (200, &json!("fake:sql")), "{body}");
    }
    let counts: Vec<_> = engines.iter().map(|engine| requests(engine).len()).collect();
    assert_eq!(counts, [0, 6, 0]);
    let wanted = CacheNamespace {
        adapter: Some("sql".into()),
        adapter_digest: Some("d1".into()),
        ..Default::default()
    };
    assert!(requests(&engines[1]).iter().all(|request| request.cache_namespace.as_ref() == Some(&wanted)));
    ask(&gateway, "fake").await;
    let all = engines.iter().flat_map(requests);
    let plain: Vec<_> = all.filter(|request| request.cache_namespace.is_none()).collect();
    assert_eq!(plain.len(), 1, "a request for the base model names no adapter");
}

#[tokio::test]
async fn one_name_for_several_weights_means_those_of_most_engines() {
    let (engines, gateway) = engines(3).await;
    for (engine, digest) in engines.iter().zip(["old", "new", "new"]) {
        engine.hold_adapter("sql", digest);
    }
    // The last one's list is read when its own load says so.
    engines[2].hold_adapter("mark", "m");
    until_listed(&gateway, "fake:mark").await;
    within("both new ones to be known", async {
        loop {
            ask(&gateway, "fake:sql").await;
            let last =
                engines.iter().flat_map(requests).filter_map(|one| one.cache_namespace?.adapter_digest);
            if last.collect::<Vec<_>>().iter().any(|digest| digest == "new") {
                break;
            }
        }
    })
    .await;
    let before = requests(&engines[0]).len();
    for _ in 0..4 {
        assert_eq!(ask(&gateway, "fake:sql").await.0, 200);
    }
    assert_eq!(requests(&engines[0]).len(), before, "other weights under the same name are not used");
}

#[tokio::test]
async fn an_unknown_adapter_is_not_found_and_told_what_there_is() {
    let (engines, gateway) = engines(1).await;
    let (status, body) = ask(&gateway, "fake:sql").await;
    assert_eq!((status, &body["error"]["param"]), (404, &json!("model")), "{body}");
    assert!(body["error"]["message"].as_str().unwrap_or_default().contains("it has none"), "{body}");
    engines[0].hold_adapter("law", "d");
    until_listed(&gateway, "fake:law").await;
    for name in ["fake:sql", "other:law", "fake:law:law"] {
        let (status, body) = ask(&gateway, name).await;
        assert_eq!(status, 404, "{body}");
        assert!(body["error"]["message"].as_str().unwrap_or_default().contains("fake:law"), "{body}");
    }
    let both = json!({"text": "x", "model": "fake:law", "lora_path": "law"}).to_string();
    assert_eq!(gateway.post("/generate", &both).await.json()["error"]["param"], "lora_path");
    assert_eq!(gateway.get("/v1/models/fake:law").await.json()["parent"], "fake");
    assert_eq!(gateway.get("/v1/models/fake:sql").await.status, 404);
}

#[tokio::test]
async fn a_change_reaches_every_engine_and_is_listed_at_once() {
    let (engines, gateway) = engines(2).await;
    let load = json!({"lora_name": "sql", "lora_path": "/adapters/sql"}).to_string();
    let told = gateway.post("/load_lora_adapter", &load).await.json();
    assert_eq!(told["loaded_adapters"], json!({"sql": "/adapters/sql"}), "{told}");
    assert_eq!(told["workers"].as_array().map(Vec::len), Some(2));
    assert_eq!(listed(&gateway).await, [("fake".into(), Value::Null), ("fake:sql".into(), json!("fake"))]);
    assert_eq!(ask(&gateway, "fake:sql").await.0, 200);
    let gone = gateway.post("/v1/unload_lora_adapter", r#"{"lora_name": "sql"}"#).await;
    assert_eq!(gone.text(), "Success: LoRA adapter 'sql' removed successfully.");
    assert_eq!(ask(&gateway, "fake:sql").await.0, 404);
    // Where an adapter is not, it need not be unloaded.
    engines[0].hold_adapter("half", "d");
    let unload = gateway.post("/unload_lora_adapter", r#"{"lora_name": "half"}"#).await;
    assert_eq!(unload.status, 200, "{}", unload.text());
    let unload = gateway.post("/unload_lora_adapter", r#"{"lora_name": "half"}"#).await;
    assert_eq!(unload.status, 404, "{}", unload.text());
    let missing = json!({"lora_name": "x", "lora_path": "missing"}).to_string();
    let refused = gateway.post("/v1/load_lora_adapter", &missing).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert!(refused.text().contains("there is no adapter_config.json"), "{}", refused.text());
}

#[tokio::test]
async fn changes_are_for_operators() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let keys = [("user_api_key", "client-secret"), ("admin_api_key", "admin-secret")];
    let gateway = Gateway::start(&keys, &[engine.url()]).await;
    let body = r#"{"lora_name": "sql", "lora_path": "/adapters/sql"}"#;
    for path in
        ["/load_lora_adapter", "/v1/load_lora_adapter", "/unload_lora_adapter", "/v1/unload_lora_adapter"]
    {
        for (key, status) in [("client-secret", 403), ("nobody", 401)] {
            let headers = [("authorization", format!("Bearer {key}"))];
            let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let answer = gateway.call("POST", path, &headers, body).await;
            assert_eq!(answer.status, status, "{path} {}", answer.text());
        }
    }
    let headers = [("authorization", "Bearer admin-secret")];
    let answer = gateway.call("POST", "/load_lora_adapter", &headers, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}
