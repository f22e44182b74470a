//! HTTP workers over real sockets: bytes, connections, health and model lists.
#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use branchline_core::ErrorCode;
use branchline_telemetry::Metrics;
use branchline_testkit::{ScriptedWorker, Step, chunk, event_stream, last_chunk, response, within};
use branchline_worker::{Fleet, FleetOptions, PolicyKind, RouteQuery, Transport, Worker};
use bytes::Bytes;
use http::Request;
use http_body_util::BodyExt;

fn options() -> FleetOptions {
    FleetOptions {
        health_interval: Duration::from_millis(100),
        health_retry: Duration::from_millis(20),
        ..Default::default()
    }
}

async fn scripted() -> ScriptedWorker {
    ScriptedWorker::start(|_| vec![Step::Send(response(404, &[], b"not found"))]).await.unwrap()
}

/// A chunked answer in one piece.
fn x() -> Vec<Step> {
    vec![event_stream(), chunk(b"x"), last_chunk()]
}

async fn one() -> (ScriptedWorker, Arc<Fleet>, Arc<Worker>) {
    let scripted = scripted().await;
    let fleet = Fleet::new(options(), Arc::new(Metrics::default()));
    let worker = fleet.add(&scripted.url()).unwrap();
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
    (scripted, fleet, worker)
}

fn post(path: &str, body: &'static str) -> Request<Bytes> {
    Request::post(path).header("x-custom", "kept").body(Bytes::from_static(body.as_bytes())).unwrap()
}

async fn exchange(worker: &Worker, path: &str) -> branchline_core::Result<Bytes> {
    let response = worker.http().unwrap().send(post(path, "{}")).await?;
    Ok(response.into_body().collect().await?.to_bytes())
}

