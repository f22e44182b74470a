//! Tenants before a whole gateway: limits a minute, fair turns, classes, bytes in flight, deadlines.

use std::path::PathBuf;
use std::sync::Arc;

use crate::kit::Gateway;
use branchline_testkit::{
    EngineSetup, FakeEngine, ScriptedWorker, Seen, Step, chunk, event_stream, last_chunk, response, within,
};
use tokio::sync::watch;

const BODY: &str = r#"{"model":"m","prompt":"x","stream":true}"#;

fn file(folder: &tempfile::TempDir, text: &str) -> String {
    let path: PathBuf = folder.path().join("tenants.toml");
    std::fs::write(&path, text).expect("written");
    path.to_str().expect("UTF-8").to_owned()
}

async fn plain() -> ScriptedWorker {
    ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.expect("a free port")
}

fn team(seen: &Seen) -> String {
    seen.header("x-team").unwrap_or("?").to_owned()
}

/// A worker whose streams end when it is told to, and one at a time.
async fn held() -> (ScriptedWorker, watch::Sender<usize>) {
    let (end, ended) = watch::channel(0);
    let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let worker = ScriptedWorker::start(move |_| {
        let number = count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let over = number > 0 || *ended.borrow() > 0;
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
async fn a_tenant_over_its_requests_a_minute_is_told_when_to_come_back_and_others_are_not() {
    let (folder, worker) = (tempfile::tempdir().expect("a folder"), plain().await);
    let tenants = file(&folder, "[tenants.\"auth:small\"]\nrequests_per_minute = 2\n");
    let given = [("tenant_file", tenants.as_str()), ("user_api_key", "small"), ("api_key", "boss")];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let ask = async |key| gateway.call("POST", "/v1/completions", &[("x-api-key", key)], BODY).await;
    for _ in 0..2 {
        assert_eq!(ask("small").await.status, 200);
    }
    let refused = ask("small").await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (429, Some("resource_exhausted")));
    let wait: u64 = refused.header("retry-after").and_then(|text| text.parse().ok()).expect("a wait");
    assert!((1..=30).contains(&wait), "{wait}");
    for _ in 0..5 {
        assert_eq!(ask("boss").await.status, 200);
    }
    assert_eq!(worker.record().seen.len(), 7, "a refused request costs no worker anything");
    let page = gateway.call("GET", "/metrics", &[("x-api-key", "boss")], "").await.text();
    assert!(page.contains("branchline_router_errors_total{code=\"resource_exhausted\"} 1\n"), "{page}");
    assert!(!page.contains("small"), "no label is a client's");
}

#[tokio::test]
async fn engines_tokens_are_counted_exactly() {
    let folder = tempfile::tempdir().expect("a folder");
    let tenants = file(&folder, "[default]\ntokens_per_minute = 40\n");
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let gateway = Gateway::start(&[("tenant_file", tenants.as_str())], &[engine.url()]).await;
    let body = r#"{"prompt":[1,2,3,4,5,6,7,8],"max_tokens":2}"#;
    let mut used = 0;
    let refused = loop {
        let answer = gateway.post("/v1/completions", body).await;
        if answer.status != 200 {
            break answer;
        }
        used += answer.json()["usage"]["total_tokens"].as_u64().expect("a count");
        assert!(used < 200, "the limit is never reached");
    };
    assert_eq!(refused.status, 429);
    assert!(refused.json()["error"]["message"].as_str().is_some_and(|text| text.contains("tokens a minute")));
    assert!((20..=50).contains(&used), "{used} of 40: what a request will use is a guess until it ends");
}

#[tokio::test]
async fn who_sent_least_gets_the_next_place_and_a_class_goes_before_another() {
    let (folder, (worker, end)) = (tempfile::tempdir().expect("a folder"), held().await);
    let tenants = file(&folder, "[default]\nweight = 2\n");
    let given = [
        ("tenant_file", tenants.as_str()),
        ("tenant_header", "x-team"),
        ("max_concurrent_requests", "1"),
        ("queue_size", "10"),
        ("policy", "round_robin"),
    ];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let mut first = gateway.send("POST", "/v1/completions", &[("x-team", "a1")], BODY).await;
    first.read_until("data: 1").await;
    let mut waiting = Vec::new();
    for (team, class) in
        [("a1", "default"), ("a1", "default"), ("b2", "default"), ("b3", "bulk"), ("hot", "interactive")]
    {
        let headers = [("x-team", team), ("x-branchline-priority", class)];
        waiting.push(gateway.send("POST", "/v1/completions", &headers, BODY).await);
        let known = waiting.len();
        within("its place in the queue", async {
            while gateway.app.admission.as_ref().expect("a limit").waiting() < known {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
    end.send_replace(1);
    drop(first);
    for mut client in waiting {
        assert_eq!(client.answer().await.status, 200);
    }
    let order: Vec<String> = worker.record().seen.iter().skip(1).map(team).collect();
    assert_eq!(order, ["hot", "b2", "a1", "a1", "b3"]);
}

#[tokio::test]
async fn bodies_in_flight_are_bounded_over_all_requests_declared_or_not() {
    let (worker, end) = held().await;
    let gateway = Gateway::start(&[("max_bytes_in_flight", "1KiB")], &[worker.url()]).await;
    let padded = format!("{BODY}{}", " ".repeat(700));
    let mut first = gateway.send("POST", "/v1/completions", &[], &padded).await;
    first.read_until("data: 1").await;
    let refused = gateway.post("/v1/completions", &padded).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    let mut client = gateway.connect().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    client.write(format!("{head}300\r\n{}\r\n0\r\n\r\n", " ".repeat(0x300)).as_bytes()).await;
    assert_eq!(client.answer().await.status, 429, "nor may it come in chunks");
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200, "there is room for a small one");
    end.send_replace(1);
    drop(first);
    within("room", async {
        while gateway.post("/v1/completions", &padded).await.status != 200 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn work_whose_deadline_has_passed_never_reaches_a_worker() {
    let (worker, end) = held().await;
    let given = [("max_concurrent_requests", "1"), ("queue_timeout", "60s")];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let mut first = gateway.send("POST", "/v1/completions", &[], BODY).await;
    first.read_until("data: 1").await;
    let late = [("x-branchline-deadline-ms", "50")];
    let refused = gateway.call("POST", "/v1/completions", &late, BODY).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (504, Some("deadline_exceeded")));
    let nonsense = [("x-branchline-deadline-ms", "soon")];
    assert_eq!(gateway.call("POST", "/v1/completions", &nonsense, BODY).await.status, 400);
    assert_eq!(worker.record().seen.len(), 1);
    drop((first, end));
}

#[tokio::test]
async fn a_deadline_of_the_clients_reaches_the_engine() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let headers = [("x-branchline-deadline-ms", "5000")];
    let body = r#"{"prompt":[1,2,3],"max_tokens":2}"#;
    assert_eq!(gateway.call("POST", "/v1/completions", &headers, body).await.status, 200);
    let told =
        engine.submits()[0].request.as_ref().and_then(|request| request.deadline_ms).expect("a deadline");
    assert!((1..=5000).contains(&told), "{told}");
}
