//! Cases of the areas headers, retry and routing before scripted HTTP workers.

use crate::kit::Gateway;
use branchline_testkit::{
    Act, EngineSetup, FakeEngine, ScriptedWorker, Seen, Step, chunk, event_stream, response,
};
use branchline_worker::proto::FinishReason;

const STREAM: &str = r#"{"model":"m","prompt":"x","stream":true}"#;

async fn worker(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> ScriptedWorker {
    ScriptedWorker::start(script).await.expect("a free port")
}

async fn fine() -> ScriptedWorker {
    worker(|_| vec![Step::Send(response(200, &[], b"{}"))]).await
}

/// Values of a header of each request seen.
fn values(worker: &ScriptedWorker, name: &str) -> Vec<Vec<String>> {
    let of = |seen: &Seen| {
        let same = seen.headers.iter().filter(|(known, _)| known == name);
        same.map(|(_, value)| value.clone()).collect()
    };
    worker.record().seen.iter().map(of).collect()
}

#[tokio::test]
async fn headers_one_authorization_reaches_the_worker_and_never_the_gateways() {
    let client = [("authorization", "Bearer GATEWAY-KEY")];
    let both = [("api_key", "GATEWAY-KEY"), ("worker_token", "WORKER-KEY")];
    for (given, right) in [
        (&both[..], vec!["Bearer WORKER-KEY"]),
        (&both[..1], vec![]),
        (&both[1..], vec!["Bearer WORKER-KEY"]),
        (&both[..0], vec!["Bearer GATEWAY-KEY"]),
    ] {
        let worker = fine().await;
        let gateway = Gateway::start(given, &[worker.url()]).await;
        for body in [STREAM, r#"{"model":"m","prompt":"x"}"#] {
            gateway.call("POST", "/v1/completions", &client, body).await;
        }
        assert_eq!(values(&worker, "authorization"), vec![right; 2], "{given:?}");
    }
}

#[tokio::test]
async fn admin_calls_carry_the_workers_own_key_where_it_has_one() {
    let (own, usual) = (fine().await, fine().await);
    let gateway = Gateway::start(&[("worker_token", "USUAL")], &[usual.url()]).await;
    let spec = format!(r#"{{"url":"{}","api_key":"OWN"}}"#, own.url());
    assert_eq!(gateway.post("/workers", &spec).await.status, 202);
    for worker in [&own, &usual] {
        worker.on("/flush_cache", vec![Step::Send(response(200, &[], b"{}"))]);
    }
    assert_eq!(gateway.post("/flush_cache", "").await.status, 200);
    for (worker, right) in [(&own, "Bearer OWN"), (&usual, "Bearer USUAL")] {
        assert_eq!(values(worker, "authorization"), [[right]]);
    }
}

#[tokio::test]
async fn retry_never_after_first_byte() {
    let broken = |_: &Seen| {
        let pieces = [chunk(b"data: {\"text\":\"Rivers\"}\n\n"), chunk(b"data: {\"text\":\" flow \"}\n\n")];
        let pause = Step::Pause(std::time::Duration::from_millis(20));
        [vec![event_stream()], pieces.to_vec(), vec![pause, Step::Reset]].concat()
    };
    let workers = [worker(broken).await, worker(broken).await];
    let gateway = Gateway::start(&[], &workers.each_ref().map(ScriptedWorker::url)).await;
    let answer = gateway.post("/v1/completions", STREAM).await;
    let events = answer.events();
    assert_eq!(events[..2], ["{\"text\":\"Rivers\"}", "{\"text\":\" flow \"}"]);
    assert!(events.len() == 3 && events[2].contains("\"error\""), "{events:?}");
    assert_eq!(workers.iter().map(|worker| worker.record().seen.len()).sum::<usize>(), 1);
}

#[tokio::test]
async fn retry_honours_retry_after_by_one_attempt_a_worker() {
    let busy = |_: &Seen| vec![Step::Send(response(429, &[("retry-after", "2")], b"{}"))];
    let workers = [worker(busy).await, worker(busy).await];
    let gateway = Gateway::start(&[], &workers.each_ref().map(ScriptedWorker::url)).await;
    let answer = gateway.post("/v1/completions", STREAM).await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, Some("2")));
    assert!(workers.iter().all(|worker| worker.record().seen.len() == 1));
}

