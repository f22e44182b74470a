//! Faults of engines behind the whole gateway: stuck ones are raced, failing ones shut out, full ones avoided.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::kit::Gateway;
use branchline_testkit::{Act, EngineSetup, FakeEngine, within};
use branchline_worker::proto::{self, FinishReason, SequenceDelta};
use serde_json::json;

/// The whole answer: one token, one end.
fn fine(request: &proto::GenerateRequest) -> Vec<Act> {
    let prompt = proto::PromptReport { prompt_tokens: request.token_ids.len() as u32, cached_tokens: 0 };
    let delta = SequenceDelta {
        token_ids: vec![65],
        text: "fine".into(),
        prompt: Some(prompt),
        ..Default::default()
    };
    vec![Act::send(delta), Act::finish(0, FinishReason::Stop, 1)]
}

fn refusal(code: proto::ErrorCode, retry_after_ms: Option<u32>) -> Vec<Act> {
    let error =
        proto::Error { code: code.into(), message: "no".into(), retry_after_ms, ..Default::default() };
    vec![Act::send(SequenceDelta { error: Some(error), ..Default::default() })]
}

async fn engine() -> FakeEngine {
    FakeEngine::start(EngineSetup::default()).await.expect("a free port")
}

async fn two(given: &[(&str, &str)]) -> (FakeEngine, FakeEngine, Gateway) {
    let (first, second) = (engine().await, engine().await);
    second.script(fine);
    let gateway = Gateway::start(given, &[first.url(), second.url()]).await;
    (first, second, gateway)
}

fn body(number: usize) -> String {
    json!({"prompt": format!("{number:04}").repeat(100), "max_tokens": 4}).to_string()
}

async fn ask(gateway: &Gateway, number: usize) -> (u16, String) {
    let answer = gateway.post("/v1/completions", &body(number)).await;
    (answer.status, answer.json()["choices"][0]["text"].as_str().unwrap_or_default().to_owned())
}

const FINE: &str = "fine";
const EVEN: (&str, &str) = ("policy", "round_robin");

#[tokio::test]
async fn a_stuck_engine_is_raced_and_then_left_alone() {
    let (first, _second, gateway) =
        two(&[EVEN, ("suspect_after", "100ms"), ("slow_start", "0"), ("max_retries", "1")]).await;
    let stuck = Arc::new(AtomicBool::new(false));
    let now = Arc::clone(&stuck);
    first.script(move |request| match now.load(Ordering::SeqCst) {
        true => Vec::new(),
        false => fine(request),
    });
    for number in 0..8 {
        assert_eq!(ask(&gateway, number).await, (200, FINE.to_owned()));
    }
    stuck.store(true, Ordering::SeqCst);
    let calls = (8..16).map(|number| {
        let gateway = &gateway;
        async move {
            tokio::time::sleep(Duration::from_millis(30 * number as u64)).await;
            ask(gateway, number).await
        }
    });
    for answer in futures_util::future::join_all(calls).await {
        assert_eq!(answer, (200, FINE.to_owned()));
    }
    let info = gateway.get("/workers").await.json();
    assert_eq!(info["workers"][0]["health"], "suspected", "{info}");
    let before = first.submits().len();
    for number in 20..26 {
        assert_eq!(ask(&gateway, number).await, (200, FINE.to_owned()));
    }
    assert_eq!(first.submits().len(), before);
    // Whoever lost the race is told to stop.
    within("cancels", first.wait_until(|engine| !engine.cancels().is_empty())).await;
    assert_eq!(gateway.load(), 0);
}

#[tokio::test]
async fn an_engine_that_fails_each_request_is_shut_out_after_five() {
    let (first, second, gateway) = two(&[EVEN, ("outlier_share", "0")]).await;
    first.script(|_| refusal(proto::ErrorCode::Internal, None));
    let mut failed = 0;
    for number in 0..30 {
        failed += usize::from(ask(&gateway, number).await.0 == 500);
    }
    assert_eq!((failed, first.submits().len(), second.submits().len()), (5, 5, 25));
    assert_eq!(gateway.get("/workers").await.json()["workers"][0]["breaker"], "open");
}

/// The nth request fails inside the engine if `fails(n)`; all others are answered.
fn now_and_then(engine: &FakeEngine, fails: impl Fn(usize) -> bool + Send + Sync + 'static) {
    let count = AtomicUsize::new(0);
    engine.script(move |request| match fails(count.fetch_add(1, Ordering::SeqCst)) {
        true => refusal(proto::ErrorCode::Internal, None),
        false => fine(request),
    });
}

