//! Cases of the areas health and retry before scripted HTTP workers: breakers, suspicion, budgets, with the defaults.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::kit::{Answer, Gateway};
use branchline_testkit::{ScriptedWorker, Seen, Step, chunk, event_stream, last_chunk, response};

const PLAIN: &str = r#"{"model":"m","prompt":"x"}"#;
const STREAM: &str = r#"{"model":"m","prompt":"x","stream":true}"#;

async fn worker(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> ScriptedWorker {
    ScriptedWorker::start(script).await.expect("a free port")
}

fn answer(status: u16, body: &str) -> Vec<Step> {
    vec![Step::Send(response(status, &[], body.as_bytes()))]
}

/// A worker whose nth answer is `script(n)`.
async fn counting(script: impl Fn(usize) -> Vec<Step> + Send + Sync + 'static) -> ScriptedWorker {
    let count = Arc::new(AtomicUsize::new(0));
    worker(move |_| script(count.fetch_add(1, Ordering::SeqCst))).await
}

async fn state(gateway: &Gateway, at: usize, name: &str) -> String {
    gateway.get("/workers").await.json()["workers"][at][name].as_str().unwrap_or_default().to_owned()
}

fn seen(worker: &ScriptedWorker) -> usize {
    worker.record().seen.len()
}

#[tokio::test]
async fn breaker_push_back_is_neutral_and_so_are_client_errors() {
    for (status, headers) in [(400, vec![]), (429, vec![("retry-after", "1")])] {
        let bad = worker(move |_| vec![Step::Send(response(status, &headers, b"{}"))]).await;
        let gateway = Gateway::start(&[], &[bad.url()]).await;
        for _ in 0..30 {
            assert_eq!(gateway.post("/v1/completions", PLAIN).await.status, status);
        }
        assert_eq!((seen(&bad), state(&gateway, 0, "breaker").await.as_str()), (30, "closed"));
        bad.on("/v1/completions", answer(200, "fine"));
        assert_eq!(gateway.post("/v1/completions", PLAIN).await.status, 200);
    }
}

#[tokio::test]
async fn a_prompt_that_is_too_long_is_the_clients_fault_whatever_the_status() {
    let words = r#"{"message":"This model's maximum context length is 10 tokens. You requested 20"}"#;
    let workers = [worker(move |_| answer(500, words)).await, worker(move |_| answer(500, words)).await];
    let gateway = Gateway::start(&[], &workers.each_ref().map(ScriptedWorker::url)).await;
    for _ in 0..10 {
        assert_eq!(gateway.post("/v1/completions", PLAIN).await.text(), words);
    }
    assert_eq!(state(&gateway, 0, "breaker").await, "closed");
}

#[tokio::test]
async fn breaker_opens_after_five_failures_lets_one_probe_in_and_closes_after_two() {
    let bad = counting(|number| match number {
        0..5 => answer(500, "no"),
        5 => [vec![Step::Pause(Duration::from_millis(300))], answer(200, "fine")].concat(),
        _ => answer(200, "fine"),
    })
    .await;
    let given = [("breaker_open", "200ms")];
    let gateway = Gateway::start(&given, &[bad.url()]).await;
    for _ in 0..5 {
        assert_eq!(gateway.post("/v1/completions", PLAIN).await.status, 500);
    }
    let refused = gateway.post("/v1/completions", PLAIN).await;
    assert_eq!((refused.status, refused.header("retry-after"), seen(&bad)), (503, Some("1"), 5));
    while state(&gateway, 0, "breaker").await != "half_open" {
        tokio::task::yield_now().await;
    }
    let all = futures_util::future::join_all((0..20).map(|_| gateway.post("/v1/completions", PLAIN))).await;
    let count = |status: u16| all.iter().filter(|answer| answer.status == status).count();
    assert_eq!((count(200), count(503), seen(&bad)), (1, 19, 6));
    assert_eq!(gateway.post("/v1/completions", PLAIN).await.status, 200);
    assert_eq!(state(&gateway, 0, "breaker").await, "closed");
}

#[tokio::test]
async fn a_fault_before_the_first_byte_costs_no_request_and_soon_no_try() {
    let bad = worker(|_| answer(500, "no")).await;
    let good = worker(|_| answer(200, "fine")).await;
    let gateway = Gateway::start(&[("policy", "round_robin")], &[bad.url(), good.url()]).await;
    for _ in 0..40 {
        assert_eq!(gateway.post("/v1/completions", PLAIN).await.text(), "fine");
    }
    assert_eq!(seen(&bad), 5, "its breaker is open after five");
}

#[tokio::test]
async fn a_fault_of_unknown_length_that_another_worker_betters_is_no_clients_leaving() {
    let head = b"HTTP/1.1 500 no\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    let bad = worker(move |_| vec![Step::Send(head.clone()), chunk(b"no"), Step::Hold]).await;
    let good = worker(|_| answer(200, "fine")).await;
    let gateway = Gateway::start(&[("policy", "round_robin")], &[bad.url(), good.url()]).await;
    for _ in 0..4 {
        assert_eq!(gateway.post("/v1/completions", PLAIN).await.text(), "fine");
    }
    assert!(seen(&bad) > 0);
    let metrics = gateway.get("/metrics").await.text();
    assert!(!metrics.contains("aborts_total{reason=\"client\"}"), "{metrics}");
}

#[tokio::test]
async fn all_workers_failing_costs_one_try_a_worker_and_tells_what_they_said() {
    let four = || worker(|_| answer(500, "no"));
    let workers = [four().await, four().await, four().await, four().await];
    let gateway = Gateway::start(&[], &workers.each_ref().map(ScriptedWorker::url)).await;
    let told = gateway.post("/v1/completions", PLAIN).await;
    assert_eq!((told.status, told.text().as_str()), (500, "no"));
    assert_eq!(workers.each_ref().map(seen), [1, 1, 1, 1]);
}

#[tokio::test]
async fn retry_budget_bounds_the_tries_when_everything_fails() {
    let workers = [worker(|_| answer(500, "no")).await, worker(|_| answer(500, "no")).await];
    let given = [("breaker_failures", "0"), ("outlier_share", "0"), ("max_retries", "5")];
    let gateway = Gateway::start(&given, &workers.each_ref().map(ScriptedWorker::url)).await;
    let started = tokio::time::Instant::now();
    for _ in 0..200 {
        assert_eq!(gateway.post("/v1/completions", PLAIN).await.status, 500);
    }
    let free = 10 + 2 * started.elapsed().as_secs() as usize + 2;
    let tries: usize = workers.iter().map(seen).sum();
    assert!(tries <= 240 + free, "{tries} tries for 200 requests");
    assert!(tries >= 220, "{tries}: retries are made while the budget lasts");
}

/// A stream of two events with its end.
fn whole_stream() -> Vec<Step> {
    let events = [chunk(b"data: {\"text\":\"a\"}\n\n"), chunk(b"data: [DONE]\n\n"), last_chunk()];
    [vec![event_stream()], events.to_vec()].concat()
}

/// A stream that breaks after its first event.
fn broken_stream() -> Vec<Step> {
    vec![
        event_stream(),
        chunk(b"data: {\"text\":\"a\"}\n\n"),
        Step::Pause(Duration::from_millis(5)),
        Step::Reset,
    ]
}

fn is_whole(answer: &Answer) -> bool {
    answer.text().ends_with("data: [DONE]\n\n")
}

#[tokio::test]
async fn a_worker_that_dies_mid_stream_is_left_after_five_streams() {
    for bad in [worker(|_| broken_stream()).await, {
        // Closed in order, but without the end mark.
        worker(|_| vec![event_stream(), chunk(b"data: {\"text\":\"a\"}\n\n"), last_chunk()]).await
    }] {
        let good = worker(|_| whole_stream()).await;
        let gateway = Gateway::start(&[("policy", "round_robin")], &[bad.url(), good.url()]).await;
        let mut broken = 0;
        for _ in 0..40 {
            let answer = gateway.post("/v1/completions", STREAM).await;
            broken += usize::from(!is_whole(&answer));
            assert!(is_whole(&answer) != answer.text().contains("\"error\""), "{}", answer.text());
        }
        assert_eq!((broken, seen(&bad)), (5, 5));
    }
}

/// A prompt of about a hundred tokens, so that the workers' pace is learnt.
fn prompt(number: usize) -> String {
    format!(r#"{{"model":"m","prompt":"{}"}}"#, format!("{number:04}").repeat(100))
}

#[tokio::test]
async fn a_silent_worker_is_suspected_while_its_peer_goes_on_and_costs_nobody_anything() {
    let stuck = counting(|number| match number {
        0..4 => answer(200, "fine"),
        _ => vec![Step::Hold],
    })
    .await;
    let good = worker(|_| answer(200, "fine")).await;
    let given = [("policy", "round_robin"), ("suspect_after", "100ms"), ("slow_start", "0")];
    let gateway = Gateway::start(&given, &[stuck.url(), good.url()]).await;
    for number in 0..8 {
        assert_eq!(gateway.post("/v1/completions", &prompt(number)).await.text(), "fine");
    }
    // Both kinds at once: what hangs is rescued because the others go on.
    let calls = (8..14).map(|number| {
        let gateway = &gateway;
        async move {
            tokio::time::sleep(Duration::from_millis(40 * number as u64)).await;
            gateway.post("/v1/completions", &prompt(number)).await
        }
    });
    for answer in futures_util::future::join_all(calls).await {
        assert_eq!((answer.status, answer.text().as_str()), (200, "fine"));
    }
    assert_eq!(state(&gateway, 0, "health").await, "suspected");
    let before = seen(&stuck);
    for number in 20..30 {
        assert_eq!(gateway.post("/v1/completions", &prompt(number)).await.text(), "fine");
    }
    assert_eq!(seen(&stuck), before, "new requests go elsewhere");
    assert!(gateway.get("/metrics").await.text().contains("retries_total{reason=\"suspected\"}"));
    assert!(gateway.app.fleet.workers().iter().all(|worker| worker.is_ready()), "it is not ejected");
}

/// Twenty seconds of honest work, scaled by fifty.
#[tokio::test]
async fn a_worker_in_a_long_honest_prefill_loses_no_request() {
    let slow = counting(|number| match number {
        0..4 => answer(200, "fine"),
        4 => [vec![Step::Pause(Duration::from_millis(400))], answer(200, "late")].concat(),
        _ => answer(200, "fine"),
    })
    .await;
    let good = worker(|_| answer(200, "fine")).await;
    let given =
        [("policy", "round_robin"), ("suspect_after", "20ms"), ("slow_start", "0"), ("max_retries", "0")];
    let gateway = Gateway::start(&given, &[slow.url(), good.url()]).await;
    for number in 0..8 {
        assert_eq!(gateway.post("/v1/completions", &prompt(number)).await.text(), "fine");
    }
    let long = prompt(100);
    let late = gateway.post("/v1/completions", &long);
    let others = async {
        for number in 8..40 {
            assert_eq!(gateway.post("/v1/completions", &prompt(number)).await.text(), "fine");
            tokio::time::sleep(Duration::from_millis(8)).await;
        }
    };
    let (late, ()) = tokio::join!(late, others);
    assert_eq!((late.status, late.text().as_str()), (200, "late"), "its own worker answers it in the end");
    assert_eq!(state(&gateway, 0, "health").await, "well", "its first byte clears it");
}

#[tokio::test]
async fn a_worker_whose_stream_stands_still_gets_no_new_request_while_its_peer_goes_on() {
    let stalled = worker(|seen| match String::from_utf8_lossy(&seen.body).contains("\"stream\":true") {
        true => vec![event_stream(), chunk(b"data: 1\n\n"), Step::Hold],
        false => answer(200, "fine"),
    })
    .await;
    let good = worker(|_| answer(200, "fine")).await;
    let given = [("policy", "least_load"), ("suspect_after", "50ms"), ("slow_start", "0")];
    let gateway = Gateway::start(&given, &[stalled.url()]).await;
    let mut stream = gateway.send("POST", "/v1/completions", &[], STREAM).await;
    stream.read_until("data: 1").await;
    let added = gateway.post("/workers", &format!(r#"{{"url":"{}"}}"#, good.url())).await;
    assert_eq!(added.status, 202);
    let suspected = async {
        while state(&gateway, 0, "health").await != "suspected" {
            assert_eq!(gateway.post("/v1/completions", PLAIN).await.text(), "fine");
        }
    };
    tokio::time::timeout(crate::kit::PATIENCE, suspected).await.expect("it is suspected");
    let before = seen(&stalled);
    for _ in 0..10 {
        assert_eq!(gateway.post("/v1/completions", PLAIN).await.text(), "fine");
    }
    assert_eq!(seen(&stalled), before, "new requests go elsewhere");
}

#[tokio::test]
async fn errors_do_not_tell_addresses() {
    let gone = worker(|_| answer(200, "fine")).await;
    let gateway = Gateway::start(&[], &[gone.url()]).await;
    gone.stop();
    gone.wait_for(|record| !record.listening).await.expect("it is gone");
    let told = gateway.post("/v1/completions", PLAIN).await;
    let address = gone.url().trim_start_matches("http://").to_owned();
    assert!(told.status >= 502 && !told.text().contains(&address), "{}", told.text());
}
