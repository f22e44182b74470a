//! A prompt on one of our engines and its output on another one: what becomes of the half that is not needed any more.

use std::time::Duration;

use crate::kit::{Answer, Gateway};
use branchline_testkit::{Act, EngineSetup, FakeEngine, within};
use branchline_worker::proto::{self, FinishReason, SequenceDelta};

async fn engine(role: &str) -> FakeEngine {
    let mut setup = EngineSetup::default();
    setup.info.role = role.into();
    FakeEngine::start(setup).await.expect("a free port")
}

/// A prefill engine, a decode engine and a gateway that splits everything and tries once.
async fn pair() -> (FakeEngine, FakeEngine, Gateway) {
    let (prefill, decode) = (engine("prefill").await, engine("decode").await);
    let given = [("pd_bypass_tokens", "0"), ("max_retries", "0"), ("suspect_after", "off")];
    let gateway = Gateway::start(&given, &[prefill.url(), decode.url()]).await;
    (prefill, decode, gateway)
}

fn computed() -> Vec<Act> {
    vec![Act::finish(0, FinishReason::Length, 0)]
}

fn output() -> Vec<Act> {
    vec![
        Act::Wait(Duration::from_millis(100)),
        Act::tokens(&[65], "A"),
        Act::finish(0, FinishReason::Stop, 1),
    ]
}

async fn ask(gateway: &Gateway) -> Answer {
    let body = r#"{"rid":"x","prompt":"a prompt of some words","max_tokens":4}"#;
    let answer = gateway.post("/v1/completions", body).await;
    within("an end", async {
        while !gateway.app.rooms.is_empty() || gateway.load() > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    answer
}

fn aborted(engine: &FakeEngine) -> Vec<String> {
    engine.aborts().into_iter().map(|abort| abort.request_id).collect()
}

#[tokio::test]
async fn a_pair_that_ends_well_aborts_nothing() {
    let (prefill, decode, gateway) = pair().await;
    prefill.script(|_| computed());
    decode.script(|_| output());
    let answer = ask(&gateway).await;
    assert_eq!((answer.status, answer.json()["choices"][0]["text"].as_str()), (200, Some("A")), "{answer:?}");
    assert_eq!(prefill.submits().len(), 1, "it was split");
    for engine in [&prefill, &decode] {
        assert_eq!((aborted(engine), engine.cancels()), (vec![], vec![]));
    }
}

#[tokio::test]
async fn a_prompt_that_still_computes_is_called_off_when_the_output_has_ended() {
    let (prefill, decode, gateway) = pair().await;
    prefill.script(|_| Vec::new());
    decode.script(|_| output());
    assert_eq!(ask(&gateway).await.status, 200);
    within("a cancel", prefill.wait_until(|prefill| prefill.cancels().len() == 1)).await;
    within("an abort", prefill.wait_until(|prefill| aborted(prefill) == ["x/p"])).await;
    assert_eq!(aborted(&decode), Vec::<String>::new());
}

#[tokio::test]
async fn a_prompt_that_waits_for_a_half_that_failed_is_given_up_at_once() {
    let (prefill, decode, gateway) = pair().await;
    prefill.script(|_| computed());
    decode.script(|_| {
        let error = proto::Error {
            code: proto::ErrorCode::Unavailable.into(),
            message: "no room".into(),
            ..Default::default()
        };
        let refusal = Act::send(SequenceDelta { error: Some(error), ..Default::default() });
        vec![Act::Wait(Duration::from_millis(100)), refusal]
    });
    assert_eq!(ask(&gateway).await.status, 503);
    within("an abort", prefill.wait_until(|prefill| aborted(prefill) == ["x/p"])).await;
    assert_eq!(prefill.cancels(), Vec::<u64>::new(), "it had ended");
}

#[tokio::test]
async fn a_client_that_leaves_gives_up_both_halves() {
    let (prefill, decode, gateway) = pair().await;
    prefill.script(|_| computed());
    decode.script(|_| Vec::new());
    let body = r#"{"rid":"x","prompt":"a prompt of some words","max_tokens":4}"#;
    let client = gateway.send("POST", "/v1/completions", &[], body).await;
    within("both halves", async {
        while gateway.app.rooms.is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        decode.wait_until(|decode| decode.submits().len() == 1).await;
    })
    .await;
    drop(client);
    within("an abort", prefill.wait_until(|prefill| aborted(prefill) == ["x/p"])).await;
    within("a cancel", decode.wait_until(|decode| decode.cancels().len() == 1)).await;
    assert!(gateway.app.rooms.is_empty());
}