#[tokio::test]
async fn an_engines_good_answers_count_between_its_failures_and_close_its_breaker() {
    let engine = engine().await;
    let given = [("outlier_share", "0"), ("breaker_share", "1"), ("breaker_open", "200ms")];
    now_and_then(&engine, |number| number != 4 && number < 14);
    let gateway = Gateway::start(&given, &[engine.url()]).await;
    let worker = Arc::clone(&gateway.app.fleet.workers()[0]);
    let stream = r#"{"prompt":"x","max_tokens":4,"stream":true}"#;
    for number in 0..9 {
        let good = gateway.post("/v1/completions", stream).await.text().contains("[DONE]");
        assert_eq!((good, worker.breaker().name()), (number == 4, "closed"), "{number}");
    }
    assert_eq!((ask(&gateway, 9).await.0, worker.breaker().name()), (500, "open"));
    now_and_then(&engine, |_| false);
    within("its probe", async {
        while worker.breaker().name() != "half_open" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    for phase in ["half_open", "closed"] {
        assert_eq!(ask(&gateway, 10).await, (200, FINE.to_owned()));
        assert_eq!(worker.breaker().name(), phase);
    }
}

#[tokio::test]
async fn silence_and_nonsense_of_an_engine_are_failures_of_its_own() {
    let unusable = |_: &proto::GenerateRequest| {
        let finish = proto::Finish { reason: 99, ..Default::default() };
        vec![Act::send(SequenceDelta { finish: Some(finish), ..Default::default() })]
    };
    for silent in [true, false] {
        let engine = engine().await;
        match silent {
            true => engine.script(|_| Vec::new()),
            false => engine.script(unusable),
        }
        let given = [("outlier_share", "0"), ("first_token_timeout", "50ms"), ("suspect_after", "off")];
        let gateway = Gateway::start(&given, &[engine.url()]).await;
        for number in 0..5 {
            assert!(ask(&gateway, number).await.0 >= 500);
        }
        assert_eq!(gateway.app.fleet.workers()[0].breaker().name(), "open", "silent: {silent}");
    }
}

#[tokio::test]
async fn refusals_of_bad_requests_never_count_and_full_queues_rest() {
    let (first, second, gateway) = two(&[EVEN]).await;
    first.script(|_| refusal(proto::ErrorCode::InvalidArgument, None));
    for number in 0..20 {
        assert!(matches!(ask(&gateway, number).await.0, 200 | 400));
    }
    assert_eq!(first.submits().len(), 10);
    assert_eq!(gateway.get("/workers").await.json()["workers"][0]["breaker"], "closed");
    first.script(|_| refusal(proto::ErrorCode::ResourceExhausted, Some(5000)));
    let (before, served) = (first.submits().len(), second.submits().len());
    for number in 0..10 {
        assert_eq!(ask(&gateway, number).await, (200, FINE.to_owned()));
    }
    assert_eq!((first.submits().len() - before, second.submits().len() - served), (1, 10));
    assert_eq!(gateway.get("/workers").await.json()["workers"][0]["health"], "resting");
}

#[tokio::test]
async fn an_engine_that_comes_back_has_a_clean_record() {
    let (first, _second, gateway) = two(&[EVEN, ("outlier_share", "0"), ("slow_start", "0")]).await;
    first.script(|_| refusal(proto::ErrorCode::Internal, None));
    for number in 0..12 {
        ask(&gateway, number).await;
    }
    let worker = Arc::clone(&gateway.app.fleet.workers()[0]);
    assert_eq!(worker.breaker().name(), "open");
    first.kill();
    within("its death", gateway.app.fleet.wait_until(|_| !worker.is_ready())).await;
    first.script(fine);
    first.restart().await.expect("its port");
    within("its return", gateway.app.fleet.wait_until(|_| worker.is_ready())).await;
    assert_eq!(worker.breaker().name(), "closed");
    let before = first.submits().len();
    for number in 0..4 {
        assert_eq!(ask(&gateway, number).await, (200, FINE.to_owned()));
    }
    assert!(first.submits().len() > before);
}

#[tokio::test]
async fn the_time_left_reaches_the_engine_as_its_deadline() {
    let engine = engine().await;
    engine.script(fine);
    let gateway = Gateway::start(&[("request_timeout", "7s")], &[engine.url()]).await;
    ask(&gateway, 1).await;
    let request = engine.submits()[0].request.clone().expect("a request");
    let left = request.deadline_ms.expect("a deadline");
    assert!((1..=7000).contains(&left), "{left}");
}

#[tokio::test]
async fn a_choice_for_an_engine_is_explained_by_its_rid_and_its_header() {
    let engine = engine().await;
    engine.script(fine);
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let headers = [("x-branchline-explain", "true"), ("x-request-id", "h-1")];
    let answer = gateway
        .call("POST", "/generate", &headers, &json!({"text": "Hello", "rid": "r-1"}).to_string())
        .await;
    assert_eq!(answer.header("x-request-id"), Some("h-1"), "{}", answer.text());
    assert!(answer.header("x-branchline-explain").is_some_and(|told| told.contains("only worker")));
    let (by_rid, by_header) =
        (gateway.get("/explain/r-1").await.json(), gateway.get("/explain/h-1").await.json());
    assert_eq!(by_rid["choices"], by_header["choices"]);
    assert_eq!(by_rid["choices"][0]["candidates"][0]["uncached_tokens"], 5);
}

#[tokio::test]
async fn what_was_predicted_is_compared_with_what_was_found() {
    let engine = engine().await;
    engine.script(|request| {
        let mut acts = fine(request);
        let report = proto::PromptReport { prompt_tokens: 9, cached_tokens: 7 };
        acts[0] = Act::send(SequenceDelta {
            token_ids: vec![65],
            text: FINE.into(),
            prompt: Some(report),
            ..Default::default()
        });
        acts
    });
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    ask(&gateway, 1).await;
    let metrics = gateway.get("/metrics").await.text();
    assert!(metrics.contains("branchline_router_prediction_error_tokens_total 7"), "{metrics}");
}

#[tokio::test]
async fn what_outlives_the_drain_ends_in_one_error_event_or_in_503() {
    let worker = engine().await;
    worker.script(|request| fine(request).into_iter().take(1).collect());
    let gateway = Gateway::start(&[("drain_timeout", "50ms")], &[worker.url()]).await;
    let mut stream =
        gateway.send("POST", "/v1/completions", &[], r#"{"prompt":"x","max_tokens":4,"stream":true}"#).await;
    stream.read_until(FINE).await;
    let mut whole = gateway.send("POST", "/v1/completions", &[], r#"{"prompt":"y","max_tokens":4}"#).await;
    within("the second request's arrival", async {
        while worker.submits().len() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    gateway.stop().await;
    let (stream, whole) = (stream.answer().await, whole.answer().await);
    assert!(stream.complete, "the stream was cut");
    let text = stream.text();
    assert_eq!(text.matches("\"error\"").count(), 1, "{text}");
    assert!(text.trim_end().ends_with('}') && text.contains("drain timeout"), "{text}");
    assert_eq!(whole.status, 503);
    assert!(whole.text().contains("drain timeout"), "{}", whole.text());
}

/// Waits until those engines can be chosen, and no other.
async fn ready(gateway: &Gateway, engines: &[&FakeEngine]) {
    let mut wanted: Vec<String> = engines.iter().map(|engine| engine.url()).collect();
    wanted.sort_unstable();
    let told = gateway.app.fleet.wait_until(move |fleet| {
        let workers = fleet.workers();
        let mut ready: Vec<String> =
            workers.iter().filter(|worker| worker.is_ready()).map(|worker| worker.url.to_string()).collect();
        ready.sort_unstable();
        ready == wanted
    });
    within("the engines' word", told).await;
}

#[tokio::test]
async fn an_engine_that_says_it_cannot_serve_gets_nothing_new_and_keeps_what_it_has() {
    let (ill, well, gateway) = two(&[EVEN, ("slow_start", "0")]).await;
    well.can_serve(false).await;
    ready(&gateway, &[&ill]).await;
    let streamed = json!({"prompt": [1, 2, 3], "max_tokens": 4, "stream": true}).to_string();
    let mut kept = gateway.send("POST", "/v1/completions", &[], &streamed).await;
    within("its request", ill.wait_until(|engine| engine.submits().len() == 1)).await;
    let handle = ill.submits()[0].handle;
    let news =
        |text: &str| SequenceDelta { handle, token_ids: vec![65], text: text.into(), ..Default::default() };
    ill.emit(vec![news("begun")]);
    kept.read_until("begun").await;
    well.can_serve(true).await;
    ill.can_serve(false).await;
    ready(&gateway, &[&well]).await;
    for number in 0..6 {
        assert_eq!(ask(&gateway, number).await, (200, FINE.into()));
    }
    assert_eq!(ill.submits().len(), 1, "nothing new");
    let end = proto::Finish { reason: FinishReason::Stop.into(), completion_tokens: 2, ..Default::default() };
    ill.emit(vec![SequenceDelta { finish: Some(end), ..news("done") }]);
    let answer = kept.answer().await.text();
    assert!(answer.contains("done") && answer.contains("[DONE]"), "{answer}");
    ill.script(fine);
    ill.can_serve(true).await;
    ready(&gateway, &[&ill, &well]).await;
    within("its turn", async {
        let mut number = 10;
        while ill.submits().len() == 1 {
            assert_eq!(ask(&gateway, number).await.0, 200);
            number += 1;
        }
    })
    .await;
    ill.can_serve(false).await;
    well.can_serve(false).await;
    ready(&gateway, &[]).await;
    assert_eq!(ask(&gateway, 99).await.0, 503);
}
