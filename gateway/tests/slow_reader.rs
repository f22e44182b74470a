//! The case stream-slow-reader: memory stays bounded and only the slow reader pays. One test at a time: they measure
//! the resident memory of this process, in which gateway, worker and clients all run.

use std::time::{Duration, Instant};

use crate::kit::{Client, Gateway};
use branchline_testkit::{EngineSetup, FakeEngine, ScriptedWorker, Step, event_stream, within};
use branchline_worker::proto::{Finish, FinishReason, SequenceDelta};
use serde_json::json;
use tokio::sync::Mutex;

static ALONE: Mutex<()> = Mutex::const_new(());

const STREAMS: usize = 10;
const MIB: usize = 1 << 20;

/// Resident memory in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").expect("a Linux system");
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).expect("a resident size");
    line.split_whitespace().nth(1).and_then(|size| size.parse::<usize>().ok()).expect("a number") * 1024
}

fn growth(before: usize) -> usize {
    resident().saturating_sub(before)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_slow_reader_of_an_http_worker_holds_it_back_in_bounded_memory() {
    let _alone = ALONE.lock().await;
    let event = format!("data: {}\n\n", "x".repeat(16 * 1024));
    let piece = format!("{:x}\r\n{event}\r\n", event.len()).into_bytes();

    let worker = ScriptedWorker::start(move |_| vec![event_stream(), Step::Flood(piece.clone())])
        .await
        .expect("a port");
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let before = resident();
    let mut clients = Vec::new();
    for _ in 0..STREAMS {
        let mut client =
            gateway.send("POST", "/v1/completions", &[], r#"{"prompt":"x","stream":true}"#).await;
        client.read_until("data: x").await;
        clients.push(client);
    }
    let taken = worker.wait_for_still(Duration::from_millis(300)).await;
    assert!(taken <= STREAMS * 32 * MIB, "{taken} bytes taken from the worker");
    assert!(growth(before) <= 64 * MIB, "{} bytes more", growth(before));
    // Its neighbour is served meanwhile.
    worker.on("/v1/embeddings", vec![Step::Send(branchline_testkit::response(200, &[], b"fine"))]);
    assert_eq!(gateway.post("/v1/embeddings", "{}").await.text(), "fine");
    let left = Instant::now();
    drop(clients);
    worker.wait_for(|record| record.left == STREAMS).await.expect("the worker's connections are closed");
    assert!(left.elapsed() < Duration::from_secs(1), "{:?}", left.elapsed());
    assert_eq!(gateway.load(), 0);
}

async fn open(gateway: &Gateway, engine: &FakeEngine, rid: &str) -> (Client, u64) {
    let before = engine.submits().len();
    let body = json!({"prompt": "x", "rid": rid, "stream": true, "max_tokens": 1000}).to_string();
    let client = gateway.send("POST", "/v1/completions", &[], &body).await;
    within("the request", engine.wait_until(|engine| engine.submits().len() == before + 1)).await;
    (client, engine.submits()[before].handle)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_slow_reader_of_an_engine_is_cut_off_alone_in_bounded_memory() {
    let _alone = ALONE.lock().await;
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let (mut fast, reader) = open(&gateway, &engine, "fast").await;
    let before = resident();
    let mut slow = Vec::new();
    for number in 0..STREAMS {
        slow.push(open(&gateway, &engine, &format!("slow-{number}")).await);
    }
    // The fast reader is the clock: the engine does not run ahead of it. 20 MiB go to each slow one.
    let large = "x".repeat(128 * 1024);
    let news = |handle, text: &str| SequenceDelta {
        handle,
        token_ids: vec![65],
        text: text.into(),
        ..Default::default()
    };
    for step in 0..160 {
        let mark = format!("<{step}>");
        let deltas = slow.iter().map(|(_, handle)| news(*handle, &large)).chain([news(reader, &mark)]);
        engine.emit(deltas.collect());
        fast.read_until(&mark).await;
        assert!(growth(before) <= 64 * MIB, "{} bytes more at step {step}", growth(before));
    }
    let finish = Finish { reason: FinishReason::Stop.into(), completion_tokens: 160, ..Default::default() };
    engine.emit(vec![SequenceDelta { handle: reader, finish: Some(finish), ..Default::default() }]);
    assert!(fast.answer().await.text().ends_with("data: [DONE]\n\n"), "the fast reader gets all of it");
    within("a cancel each", engine.wait_until(|engine| engine.cancels().len() == STREAMS)).await;
    for (mut client, _) in slow {
        let text = client.answer().await.text();
        assert!(
            text.contains("resource_exhausted") && !text.contains("[DONE]"),
            "{}",
            &text[text.len() - 300..]
        );
    }
    assert_eq!(gateway.load(), 0);
}
