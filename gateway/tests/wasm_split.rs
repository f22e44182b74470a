//! on-route before fleets of prefill and decode workers: modules choose who decodes, and the prompt is still split off.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_testkit::{Act, EngineSetup, FakeEngine, ScriptedWorker, Step, response, within};
use branchline_worker::proto::FinishReason;
use serde_json::{Value, json};

use crate::guests;
use crate::kit::Gateway;

const PROMPT: &str = "a prompt of many words, for what is short is not worth two workers";

/// A gateway before these workers, with a module that picks the second of those it is shown.
async fn picking(workers: &[Value]) -> Gateway {
    let gateway = Gateway::start_cold(&[("pd_bypass_tokens", "0")], &[]).await;
    for spec in workers {
        let spec = serde_json::from_value(spec.clone()).expect("a specification");
        gateway.app.fleet.register(spec).expect("a good specification");
    }
    let all = |fleet: &branchline_worker::Fleet| fleet.workers().iter().all(|worker| worker.is_ready());
    within("readiness", gateway.app.fleet.wait_until(all)).await;
    let module = json!({"name": "canary", "module": STANDARD.encode(guests::picks(1))}).to_string();
    let answer = gateway.post("/wasm", &module).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    gateway
}

async fn engine(role: &str) -> FakeEngine {
    let mut setup = EngineSetup::default();
    setup.info.role = role.to_owned();
    let engine = FakeEngine::start(setup).await.expect("a free port");
    engine.script(|_| vec![Act::tokens(&[65], "A"), Act::finish(0, FinishReason::Stop, 1)]);
    engine
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_a_module_picks_decodes_what_another_one_prefills() {
    let (prefill, one, other) = (engine("prefill").await, engine("decode").await, engine("decode").await);
    let specs = [&prefill, &one, &other].map(|engine| json!({"url": engine.url()}));
    let gateway = picking(&specs).await;
    let body = json!({"model": "fake", "prompt": PROMPT}).to_string();
    for asked in 1..=4 {
        let answer = gateway.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        // Both halves are sent at once; the answer may be there before the other one is seen.
        prefill.wait_until(|engine| engine.submits().len() == asked).await;
        assert_eq!([&one, &other].map(|engine| engine.submits().len()), [0, asked]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http_worker_that_a_module_picks_decodes_what_another_one_prefills() {
    let answering = |text: &'static str| async move {
        let kind = [("content-type", "application/json")];
        ScriptedWorker::start(move |_| vec![Step::Send(response(200, &kind, text.as_bytes()))])
            .await
            .expect("a free port")
    };
    let prefill = answering(r#"{"kv_transfer_params": {"remote_engine_id": "e"}}"#).await;
    let (one, other) = (answering("\"one\"").await, answering("\"other\"").await);
    let spec = |worker: &ScriptedWorker, role: &str| json!({"url": worker.url(), "worker_type": role, "runtime_type": "vllm", "model_id": "m"});
    let gateway = picking(&[spec(&prefill, "prefill"), spec(&one, "decode"), spec(&other, "decode")]).await;
    let body = json!({"model": "m", "prompt": PROMPT}).to_string();
    for asked in 1..=4 {
        assert_eq!(gateway.post("/v1/completions", &body).await.text(), "\"other\"");
        assert_eq!([&prefill, &one, &other].map(|worker| worker.record().seen.len()), [asked, 0, asked]);
    }
}
