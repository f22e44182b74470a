use branchline_core::RequestId;
use branchline_protocol::{Routing, Sampling};
use branchline_testkit::{EngineSetup, FakeEngine, within};
use branchline_worker::{SubmitOptions, proto};

use super::*;
use crate::config::resolve_arguments;
use crate::middleware::route::Plan;

#[test]
fn only_failures_of_a_worker_are_moved_and_get_a_wait() {
    for code in ErrorCode::ALL {
        let movable =
            matches!(code, ErrorCode::UpstreamFailed | ErrorCode::Unavailable | ErrorCode::ResourceExhausted);
        let error = with_wait(Error::new(code, "no"));
        assert_eq!(error.retry_after.is_some(), movable, "{}", code.name());
    }
    let own = Error::new(ErrorCode::Unavailable, "no").with_retry_after(Duration::from_secs(9));
    assert_eq!(with_wait(own).retry_after, Some(Duration::from_secs(9)));
}

/// One worker, whose stream takes nothing more: there is no other to go to, so no retry may be spent.
#[tokio::test]
async fn a_refusal_without_another_worker_is_told_as_it_is_and_spends_no_retry() {
    let engine = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let given = [("worker_urls".to_owned(), vec![engine.url()])].to_vec();
    let app = App::build(resolve_arguments(given, None, std::iter::empty()).unwrap()).unwrap();
    within("readiness", app.fleet.wait_until(|fleet| fleet.workers()[0].is_ready())).await;
    let worker = Arc::clone(&app.fleet.workers()[0]);
    // Nothing is awaited from here on, so the stream can't be emptied.
    let mut held = Vec::new();
    while let Ok(stream) = worker.submit(proto::GenerateRequest::default(), SubmitOptions::default()) {
        held.push(stream);
    }
    let job = Job {
        model: app.fleet.models().remove(0),
        live: app.live.register(RequestId::new("a")).unwrap(),
        tokens: vec![1],
        sampling: Sampling::default(),
        logprobs: None,
        routing: Routing::default(),
        lease: None,
        permit: None,
        traceparent: String::new(),
        tag: None,
        asked: None,
        key: None,
        hints: branchline_worker::Hints::default(),
        seed: 0,
        plan: Plan::default(),
    };
    let Err(error) = start(&app, job, Instant::now()) else { panic!("it was taken") };
    assert!(error.message.contains("has not read"), "{}", error.message);
    assert!((0..10).all(|_| app.fleet.spend_retry()), "the budget of a fresh fleet");
}
