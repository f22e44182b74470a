//! Engines over a real socket: order, isolation, cancellation, death, return, tokenizers and credentials.
#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use branchline_core::ErrorCode;
use branchline_telemetry::Metrics;
use branchline_testkit::{Act, EngineSetup, FakeEngine, within};
use branchline_worker::proto::{self, FinishReason, SequenceDelta};
use branchline_worker::{
    BufferLimits, DeltaStream, Fleet, FleetOptions, RouteQuery, SubmitOptions, Transport, Worker,
};

async fn fleet_of(options: FleetOptions, engines: &[&FakeEngine]) -> Arc<Fleet> {
    let fleet = Fleet::new(options, Arc::new(Metrics::default()));
    for engine in engines {
        fleet.add(&engine.url()).unwrap();
    }
    within(
        "all engines are ready",
        fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready())),
    )
    .await;
    fleet
}

async fn one() -> (FakeEngine, Arc<Fleet>, Arc<Worker>) {
    let engine = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let fleet = fleet_of(FleetOptions::default(), &[&engine]).await;
    let worker = fleet.workers()[0].clone();
    (engine, fleet, worker)
}

fn request(id: &str) -> proto::GenerateRequest {
    proto::GenerateRequest { request_id: id.into(), token_ids: vec![1, 2, 3], ..Default::default() }
}

fn delta(handle: u64, text: &str) -> SequenceDelta {
    SequenceDelta { handle, token_ids: vec![7], text: text.into(), ..Default::default() }
}

fn finish(handle: u64) -> SequenceDelta {
    let finish =
        proto::Finish { reason: FinishReason::Stop.into(), completion_tokens: 1, ..Default::default() };
    SequenceDelta { handle, finish: Some(finish), ..Default::default() }
}

async fn next(stream: &mut DeltaStream) -> Option<branchline_core::Result<SequenceDelta>> {
    within("a delta", stream.next()).await
}

async fn text_of(mut stream: DeltaStream) -> String {
    let mut text = String::new();
    while let Some(delta) = next(&mut stream).await {
        text.push_str(&delta.unwrap().text);
    }
    text
}

#[tokio::test]
async fn frames_reach_their_requests_in_order() {
    let (engine, _fleet, worker) = one().await;
    let mut streams: Vec<_> =
        (0..8).map(|i| worker.submit(request(&i.to_string()), SubmitOptions::default()).unwrap()).collect();
    within("all submits", engine.wait_until(|engine| engine.submits().len() == 8)).await;
    let handles: Vec<_> = engine.submits().iter().map(|submit| submit.handle).collect();
    for step in 0..20 {
        engine.emit(handles.iter().map(|handle| delta(*handle, &format!("{handle}:{step} "))).collect());
    }
    engine.emit(handles.iter().map(|handle| finish(*handle)).collect());
    for (stream, handle) in streams.drain(..).zip(handles) {
        let expected: String = (0..20).map(|step| format!("{handle}:{step} ")).collect();
        assert_eq!(text_of(stream).await, expected);
    }
}

