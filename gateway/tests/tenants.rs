//! Tenants before a whole gateway: limits a minute, fair turns, classes, bytes in flight, deadlines.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::apis::say;
use crate::kit::{Gateway, options};
use branchline_gateway::http::InProcess;
use branchline_gateway::lifecycle::Server;
use branchline_testkit::{
    Act, EngineSetup, FakeEngine, ScriptedWorker, Seen, Step, chunk, event_stream, last_chunk, response,
    within,
};
use branchline_worker::proto::FinishReason;

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

/// A worker whose first stream goes on for as long as its client stays; the others end at once.
async fn held() -> ScriptedWorker {
    let count = Arc::new(AtomicUsize::new(0));
    let script = move |_: &Seen| {
        let mut steps = vec![event_stream(), chunk(b"data: 1\n\n")];
        if count.fetch_add(1, Ordering::SeqCst) == 0 {
            steps.push(Step::Hold);
        }
        steps.extend([chunk(b"data: [DONE]\n\n"), last_chunk()]);
        steps
    };
    ScriptedWorker::start(script).await.expect("a free port")
}

/// Waits until so many requests are in the queue.
async fn queued(gateway: &Gateway, count: usize) {
    let admission = gateway.app.admission.as_ref().expect("a limit");
    within("places in the queue", async {
        while admission.waiting() < count {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Waits until nobody holds anything any more: what was used is then charged.
async fn settled(gateway: &Gateway) {
    let admission = gateway.app.admission.as_ref().expect("a limit");
    within("the end of all requests", async {
        while admission.bytes() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_tenant_over_its_requests_a_minute_is_told_when_to_come_back_and_others_are_not() {
    let (folder, worker) = (tempfile::tempdir().expect("a folder"), plain().await);
    let tenants = file(&folder, "[tenants.\"auth:small\"]\nrequests_per_minute = 1\n");
    let given = [("tenant_file", tenants.as_str()), ("user_api_key", "small"), ("api_key", "boss")];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let ask = async |key| gateway.call("POST", "/v1/completions", &[("x-api-key", key)], BODY).await;
    assert_eq!(ask("small").await.status, 200);
    let refused = ask("small").await;
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (429, Some("resource_exhausted")));
    let wait: u64 = refused.header("retry-after").and_then(|text| text.parse().ok()).expect("a wait");
    assert!((1..=60).contains(&wait), "{wait}");
    for _ in 0..5 {
        assert_eq!(ask("boss").await.status, 200);
    }
    assert_eq!(worker.record().seen.len(), 6, "a refused request costs no worker anything");
    let page = gateway.call("GET", "/metrics", &[("x-api-key", "boss")], "").await.text();
    for told in [
        "branchline_router_errors_total{code=\"resource_exhausted\"} 1\n",
        "branchline_router_admission_refused_total{reason=\"allowance\"} 1\n",
        "branchline_router_admission_waiting 0\n",
    ] {
        assert!(page.contains(told), "{told}: {page}");
    }
    assert!(!page.contains("small"), "no label is a client's");
}

#[tokio::test]
async fn engines_tokens_are_counted_exactly() {
    let folder = tempfile::tempdir().expect("a folder");
    let tenants = file(&folder, "[default]\ntokens_per_minute = 40\n");
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    say(&engine, "ab", 1, FinishReason::Length);
    let gateway = Gateway::start(&[("tenant_file", tenants.as_str())], &[engine.url()]).await;
    let body = r#"{"prompt":[1,2,3,4,5,6,7,8],"max_tokens":2}"#;
    let (mut used, started) = (0.0, Instant::now());
    let refused = loop {
        let answer = gateway.post("/v1/completions", body).await;
        if answer.status != 200 {
            break answer;
        }
        used += answer.json()["usage"]["total_tokens"].as_f64().expect("a count");
        let allowed = 40.0 + started.elapsed().as_secs_f64() / 60.0 * 40.0;
        assert!(used <= allowed + 10.0, "{used} of {allowed}: only the last request may go over");
    };
    assert_eq!(refused.status, 429);
    assert!(refused.json()["error"]["message"].as_str().is_some_and(|text| text.contains("tokens a minute")));
    assert!(used >= 20.0, "{used} of 40: what a request will use is a guess only until it ends");
}

#[tokio::test]
async fn a_model_has_limits_of_its_own_whatever_it_is_called_and_whoever_serves_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let rule = |id: &str, model: &str, limit: &str| {
        format!(
            "[[default.model_rules]]\nrule_id = \"{id}\"\nmatcher = {{ type = \"exact\", value = \"{model}\" }}\n{limit}\n"
        )
    };
    let text = "[default]\nrequests_per_minute = 5\n".to_owned()
        + &rule("ours", "fake", "requests_per_minute = 1")
        + &rule("theirs", "m", "tokens_per_minute = 40");
    let tenants = file(&folder, &text);
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    say(&engine, "ab", 1, FinishReason::Length);
    let counted = |_: &Seen| vec![Step::Send(response(200, &[], br#"{"usage":{"total_tokens":90}}"#))];
    let worker = ScriptedWorker::start(counted).await.expect("a free port");
    let given = [("tenant_file", tenants.as_str()), ("model_alias", "other=fake")];
    let gateway = Gateway::start(&given, &[engine.url()]).await;
    let spec = serde_json::json!({"url": worker.url(), "models": ["m"]});
    let spec = serde_json::from_value::<branchline_worker::WorkerSpec>(spec).expect("a specification");
    gateway.app.workers.add(&gateway.app.fleet, spec).expect("a good worker");
    gateway.app.fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready())).await;
    let ask = async |model: &str| {
        let body = format!(r#"{{"model":"{model}","prompt":[1,2,3],"max_tokens":2}}"#);
        gateway.post("/v1/completions", &body).await
    };
    assert_eq!(ask("fake").await.status, 200);
    let refused = ask("other").await;
    let told = refused.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(
        refused.status == 429 && told.contains("1 requests a minute are allowed for model 'fake'"),
        "{told}"
    );
    assert!(refused.header("retry-after").is_some());
    assert_eq!((ask("m").await.status, ask("m").await.status), (200, 429), "90 tokens of 40 were used");
    // What a rule refused costs the tenant itself nothing: two of five are used.
    for _ in 0..4 {
        assert_eq!(ask("other").await.json()["error"]["message"].as_str(), Some(told.as_str()));
    }
    let page = gateway.get("/metrics").await.text();
    assert!(page.contains("branchline_router_admission_refused_total{reason=\"model\"} 6\n"), "{page}");
}

#[tokio::test]
async fn texts_to_embed_are_charged_as_well() {
    let folder = tempfile::tempdir().expect("a folder");
    let tenants = file(&folder, "[default]\ntokens_per_minute = 40\n");
    let mut setup = EngineSetup::default();
    setup.info.tasks = vec!["embed".to_owned()];
    setup.info.embedding_size = Some(4);
    let engine = FakeEngine::start(setup).await.expect("a free port");
    let gateway = Gateway::start(&[("tenant_file", tenants.as_str())], &[engine.url()]).await;
    let mut statuses = Vec::new();
    for _ in 0..8 {
        statuses.push(gateway.post("/v1/embeddings", r#"{"input":[1,2,3,4,5,6,7,8,9,10]}"#).await.status);
    }
    assert_eq!(statuses[0], 200);
    assert!(statuses.contains(&429), "eighty tokens of forty: {statuses:?}");
}

#[tokio::test]
async fn who_sent_least_gets_the_next_place_and_a_class_goes_before_another() {
    let (folder, worker) = (tempfile::tempdir().expect("a folder"), held().await);
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
        queued(&gateway, waiting.len()).await;
    }
    drop(first);
    for mut client in waiting {
        assert_eq!(client.answer().await.status, 200);
    }
    let order: Vec<String> = worker.record().seen.iter().skip(1).map(team).collect();
    assert_eq!(order, ["hot", "b2", "a1", "a1", "b3"]);
}

#[tokio::test]
async fn bodies_in_flight_are_bounded_over_all_requests_declared_or_not() {
    let worker = held().await;
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
    let huge = format!("{BODY}{}", " ".repeat(1024));
    assert_eq!(gateway.post("/v1/completions", &huge).await.status, 413, "there is never room for it");
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200, "there is room for a small one");
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
    let worker = held().await;
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
    drop(first);
}

#[tokio::test]
async fn a_bad_file_of_tenants_is_a_fault_of_the_start_and_a_changed_one_is_followed() {
    let (folder, worker) = (tempfile::tempdir().expect("a folder"), plain().await);
    let path = file(&folder, "[tenants.\"hunter2\"]\n");
    let given = [("tenant_file", path.as_str()), ("tenant_header", "x-team")];
    let fault = Server::bind(options(&given, &[])).await.err().expect("a fault").to_string();
    assert!(fault.contains("tenant_file") && !fault.contains("hunter2"), "{fault}");
    file(&folder, "[tenants.\"header:a\"]\nrequests_per_minute = 0.001\n");
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let ask = async |team| gateway.call("POST", "/v1/completions", &[("x-team", team)], BODY).await.status;
    assert_eq!((ask("a").await, ask("a").await), (200, 429));
    for team in ["unknown", "unknown", ""] {
        assert_eq!(ask(team).await, 200, "{team:?} has the default, which limits nothing");
    }
    let until = async |team, status| {
        within("the new file", async {
            while ask(team).await != status {
                tokio::task::yield_now().await;
            }
        })
        .await;
    };
    file(&folder, "[default]\nrequests_per_minute = 0.001\n[tenants.\"header:a\"]\nweight = 2\n");
    until("a", 200).await;
    until("unknown", 429).await;
    file(&folder, "[default]\nweight = 0\n");
    assert_eq!((ask("a").await, ask("unknown").await), (200, 429), "the last good one stays");
    file(&folder, "");
    until("unknown", 200).await;
}

#[tokio::test]
async fn a_tenant_of_large_requests_gets_fewer_turns_than_one_of_small_ones() {
    let worker = held().await;
    let given = [
        ("tenant_header", "x-team"),
        ("max_concurrent_requests", "1"),
        ("queue_size", "40"),
        ("queue_timeout", "600s"),
    ];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let mut first = gateway.send("POST", "/v1/completions", &[("x-team", "first")], BODY).await;
    first.read_until("data: 1").await;
    let large = format!("{BODY}{}", " ".repeat(20 * BODY.len()));
    let mut waiting = Vec::new();
    for (team, body) in [("large", large.as_str()), ("small", BODY)] {
        for _ in 0..12 {
            waiting.push(gateway.send("POST", "/v1/completions", &[("x-team", team)], body).await);
            queued(&gateway, waiting.len()).await;
        }
    }
    drop(first);
    for client in &mut waiting {
        assert_eq!(client.answer().await.status, 200);
    }
    let order: Vec<String> = worker.record().seen.iter().skip(1).map(team).collect();
    let early = order[..12].iter().filter(|team| *team == "large").count();
    assert!((1..=2).contains(&early), "it came first, and its twelve are twenty times as large: {order:?}");
    assert_eq!(order.len(), 24, "nobody is left out");
}

#[tokio::test]
async fn tokens_of_a_client_who_left_in_the_middle_are_charged() {
    let folder = tempfile::tempdir().expect("a folder");
    let tenants = file(&folder, "[default]\ntokens_per_minute = 100\n");
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    engine.script(|_| {
        vec![Act::tokens(&[65; 400], "All of it."), Act::Wait(std::time::Duration::from_secs(600))]
    });
    let gateway = Gateway::start(&[("tenant_file", tenants.as_str())], &[engine.url()]).await;
    let body = r#"{"prompt":[1,2,3],"max_tokens":1000,"stream":true}"#;
    let mut client = gateway.send("POST", "/v1/completions", &[], body).await;
    client.read_until("All of it.").await;
    drop(client);
    settled(&gateway).await;
    let refused = gateway.post("/v1/completions", body).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    let wait: u64 = refused.header("retry-after").and_then(|text| text.parse().ok()).expect("a wait");
    assert!((60..=240).contains(&wait), "three minutes' tokens are owed: {wait}");
}

#[tokio::test]
async fn callers_in_the_process_take_places_as_clients_do() {
    let worker = held().await;
    let given = [("max_concurrent_requests", "1"), ("queue_size", "0")];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let mut first = gateway.send("POST", "/v1/completions", &[], BODY).await;
    first.read_until("data: 1").await;
    let own = InProcess::new(&gateway.app);
    let request = http::Request::post("/v1/completions").body(BODY.into()).expect("a request");
    assert_eq!(own.call(request).await.status(), 429, "there is one door");
    drop(first);
}

#[tokio::test]
async fn a_deadline_of_the_clients_reaches_the_engine() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    say(&engine, "ab", 1, FinishReason::Length);
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    let headers = [("x-branchline-deadline-ms", "600000")];
    let body = r#"{"prompt":[1,2,3],"max_tokens":2}"#;
    assert_eq!(gateway.call("POST", "/v1/completions", &headers, body).await.status, 200);
    let told =
        engine.submits()[0].request.as_ref().and_then(|request| request.deadline_ms).expect("a deadline");
    assert!((1..=600_000).contains(&told), "{told}");
}