#[tokio::test]
async fn a_request_and_its_answer_pass_untouched() {
    let (scripted, _fleet, worker) = one().await;
    let head = b"HTTP/1.1 200 OK\r\nX-Odd: a  b\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    let pieces = [chunk(b"data: a\n\n"), chunk(b"data: [D"), chunk(b"ONE]\n\n"), last_chunk()];
    scripted.on("/v1/completions", [Step::Send(head)].into_iter().chain(pieces).collect());
    let response = worker.http().unwrap().send(post("/v1/completions?x=1", r#"{"a": 1}"#)).await.unwrap();
    assert_eq!((response.status().as_u16(), response.headers()["x-odd"].as_bytes()), (200, &b"a  b"[..]));
    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "data: a\n\ndata: [DONE]\n\n");
    let record = scripted.record();
    let seen = record.requests("/v1/completions")[0];
    assert_eq!((seen.target.as_str(), &seen.body[..]), ("/v1/completions?x=1", &br#"{"a": 1}"#[..]));
    assert_eq!(
        (seen.header("x-custom"), seen.header("host")),
        (Some("kept"), scripted.url().strip_prefix("http://"))
    );
}

#[tokio::test]
async fn an_ended_answer_gives_its_connection_back() {
    let (scripted, _fleet, worker) = one().await;
    scripted.on("/a", x());
    exchange(&worker, "/a").await.unwrap();
    let before = scripted.record().open;
    for _ in 0..20 {
        exchange(&worker, "/a").await.unwrap();
    }
    let after = scripted.record().open;
    assert!(after <= before + 1, "{after} connections after {before}");
}

#[tokio::test]
async fn a_connection_that_was_closed_while_idle_is_replaced_once() {
    let (scripted, fleet, worker) = one().await;
    scripted.on("/a", x());
    exchange(&worker, "/a").await.unwrap();
    scripted.restart().await.unwrap();
    assert_eq!(exchange(&worker, "/a").await.unwrap(), "x");
    assert!(fleet.worker(worker.id).is_some());
}

#[tokio::test]
async fn dropping_the_answer_closes_the_connection_to_the_worker() {
    let (scripted, _fleet, worker) = one().await;
    scripted.on("/held", vec![event_stream(), chunk(b"data: 1\n\n"), Step::Hold]);
    let mut response = worker.http().unwrap().send(post("/held", "{}")).await.unwrap();
    response.frame().await.unwrap().unwrap();
    drop(response);
    scripted.wait_for(|record| record.left == 1).await.expect("the worker sees it");
    scripted.on("/silent", vec![Step::Hold]);
    let waiting = tokio::spawn({
        let worker = worker.clone();
        async move { exchange(&worker, "/silent").await }
    });
    scripted.wait_for(|record| record.requests("/silent").len() == 1).await.expect("the request");
    waiting.abort();
    scripted.wait_for(|record| record.left == 2).await.expect("the worker sees this too");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_an_error_not_an_end() {
    let (scripted, _fleet, worker) = one().await;
    for (path, end) in [("/reset", Step::Reset), ("/cut", Step::Close)] {
        scripted.on(path, vec![event_stream(), chunk(b"a"), end]);
        let mut body = worker.http().unwrap().send(post(path, "{}")).await.unwrap().into_body();
        let first = body.frame().await.unwrap();
        if let Ok(frame) = first {
            assert_eq!(frame.into_data().unwrap(), "a");
            assert_eq!(body.frame().await.unwrap().unwrap_err().code, ErrorCode::UpstreamFailed, "{path}");
        }
    }
    scripted.on("/never", vec![Step::Reset]);
    assert_eq!(exchange(&worker, "/never").await.unwrap_err().code, ErrorCode::UpstreamFailed);
    assert!(worker.is_ready(), "a broken answer alone does not take a worker out");
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_the_worker_back() {
    let (scripted, _fleet, worker) = one().await;
    let Step::Send(piece) = chunk(&[b'x'; 64 << 10]) else { unreachable!("a chunk is sent") };
    scripted.on("/flood", vec![event_stream(), Step::Flood(piece)]);
    let response = worker.http().unwrap().send(post("/flood", "{}")).await.unwrap();
    let taken = within("the flood stands still", scripted.wait_for_still(Duration::from_millis(200))).await;
    assert!(taken < 32 << 20, "{taken} bytes taken without a reader");
    drop(response);
    scripted.wait_for(|record| record.left == 1).await.expect("the worker sees it");
}

#[tokio::test]
async fn a_dead_worker_is_out_at_the_first_refusal_and_back_by_itself() {
    let (scripted, fleet, worker) = one().await;
    scripted.stop();
    scripted.wait_for(|record| record.open == 0 && !record.listening).await.expect("it is dead");
    let started = Instant::now();
    let error = exchange(&worker, "/a").await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Unavailable, "{error}");
    assert!(!worker.is_ready() && started.elapsed() < Duration::from_secs(1));
    assert_eq!(fleet.choose(None, &RouteQuery::default()).unwrap_err().code, ErrorCode::Unavailable);
    scripted.restart().await.unwrap();
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
}

#[tokio::test]
async fn an_unhealthy_answer_takes_the_worker_out_and_a_missing_health_path_does_not() {
    let (scripted, fleet, worker) = one().await;
    scripted.on("/health", vec![Step::Send(response(503, &[], b"loading"))]);
    within("unready", fleet.wait_until(|_| !worker.is_ready())).await;
    assert!(worker.info().reason.contains("503"), "{}", worker.info().reason);
    scripted.on("/health", vec![Step::Send(response(404, &[], b"no such path"))]);
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
}

#[tokio::test]
async fn listed_models_are_refreshed_and_a_worker_without_a_list_takes_any_name() {
    let (scripted, fleet, worker) = one().await;
    assert_eq!(fleet.transport(Some("whatever")), Ok(Transport::Http));
    assert!(fleet.choose(Some("whatever"), &RouteQuery::default()).is_ok());
    scripted.serve_models(&["qwen"]);
    within("the list", fleet.wait_until(|_| worker.served() == Some(vec!["qwen".into()]))).await;
    let error = fleet.choose(Some("whatever"), &RouteQuery::default()).unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.message.contains("qwen"), "{error}");
    assert!(fleet.choose(Some("qwen"), &RouteQuery::default()).is_ok());
}

#[tokio::test]
async fn prompts_return_to_the_worker_that_saw_them_and_new_ones_spread() {
    let mut workers = Vec::new();
    let fleet = Fleet::new(
        FleetOptions { policy: PolicyKind::CacheAware, seed: Some(5), ..options() },
        Arc::new(Metrics::default()),
    );
    for _ in 0..4 {
        let scripted = scripted().await;
        fleet.add(&scripted.url()).unwrap();
        workers.push(scripted);
    }
    within("readiness", fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready())))
        .await;
    let mut counts = [0; 4];
    for prompt in 0..200 {
        let text = format!("{prompt:04} ").repeat(400);
        let query = RouteQuery { text: text.as_bytes(), ..Default::default() };
        let first = fleet.choose(None, &query).unwrap();
        assert_eq!(first.predicted_cached_tokens, 0);
        counts[first.worker.id.0 as usize] += 1;
        let id = first.worker.id;
        drop(first);
        let again = fleet.choose(None, &query).unwrap();
        assert_eq!(again.worker.id, id);
        assert!(again.predicted_cached_tokens > 400);
        drop(again);
        let other = fleet.choose(None, &RouteQuery { exclude: &[id], ..query }).unwrap();
        assert_ne!(other.worker.id, id);
    }
    assert!(counts.iter().all(|count| *count > 25), "{counts:?}");
}

#[tokio::test]
async fn a_young_connection_that_breaks_under_a_request_is_not_tried_again() {
    let (scripted, _fleet, worker) = one().await;
    scripted.on("/a", x());
    exchange(&worker, "/a").await.unwrap();
    scripted.on("/bad", vec![Step::Reset]);
    assert_eq!(exchange(&worker, "/bad").await.unwrap_err().code, ErrorCode::UpstreamFailed);
    assert_eq!(scripted.record().requests("/bad").len(), 1);
}