#[tokio::test]
async fn retry_stale_pooled_connection_costs_no_request_and_no_charge() {
    // Every second request finds a kept connection that its worker closes while the request is being written.
    let count = std::sync::atomic::AtomicUsize::new(0);
    let closing = worker(move |_| match count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) % 2 {
        0 => vec![Step::Send(response(200, &[], b"{}"))],
        _ => vec![Step::Close],
    })
    .await;
    let gateway = Gateway::start(&[], &[closing.url()]).await;
    for _ in 0..3 {
        assert_eq!(gateway.post("/v1/completions", "{}").await.status, 200);
        // As long as no server closes a connection earlier: only then may a request be sent again.
        tokio::time::sleep(std::time::Duration::from_millis(1_050)).await;
    }
    let workers = gateway.get("/workers").await.json();
    assert_eq!(workers["workers"][0]["breaker"], "closed");
    assert!(!gateway.get("/metrics").await.text().contains("worker_failures_total{"));
    assert_eq!(closing.record().seen.len(), 5, "three answered, two sent into a connection that closed");
}

#[tokio::test]
async fn routing_load_after_cancel_is_zero_on_every_way_out() {
    let held = [worker(|_| vec![Step::Hold]).await, worker(|_| vec![Step::Hold]).await];
    let gateway =
        Gateway::start(&[("policy", "round_robin")], &held.each_ref().map(ScriptedWorker::url)).await;
    let count = |pick: fn(&branchline_testkit::Record) -> usize| {
        held.iter().map(|w| pick(&w.record())).sum::<usize>()
    };
    let mut clients = Vec::new();
    for _ in 0..20 {
        clients.push(gateway.send("POST", "/v1/completions", &[], STREAM).await);
    }
    for worker in &held {
        worker.wait_for(|record| record.seen.len() == 10).await.expect("half of them");
    }
    assert_eq!(gateway.load(), 20);
    drop(clients);
    for worker in &held {
        worker.wait_for(|record| record.left == 10).await.expect("all are let go");
    }
    assert_eq!((gateway.load(), count(|record| record.left)), (0, 20));
    for answer in [vec![Step::Reset], vec![Step::Send(response(500, &[], b"no"))], vec![Step::Close]] {
        held.iter().for_each(|worker| worker.on("/v1/completions", answer.clone()));
        assert!(gateway.post("/v1/completions", STREAM).await.status >= 500);
        assert_eq!(gateway.load(), 0, "{answer:?}");
    }
    assert!(!gateway.get("/metrics").await.text().contains("worker_in_flight{worker=\"-"));
}

#[tokio::test]
async fn routing_ties_are_random() {
    for policy in ["cache_aware", "power_of_two"] {
        let workers = [fine().await, fine().await, fine().await, fine().await];
        let gateway =
            Gateway::start(&[("policy", policy)], &workers.each_ref().map(ScriptedWorker::url)).await;
        for number in 0..200 {
            let prompt = format!("{number:04} ").repeat(200);
            gateway.post("/v1/completions", &format!(r#"{{"prompt":"{prompt}"}}"#)).await;
        }
        let counts = workers.each_ref().map(|worker| worker.record().seen.len());
        assert!(counts.iter().all(|count| (20..=90).contains(count)), "{policy}: {counts:?}");
    }
}

#[tokio::test]
async fn hints_reach_the_choice_before_either_kind_of_worker_and_nonsense_is_refused() {
    let (worker, engine) =
        (fine().await, FakeEngine::start(EngineSetup::default()).await.expect("a free port"));
    engine.script(|_| vec![Act::finish(0, FinishReason::Stop, 0)]);
    let gateway = Gateway::start(&[], &[worker.url(), engine.url()]).await;
    for body in [r#"{"model":"m","prompt":"x"}"#, r#"{"model":"fake","prompt":"x","max_tokens":4}"#] {
        let headers = [
            ("x-branchline-fork-width", "96"),
            ("x-branchline-expected-tokens", "900"),
            ("x-branchline-explain", "1"),
        ];
        let answer = gateway.call("POST", "/v1/completions", &headers, body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let told: serde_json::Value =
            serde_json::from_str(answer.header("x-branchline-explain").expect("told")).expect("JSON");
        assert_eq!(told["candidates"][0]["shared_by"], 48, "{told}");
        for name in ["x-branchline-fork-width", "x-branchline-expected-tokens"] {
            let answer = gateway.call("POST", "/v1/completions", &[(name, "wide")], body).await;
            assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(name)));
        }
    }
    assert_eq!((worker.record().seen.len(), engine.submits().len()), (1, 1));
}
