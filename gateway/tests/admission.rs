//! Cases of the area admission: a place is held to the last byte, a queue is bounded, a push-back is soon forgotten.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::kit::Gateway;
use branchline_testkit::{
    EngineSetup, FakeEngine, ScriptedWorker, Step, chunk, event_stream, last_chunk, response, within,
};
use tokio::sync::watch;

const BODY: &str = r#"{"model":"m","prompt":"x","stream":true}"#;

/// A worker whose streams stay open until it is told to end them.
async fn open_streams() -> (ScriptedWorker, watch::Sender<bool>) {
    let (end, ended) = watch::channel(false);
    let worker = ScriptedWorker::start(move |_| {
        let over = *ended.borrow();
        let mut steps = vec![event_stream(), chunk(b"data: 1\n\n")];
        if !over {
            steps.push(Step::Hold);
        }
        steps.extend([chunk(b"data: [DONE]\n\n"), last_chunk()]);
        steps
    })
    .await
    .expect("a free port");
    (worker, end)
}

#[tokio::test]
async fn admission_limit_is_a_limit_and_not_a_rate() {
    let (worker, end) = open_streams().await;
    let given = [("max_concurrent_requests", "1"), ("queue_size", "0")];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let mut first = gateway.send("POST", "/v1/completions", &[], BODY).await;
    first.read_until("data: 1").await;
    for _ in 0..3 {
        let refused = gateway.post("/v1/completions", BODY).await;
        assert_eq!(
            (refused.status, refused.json()["error"]["code"].as_str()),
            (429, Some("resource_exhausted"))
        );
        let wait: u64 = refused.header("retry-after").and_then(|text| text.parse().ok()).expect("a wait");
        assert!(wait >= 1);
    }
    assert_eq!(worker.record().seen.len(), 1, "the headers gave no place back");
    assert_eq!(gateway.get("/v1/models").await.status, 200, "only work for models is counted");
    end.send_replace(true);
    drop(first);
    worker.wait_for(|record| record.left == 1).await.expect("its stream is closed");
    let again = async {
        while gateway.post("/v1/completions", BODY).await.status != 200 {
            tokio::task::yield_now().await;
        }
    };
    within("its place", again).await;
    assert_eq!(gateway.load(), 0);
}

#[tokio::test]
async fn admission_timed_out_waiter_leaves_his_place_in_the_queue() {
    let (worker, _end) = open_streams().await;
    let given = [("max_concurrent_requests", "1"), ("queue_size", "1"), ("queue_timeout", "300ms")];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let mut first = gateway.send("POST", "/v1/completions", &[], BODY).await;
    first.read_until("data: 1").await;
    for _ in 0..2 {
        let started = Instant::now();
        let mut waiter = gateway.send("POST", "/v1/completions", &[], BODY).await;
        // One of two is refused at once: whichever came second.
        let other = gateway.post("/v1/completions", BODY).await;
        let waited = waiter.answer().await;
        assert_eq!((waited.status, other.status), (429, 429));
        assert!(started.elapsed() >= Duration::from_millis(300), "one of them waited");
        let texts = [waited.text(), other.text()];
        assert!(texts.iter().any(|text| text.contains("queue-timeout")), "{texts:?}");
        assert!(texts.iter().any(|text| text.contains("wait for one")), "{texts:?}");
    }
    assert_eq!(worker.record().seen.len(), 1);
}

#[tokio::test]
async fn a_client_that_leaves_the_queue_never_reaches_a_worker() {
    let (worker, _end) = open_streams().await;
    let given = [("max_concurrent_requests", "1"), ("queue_size", "1")];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let mut first = gateway.send("POST", "/v1/completions", &[], BODY).await;
    first.read_until("data: 1").await;
    let waiter = gateway.send("POST", "/v1/completions", &[], BODY).await;
    let full = async { while gateway.post("/v1/completions", BODY).await.status != 429 {} };
    within("a full queue", full).await;
    drop(waiter);
    let mut next = gateway.send("POST", "/v1/completions", &[], BODY).await;
    drop(first);
    next.read_until("data: 1").await;
    assert_eq!(worker.record().seen.len(), 2);
}

#[tokio::test]
async fn admission_overload_mark_expires_by_itself() {
    let busy = Arc::new(AtomicBool::new(true));
    let now = Arc::clone(&busy);
    let worker = ScriptedWorker::start(move |_| match now.load(Ordering::SeqCst) {
        true => vec![Step::Send(response(503, &[], b"busy"))],
        false => vec![Step::Send(response(200, &[], b"fine"))],
    })
    .await
    .expect("a free port");
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 503);
    busy.store(false, Ordering::SeqCst);
    let started = Instant::now();
    let again = async {
        while gateway.post("/v1/completions", BODY).await.status != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within("another try", again).await;
    assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
    for _ in 0..10 {
        assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200);
    }
}

#[tokio::test]
async fn work_in_the_background_holds_its_place_until_it_ends() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let given = [("max_concurrent_requests", "1"), ("queue_size", "0")];
    let gateway = Gateway::start(&given, &[engine.url()]).await;
    let body = r#"{"input": "Hi", "background": true}"#;
    let started = gateway.post("/v1/responses", body).await;
    assert_eq!(started.status, 200, "{}", started.text());
    within("the request", engine.wait_until(|engine| engine.submits().len() == 1)).await;
    assert_eq!(gateway.post("/v1/responses", body).await.status, 429);
    // What ends work needs no place.
    let path = format!("/v1/responses/{}/cancel", started.json()["id"].as_str().expect("an id"));
    assert_eq!(gateway.post(&path, "").await.status, 200);
    within("its cancel", engine.wait_until(|engine| engine.cancels().len() == 1)).await;
    within("its place", async {
        while gateway.post("/v1/responses", body).await.status != 200 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
}