#[tokio::test]
async fn a_slow_reader_fails_alone() {
    let (engine, _fleet, worker) = one().await;
    let buffer = Some(BufferLimits { deltas: 64, bytes: 64 << 10 });
    let mut slow = worker.submit(request("slow"), SubmitOptions { buffer, ..Default::default() }).unwrap();
    let fast = worker.submit(request("fast"), SubmitOptions::default()).unwrap();
    let big = "x".repeat(1000);
    for _ in 0..100 {
        engine.emit(vec![delta(1, &big), delta(2, "y")]);
    }
    engine.emit(vec![finish(2)]);
    assert_eq!(text_of(fast).await, "y".repeat(100));
    within("the slow one is cancelled", engine.wait_until(|engine| engine.cancels() == [1])).await;
    let error = loop {
        match next(&mut slow).await.expect("an error before the end") {
            Ok(delta) => assert!(!delta.text.is_empty()),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code, ErrorCode::ResourceExhausted);
    assert!(error.message.contains("reads too slowly"), "{}", error.message);
    assert!(next(&mut slow).await.is_none());
}

#[tokio::test]
async fn a_lagging_reader_finds_plain_text_merged_and_complete() {
    let (engine, _fleet, worker) = one().await;
    let buffer = Some(BufferLimits { deltas: 32, bytes: 1 << 20 });
    let mut lagging =
        worker.submit(request("lagging"), SubmitOptions { buffer, ..Default::default() }).unwrap();
    let marker = worker.submit(request("marker"), SubmitOptions::default()).unwrap();
    for step in 0..1000 {
        engine.emit(vec![delta(1, &format!("{step},"))]);
    }
    engine.emit(vec![finish(1), finish(2)]);
    text_of(marker).await;
    let (mut deltas, mut text, mut ids) = (0, String::new(), 0);
    while let Some(delta) = next(&mut lagging).await {
        let delta = delta.unwrap();
        deltas += 1;
        ids += delta.token_ids.len();
        text.push_str(&delta.text);
    }
    assert_eq!(text, (0..1000).map(|step| format!("{step},")).collect::<String>());
    assert_eq!(ids, 1000);
    assert!(deltas <= 32, "{deltas} deltas");
}

#[tokio::test]
async fn dropping_a_stream_cancels_its_request_and_only_it() {
    let (engine, _fleet, worker) = one().await;
    let dropped = worker.submit(request("dropped"), SubmitOptions::default()).unwrap();
    let kept = worker.submit(request("kept"), SubmitOptions::default()).unwrap();
    drop(dropped);
    within("the cancel", engine.wait_until(|engine| engine.cancels() == [1])).await;
    engine.emit(vec![delta(1, "late"), delta(2, "kept"), finish(1), finish(2)]);
    assert_eq!(text_of(kept).await, "kept");
    let ended = worker.submit(request("ended"), SubmitOptions::default()).unwrap();
    engine.emit(vec![finish(3)]);
    text_of(ended).await;
    let marker = worker.submit(request("marker"), SubmitOptions::default()).unwrap();
    drop(marker);
    within("the marker's cancel", engine.wait_until(|engine| engine.cancels() == [1, 4])).await;
}

#[tokio::test]
async fn death_fails_every_live_request_within_a_second_and_a_restart_is_picked_up() {
    let (engine, fleet, worker) = one().await;
    let mut streams: Vec<_> =
        (0..16).map(|i| worker.submit(request(&i.to_string()), SubmitOptions::default()).unwrap()).collect();
    within("all submits", engine.wait_until(|engine| engine.submits().len() == 16)).await;
    engine.emit(vec![delta(1, "half")]);
    assert_eq!(next(&mut streams[0]).await.unwrap().unwrap().text, "half");
    let killed = Instant::now();
    engine.kill();
    for stream in &mut streams {
        let error = next(stream).await.expect("an error").unwrap_err();
        assert_eq!(error.code, ErrorCode::UpstreamFailed, "{error}");
        assert_eq!(error.message, "the worker died while it answered; try again");
        assert!(next(stream).await.is_none());
    }
    assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
    assert!(!worker.is_ready());
    assert_eq!(
        worker.submit(request("refused"), SubmitOptions::default()).unwrap_err().code,
        ErrorCode::Unavailable
    );
    let refused = fleet.choose(Some("fake"), &RouteQuery::default()).unwrap_err();
    assert_eq!((refused.code, refused.retry_after), (ErrorCode::Unavailable, Some(Duration::from_secs(1))));

    engine.restart().await.unwrap();
    within("the engine is ready again", fleet.wait_until(|_| worker.is_ready())).await;
    engine.script(|_| vec![Act::tokens(&[1], "again"), Act::finish(0, FinishReason::Stop, 1)]);
    assert_eq!(text_of(worker.submit(request("again"), SubmitOptions::default()).unwrap()).await, "again");
}

#[tokio::test]
async fn a_scripted_death_in_mid_stream_ends_in_an_error_after_what_was_sent() {
    let (engine, _fleet, worker) = one().await;
    engine.script(|_| vec![Act::tokens(&[1], "half"), Act::Wait(Duration::from_millis(50)), Act::Die]);
    let mut stream = worker.submit(request("a"), SubmitOptions::default()).unwrap();
    assert_eq!(next(&mut stream).await.unwrap().unwrap().text, "half");
    assert_eq!(next(&mut stream).await.unwrap().unwrap_err().code, ErrorCode::UpstreamFailed);
}

#[tokio::test]
async fn a_broken_stream_of_a_living_engine_is_opened_again() {
    let (engine, fleet, worker) = one().await;
    let mut stream = worker.submit(request("a"), SubmitOptions::default()).unwrap();
    within("the submit", engine.wait_until(|engine| engine.submits().len() == 1)).await;
    engine.break_stream();
    assert_eq!(next(&mut stream).await.unwrap().unwrap_err().code, ErrorCode::UpstreamFailed);
    within("a second stream", engine.wait_until(|engine| engine.attached() == 2)).await;
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
}

#[tokio::test]
async fn an_error_of_the_engine_ends_the_request_with_its_code_field_and_hint() {
    let (engine, _fleet, worker) = one().await;
    engine.script(|_| {
        let error = proto::Error {
            code: proto::ErrorCode::ResourceExhausted.into(),
            message: "queue is full".into(),
            field: "priority".into(),
            retry_after_ms: Some(250),
        };
        vec![Act::send(SequenceDelta { error: Some(error), ..Default::default() })]
    });
    let mut stream = worker.submit(request("a"), SubmitOptions::default()).unwrap();
    let error = next(&mut stream).await.unwrap().unwrap_err();
    assert_eq!((error.code, error.message.as_str()), (ErrorCode::ResourceExhausted, "queue is full"));
    assert_eq!(
        (error.field.as_deref(), error.retry_after),
        (Some("priority"), Some(Duration::from_millis(250)))
    );
    assert!(next(&mut stream).await.is_none());
}

#[tokio::test]
async fn a_request_of_n_sequences_ends_with_its_last_one() {
    let (engine, _fleet, worker) = one().await;
    let mut wanted = request("n");
    wanted.sampling = Some(proto::SamplingParams { n: Some(3), ..Default::default() });
    engine.script(|_| [2, 0, 1].map(|index| Act::finish(index, FinishReason::Length, 0)).to_vec());
    let mut stream = worker.submit(wanted, SubmitOptions::default()).unwrap();
    for index in [2, 0, 1] {
        assert_eq!(next(&mut stream).await.unwrap().unwrap().index, index);
    }
    assert!(next(&mut stream).await.is_none());
}

#[tokio::test]
async fn a_sequence_that_was_not_asked_for_fails_that_request() {
    let (engine, _fleet, worker) = one().await;
    engine.script(|_| vec![Act::finish(1, FinishReason::Stop, 0)]);
    let mut stream = worker.submit(request("a"), SubmitOptions::default()).unwrap();
    assert_eq!(next(&mut stream).await.unwrap().unwrap_err().code, ErrorCode::UpstreamFailed);
    within("the cancel", engine.wait_until(|engine| engine.cancels() == [1])).await;
}

#[tokio::test]
async fn a_deadline_travels_with_the_request_and_is_enforced_here_too() {
    let (engine, _fleet, worker) = one().await;
    let options = SubmitOptions { deadline: Some(Duration::from_millis(80)), ..Default::default() };
    let mut stream = worker.submit(request("a"), options).unwrap();
    let error = next(&mut stream).await.unwrap().unwrap_err();
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
    within("the cancel", engine.wait_until(|engine| engine.cancels() == [1])).await;
    assert_eq!(engine.submits()[0].request.as_ref().unwrap().deadline_ms, Some(80));
}

#[tokio::test]
async fn workers_of_one_model_share_one_tokenizer() {
    let first = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let second = FakeEngine::start(EngineSetup { piece_bytes: 77, ..Default::default() }).await.unwrap();
    let fleet = fleet_of(FleetOptions::default(), &[&first, &second]).await;
    let models: Vec<_> = fleet.workers().iter().map(|worker| worker.model().unwrap()).collect();
    assert!(Arc::ptr_eq(&models[0].tokenizer, &models[1].tokenizer));
    assert_eq!(models[0].tokenizer.encode("hi", false).unwrap(), [104, 105]);
    assert!(models[0].chat_template.is_some(), "{:?}", models[0].chat_template_error);
    assert_eq!(fleet.models().len(), 1);
}

#[tokio::test]
async fn a_tokenizer_with_a_wrong_checksum_keeps_the_worker_out_until_it_is_right() {
    let manifest = proto::TokenizerManifest { tokenizer_json_sha256: vec![1; 32], ..Default::default() };
    let engine = FakeEngine::start(EngineSetup { manifest, ..Default::default() }).await.unwrap();
    let fleet = Fleet::new(FleetOptions::default(), Arc::new(Metrics::default()));
    let worker = fleet.add(&engine.url()).unwrap();
    within("the reason", fleet.wait_until(|_| worker.info().reason.contains("checksum"))).await;
    assert!(!worker.is_ready());
    engine.change(|setup| setup.manifest = EngineSetup::default().manifest);
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
}

#[tokio::test]
async fn the_token_is_sent_and_a_wrong_one_is_named_in_the_reason() {
    let setup = EngineSetup { token: Some("secret".into()), ..Default::default() };
    let engine = FakeEngine::start(setup).await.unwrap();
    let right = FleetOptions { worker_token: Some("secret".into()), ..Default::default() };
    let fleet = fleet_of(right, &[&engine]).await;
    assert_eq!(fleet.workers()[0].load().await.unwrap().pages_total, 64);
    let fleet = Fleet::new(FleetOptions::default(), Arc::new(Metrics::default()));
    let worker = fleet.add(&engine.url()).unwrap();
    within("the reason", fleet.wait_until(|_| worker.info().reason.contains("token"))).await;
    assert!(!worker.is_ready());
}

#[tokio::test]
async fn the_calls_beside_the_stream_answer() {
    let (engine, _fleet, worker) = one().await;
    let held = worker.submit(request("a"), SubmitOptions::default()).unwrap();
    within("the submit", engine.wait_until(|engine| engine.submits().len() == 1)).await;
    assert_eq!(worker.abort("a").await, Ok(1));
    assert_eq!(worker.abort_all().await, Ok(1));
    assert!(!engine.aborts()[0].abort_all && engine.aborts()[1].abort_all);
    assert_eq!(worker.flush_cache().await.unwrap().flushed_pages, 64);
    assert_eq!(worker.server_info().await.unwrap().cache.unwrap().pages_total, 64);
    drop(held);
}

#[tokio::test]
async fn an_unknown_model_is_refused_naming_the_known_ones() {
    let (_engine, fleet, _worker) = one().await;
    let error = fleet.choose(Some("gpt"), &RouteQuery::default()).unwrap_err();
    assert_eq!((error.code, error.field.as_deref()), (ErrorCode::NotFound, Some("model")));
    assert!(error.message.contains("'gpt'") && error.message.contains("fake"), "{}", error.message);
    assert_eq!(fleet.transport(Some("fake")), Ok(Transport::Grpc));
    assert_eq!(fleet.names(), [("fake".to_owned(), Transport::Grpc)]);
}

#[tokio::test]
async fn load_is_counted_from_choice_to_the_streams_end() {
    let (engine, fleet, worker) = one().await;
    let choice = fleet.choose(None, &RouteQuery { token_ids: &[1, 2, 3], ..Default::default() }).unwrap();
    assert_eq!(worker.in_flight(), 1);
    let stream = choice
        .worker
        .submit(request("a"), SubmitOptions { guard: Some(choice.guard), ..Default::default() })
        .unwrap();
    engine.emit(vec![delta(1, "x"), finish(1)]);
    assert_eq!(worker.in_flight(), 1);
    text_of(stream).await;
    assert_eq!(worker.in_flight(), 0);
}

#[tokio::test]
async fn a_removed_worker_takes_nothing_new_and_its_running_request_ends() {
    let (engine, fleet, worker) = one().await;
    let choice = fleet.choose(None, &RouteQuery::default()).unwrap();
    let stream = choice
        .worker
        .submit(request("a"), SubmitOptions { guard: Some(choice.guard), ..Default::default() })
        .unwrap();
    within("the submit", engine.wait_until(|engine| engine.submits().len() == 1)).await;
    let removal = tokio::spawn({
        let (fleet, id) = (fleet.clone(), worker.id);
        async move { fleet.remove(id, Duration::from_secs(20)).await }
    });
    within("the list is empty", async {
        while !fleet.workers().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(fleet.choose(None, &RouteQuery::default()).unwrap_err().code, ErrorCode::Unavailable);
    engine.emit(vec![delta(1, "whole"), finish(1)]);
    assert_eq!(text_of(stream).await, "whole");
    within("the removal", removal).await.unwrap().unwrap();
    assert_eq!(fleet.remove(worker.id, Duration::ZERO).await.unwrap_err().code, ErrorCode::NotFound);
}

#[tokio::test]
async fn shutdown_ends_every_task_and_fails_what_lives() {
    let (_engine, fleet, worker) = one().await;
    let mut stream = worker.submit(request("a"), SubmitOptions::default()).unwrap();
    within("shutdown", fleet.shutdown()).await;
    let error = next(&mut stream).await.unwrap().unwrap_err();
    assert_eq!(error.code, ErrorCode::UpstreamFailed);
    assert!(error.message.contains("left the fleet"), "{error}");
    assert_eq!(fleet.add("http://127.0.0.1:1").unwrap_err().code, ErrorCode::Unavailable);
}

#[tokio::test]
async fn an_engine_taken_out_on_purpose_is_no_failure_and_leaves_no_series() {
    let engine = FakeEngine::start(EngineSetup::default()).await.unwrap();
    for by_removal in [true, false] {
        let metrics = Arc::new(Metrics::default());
        let fleet = Fleet::new(FleetOptions::default(), metrics.clone());
        let worker = fleet.add(&engine.url()).unwrap();
        within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
        assert!(metrics.encode().contains(&engine.url()));
        if by_removal {
            fleet.remove(worker.id, Duration::ZERO).await.unwrap();
        }
        within("shutdown", fleet.shutdown()).await;
        assert!(!worker.is_ready());
        assert_eq!(worker.info().reason, "removed from the fleet");
        assert!(!metrics.encode().contains(&engine.url()), "{}", metrics.encode());
    }
}

#[tokio::test]
async fn a_worker_that_is_added_again_while_the_old_one_drains_keeps_its_series() {
    let engine = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let metrics = Arc::new(Metrics::default());
    let fleet = Fleet::new(FleetOptions::default(), metrics.clone());
    let old = fleet.add(&engine.url()).unwrap();
    within("readiness", fleet.wait_until(|_| old.is_ready())).await;
    let choice = fleet.choose(None, &RouteQuery::default()).unwrap();
    let draining = fleet.retire(old.id, Duration::from_secs(20));
    let new = fleet.add(&engine.url()).unwrap();
    within("its return", fleet.wait_until(|_| new.is_ready())).await;
    drop(choice);
    within("the end of the old one", draining).await;
    // Its task ends a moment later.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let ready = format!("worker_ready{{worker=\"{}\"}} 1", engine.url());
    assert!(metrics.encode().contains(&ready), "{}", metrics.encode());
}
