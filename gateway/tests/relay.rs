//! The relay before scripted HTTP workers: bytes, retries, broken streams, leaving clients.

use std::time::Duration;

use crate::kit::Gateway;
use branchline_testkit::{ScriptedWorker, Seen, Step, chunk, event_stream, last_chunk, response};

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}"#;
const FIRST: &str = "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"The answer\"},\"finish_reason\":null}]}\n\n";

async fn worker(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> ScriptedWorker {
    ScriptedWorker::start(script).await.expect("a free port")
}

/// A gateway before one worker that streams these pieces, then does `end`.
async fn streaming(
    pieces: Vec<Vec<u8>>,
    end: Vec<Step>,
    given: &[(&str, &str)],
) -> (ScriptedWorker, Gateway) {
    let worker = worker(move |_| {
        let mut steps = vec![event_stream()];
        for piece in &pieces {
            steps.push(chunk(piece));
            steps.push(Step::Pause(Duration::from_millis(20)));
        }
        steps.extend(end.clone());
        steps
    })
    .await;
    let gateway = Gateway::start(given, &[worker.url()]).await;
    (worker, gateway)
}

fn texts(pieces: &[&str]) -> Vec<Vec<u8>> {
    pieces.iter().map(|piece| piece.as_bytes().to_vec()).collect()
}

#[tokio::test]
async fn stream_done_inside_payload_is_relayed_byte_for_byte() {
    let pieces = [
        "data: {\"choices\":[{\"delta\":{\"arguments\":\"echo ",
        "data: [DONE]\"}}]}\n\n",
        "data: {\"i",
        "d\":\"c1\",\"choices\":[{\"delta\":{\"arguments\":\" end\"}}]}\n\ndata: {\"id\":\"c1\",\"choices\":[]}\n\n",
        "data: [D",
        "ONE]\n\n",
    ];
    let (worker, gateway) = streaming(texts(&pieces), vec![last_chunk()], &[]).await;
    let answer = gateway.post("/v1/chat/completions", CHAT).await;
    assert_eq!((answer.text(), answer.complete), (pieces.concat(), true));
    assert_eq!(answer.events().len(), 4);
    assert_eq!(worker.record().left, 0);
}

#[tokio::test]
async fn stream_utf8_cut_by_network_is_relayed_byte_for_byte() {
    let pieces =
        [&b"data: {\"content\":\"\xe6"[..], b"\x9d", b"\xb1\xe4", b"\xba\xac\"}\n\n", b"data: [DONE]\n\n"];
    let whole = pieces.concat();
    let (_worker, gateway) =
        streaming(pieces.iter().map(|p| p.to_vec()).collect(), vec![last_chunk()], &[]).await;
    let answer = gateway.post("/v1/chat/completions", CHAT).await;
    assert_eq!(answer.body, whole);
    assert!(answer.text().contains("東京"));
}

/// The last event is an error, there is one of them, and nothing says that the stream ended well.
fn assert_broken(answer: &crate::kit::Answer, before: &[&str]) {
    let events = answer.events();
    assert!(answer.complete, "{}", answer.text());
    assert_eq!(events.len(), before.len() + 1, "{events:?}");
    assert_eq!(events[..before.len()], *before, "{events:?}");
    let error: serde_json::Value =
        serde_json::from_str(&events[before.len()]).expect("the error event is JSON");
    assert!(error["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
    assert!(error["error"]["type"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
    assert!(!answer.text().contains("[DONE]"), "{}", answer.text());
}

#[tokio::test]
async fn stream_upstream_dies_mid_way_ends_in_one_error_event() {
    let event = FIRST.trim_end().trim_start_matches("data: ");
    for (end, given) in [
        (vec![Step::Reset], vec![]),
        (vec![Step::Close], vec![]),
        (vec![last_chunk()], vec![]),
        (vec![Step::Hold], vec![("idle_timeout", "100ms")]),
    ] {
        let (worker, gateway) = streaming(texts(&[FIRST, FIRST]), end, &given).await;
        let answer = gateway.post("/v1/chat/completions", CHAT).await;
        assert_broken(&answer, &[event, event]);
        assert_eq!(worker.record().seen.len(), 1, "no retry after the first byte");
        assert_eq!(gateway.load(), 0);
    }
}

#[tokio::test]
async fn stream_error_after_half_an_event_withholds_the_half() {
    let half = "data: {\"id\":\"c1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"par";
    let (_worker, gateway) = streaming(texts(&[FIRST, half]), vec![Step::Reset], &[]).await;
    let answer = gateway.post("/v1/chat/completions", CHAT).await;
    assert_broken(&answer, &[FIRST.trim_end().trim_start_matches("data: ")]);
    assert!(!answer.text().contains("\"content\":\"par"));
}

#[tokio::test]
async fn stream_end_mark_but_open_socket_ends_the_answer() {
    let pieces = [FIRST, "data: [DO", "NE]\n\n"];
    let (worker, gateway) = streaming(texts(&pieces), vec![Step::Hold], &[]).await;
    let started = std::time::Instant::now();
    let answer = gateway.post("/v1/chat/completions", CHAT).await;
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!((answer.text(), answer.complete), (pieces.concat(), true));
    assert_eq!(gateway.load(), 0);
    assert!(worker.wait_for(|record| record.left == 1).await.is_some(), "the stuck connection is given up");
}

#[tokio::test]
async fn a_finished_stream_leaves_its_connection_for_the_next_request() {
    let (worker, gateway) = streaming(texts(&[FIRST, "data: [DONE]\n\n"]), vec![last_chunk()], &[]).await;
    for _ in 0..3 {
        gateway.post("/v1/chat/completions", CHAT).await;
    }
    let record = worker.record();
    assert_eq!(record.seen.len(), 3);
    // One of a probe each for health and models, and one of all three streams; a probe may come twice.
    assert!(record.accepted <= 5, "{}", record.accepted);
    assert_eq!(record.left, 0);
}

#[tokio::test]
async fn stream_terminal_event_per_family_says_that_it_failed() {
    for (path, kind) in [("/v1/responses", "response.failed"), ("/v1/messages", "error")] {
        let pieces = ["event: a\ndata: {\"type\":\"a\"}\n\n", "event: b\ndata: {\"type\":\"b\"}\n\n"];
        let (_worker, gateway) = streaming(texts(&pieces), vec![Step::Reset], &[]).await;
        let answer = gateway.post(path, r#"{"model":"m","input":"x","stream":true}"#).await;
        assert!(answer.text().contains(&format!("event: {kind}\n")), "{}", answer.text());
        let last: serde_json::Value =
            serde_json::from_str(answer.events().last().expect("events")).expect("JSON");
        assert_eq!(last["type"], kind);
        assert!(!answer.text().contains("completed"));
    }
    let (_worker, gateway) = streaming(texts(&["data: {\"text\":\"a\"}\n\n"]), vec![Step::Reset], &[]).await;
    assert_broken(&gateway.post("/generate", r#"{"text":"x","stream":true}"#).await, &["{\"text\":\"a\"}"]);
}

#[tokio::test]
async fn an_answer_that_is_no_stream_breaks_the_clients_connection_when_it_breaks() {
    let worker = worker(|_| {
        let head =
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"half\":"
                .to_vec();
        vec![Step::Send(head), Step::Pause(Duration::from_millis(20)), Step::Reset]
    })
    .await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let answer = gateway.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#).await;
    assert!(!answer.complete, "{}", answer.text());
}

#[tokio::test]
async fn stream_slow_reader_slows_the_worker_down() {
    let event = format!("data: {}\n\n", "x".repeat(16 * 1024)).into_bytes();
    let framed = {
        let mut f = format!("{:x}\r\n", event.len()).into_bytes();
        f.extend(&event);
        f.extend(b"\r\n");
        f
    };
    let worker = worker(move |_| vec![event_stream(), Step::Flood(framed.clone())]).await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let mut client = gateway.send("POST", "/v1/chat/completions", &[], CHAT).await;
    client.read_until("data: x").await;
    let taken = worker.wait_for_still(Duration::from_millis(300)).await;
    assert!(taken < 32 << 20, "{taken} bytes taken for a client that reads none");
    drop(client);
    assert!(worker.wait_for(|record| record.left == 1).await.is_some());
}

#[tokio::test]
async fn abort_before_response_headers_reaches_the_worker() {
    for stream in ["true", "false"] {
        let worker = worker(|_| vec![Step::Hold]).await;
        let gateway = Gateway::start(&[], &[worker.url()]).await;
        let body = format!(r#"{{"model":"m","messages":[],"stream":{stream}}}"#);
        let client = gateway.send("POST", "/v1/chat/completions", &[], &body).await;
        worker.wait_for(|record| record.seen.len() == 1).await.expect("the request arrives");
        drop(client);
        worker.wait_for(|record| record.left == 1).await.expect("its connection is closed");
        assert_eq!(gateway.load(), 0);
        assert!(gateway.app.fleet.workers()[0].is_ready(), "leaving is not the worker's fault");
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_silent_stream_is_noticed() {
    let (worker, gateway) = streaming(texts(&[FIRST]), vec![Step::Hold], &[]).await;
    let mut client = gateway.send("POST", "/v1/chat/completions", &[], CHAT).await;
    client.read_until("The answer").await;
    assert_eq!(gateway.load(), 1);
    drop(client);
    worker.wait_for(|record| record.left == 1).await.expect("its connection is closed");
    assert_eq!(gateway.load(), 0);
    assert!(
        gateway.get("/metrics").await.text().contains("branchline_router_aborts_total{reason=\"client\"} 1")
    );
}

#[tokio::test]
async fn a_worker_that_resets_before_its_head_is_left_for_another() {
    let bad = worker(|_| vec![Step::Reset]).await;
    let good = worker(|_| vec![Step::Send(response(200, &[], b"{\"ok\":1}"))]).await;
    let gateway = Gateway::start(&[("policy", "round_robin")], &[bad.url(), good.url()]).await;
    for _ in 0..4 {
        let answer = gateway.post("/v1/completions", r#"{"prompt":"x"}"#).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "{\"ok\":1}"));
    }
    assert!(!bad.record().seen.is_empty());
    assert!(
        gateway.get("/metrics").await.text().contains("branchline_router_retries_total{reason=\"broken\"}")
    );
}

#[tokio::test]
async fn each_worker_is_tried_at_most_once_and_the_last_failure_is_told() {
    let workers = [worker(|_| vec![Step::Reset]).await, worker(|_| vec![Step::Reset]).await];
    let gateway = Gateway::start(&[("policy", "random")], &workers.each_ref().map(ScriptedWorker::url)).await;
    let answer = gateway.post("/v1/completions", r#"{"prompt":"x"}"#).await;
    assert_eq!(answer.status, 502);
    assert_eq!(answer.json()["error"]["code"], "upstream_failed");
    assert_eq!(workers.iter().map(|worker| worker.record().seen.len()).collect::<Vec<_>>(), [1, 1]);
}

#[tokio::test]
async fn a_busy_workers_request_goes_elsewhere_and_its_answer_passes_if_all_are_busy() {
    let busy =
        || worker(|_| vec![Step::Send(response(503, &[("retry-after", "7"), ("x-why", "full")], b"busy"))]);
    let (first, second) = (busy().await, busy().await);
    let good = worker(|_| vec![Step::Send(response(200, &[], b"fine"))]).await;
    let gateway = Gateway::start(&[("policy", "round_robin")], &[first.url(), good.url()]).await;
    for _ in 0..3 {
        assert_eq!(gateway.post("/v1/completions", "{}").await.text(), "fine");
    }
    let gateway = Gateway::start(&[], &[first.url(), second.url()]).await;
    let answer = gateway.post("/v1/completions", "{}").await;
    assert_eq!(
        (answer.status, answer.header("retry-after"), answer.text().as_str()),
        (503, Some("7"), "busy")
    );
    assert_eq!(gateway.load(), 0);
    assert!(gateway.app.fleet.workers().iter().all(|worker| worker.is_ready()), "pushback is not a failure");
}

#[tokio::test]
async fn a_client_error_of_a_worker_passes_untouched() {
    let bad = worker(|_| {
        vec![Step::Send(response(422, &[("content-type", "application/problem+json")], b"{\"odd\": 1}"))]
    })
    .await;
    let gateway = Gateway::start(&[], &[bad.url()]).await;
    let answer = gateway.post("/v1/completions", "{\"prompt\": }").await;
    assert_eq!((answer.status, answer.text().as_str()), (422, "{\"odd\": 1}"));
    assert_eq!(answer.header("content-type"), Some("application/problem+json"));
    assert_eq!(bad.record().seen.len(), 1);
}

#[tokio::test]
async fn request_and_response_pass_byte_for_byte_with_their_headers() {
    let echo = worker(|_| {
        let headers = [
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("x-odd", "yes"),
            ("connection", "keep-alive, x-hop"),
            ("x-hop", "1"),
        ];
        vec![Step::Send(response(201, &headers, b"\x00\xff{}"))]
    })
    .await;
    let gateway = Gateway::start(&[], &[echo.url()]).await;
    let body = "{ \"model\" : \"m\",\"unknown\": 1.50, \"prompt\":\"\u{e9}\"  }";
    let headers = [
        ("x-custom", "kept"),
        ("authorization", "Bearer theirs"),
        ("te", "trailers"),
        ("x-request-id", "r1"),
    ];
    let answer = gateway.call("POST", "/v1/completions?a=%20b", &headers, body).await;
    let seen = echo.record().seen.remove(0);
    assert_eq!((seen.method.as_str(), seen.target.as_str()), ("POST", "/v1/completions?a=%20b"));
    assert_eq!(seen.body, body.as_bytes());
    assert_eq!((seen.header("x-custom"), seen.header("x-request-id")), (Some("kept"), Some("r1")));
    assert_eq!(seen.header("authorization"), Some("Bearer theirs"));
    assert_eq!((seen.header("te"), seen.header("connection")), (None, None));
    assert_eq!(seen.header("host"), echo.url().strip_prefix("http://"));
    let cookies: Vec<_> = answer
        .headers
        .iter()
        .filter(|(name, _)| name == "set-cookie")
        .map(|(_, value)| value.as_str())
        .collect();
    assert_eq!((answer.status, cookies), (201, vec!["a=1", "b=2"]));
    assert_eq!((answer.header("x-odd"), answer.header("x-hop")), (Some("yes"), None));
    assert_eq!(answer.body, b"\x00\xff{}");
    // hyper drops a body of known length without asking for its end: that is no client leaving.
    assert!(!gateway.get("/metrics").await.text().contains("aborts_total{reason=\"client\"}"));
}

#[tokio::test]
async fn a_key_of_the_gateway_stays_here_and_the_workers_token_is_sent() {
    let echo = worker(|_| vec![Step::Send(response(200, &[], b"{}"))]).await;
    let gateway = Gateway::start(&[("api_key", "ours"), ("worker_token", "theirs")], &[echo.url()]).await;
    let headers = [("authorization", "Bearer ours"), ("x-api-key", "ours")];
    assert_eq!(gateway.call("POST", "/v1/completions", &headers, "{}").await.status, 200);
    let seen = echo.record().seen.remove(0);
    assert_eq!((seen.header("authorization"), seen.header("x-api-key")), (Some("Bearer theirs"), None));
}

#[tokio::test]
async fn api_default_temperature_is_not_invented() {
    let echo = worker(|_| vec![Step::Send(response(200, &[], b"{}"))]).await;
    let gateway = Gateway::start(&[], &[echo.url()]).await;
    let plain = r#"{"messages":[{"role":"user","content":"x"}]}"#;
    let explicit = r#"{"messages":[{"role":"user","content":"x"}],"temperature":0,"top_p":1,"top_k":-1}"#;
    for body in [plain, explicit] {
        gateway.post("/v1/chat/completions", body).await;
        assert_eq!(echo.record().seen.last().map(|seen| seen.body.clone()), Some(body.as_bytes().to_vec()));
    }
}

#[tokio::test]
async fn abort_fan_out_at_gateway_reaches_the_worker_that_runs_it() {
    let mut workers = Vec::new();
    for _ in 0..3 {
        workers.push(worker(|_| vec![Step::Send(response(200, &[], b""))]).await);
    }
    let urls: Vec<_> = workers.iter().map(ScriptedWorker::url).collect();
    let gateway = Gateway::start(&[], &urls).await;
    for rid in ["r7", "unknown"] {
        let answer = gateway.post("/abort_request", &format!(r#"{{"rid":"{rid}"}}"#)).await;
        assert_eq!(answer.status, 200);
        for worker in &workers {
            let got = worker.record().seen;
            let own: Vec<_> = got
                .iter()
                .filter(|seen| String::from_utf8_lossy(&seen.body).contains(&format!("\"{rid}\"")))
                .collect();
            assert_eq!((own.len(), own[0].target.as_str()), (1, "/abort_request"));
        }
    }
    assert_eq!(gateway.post("/abort_request", "{}").await.status, 400);
}

#[tokio::test]
async fn first_token_and_request_timeouts_end_a_wait() {
    let silent = worker(|_| vec![Step::Hold]).await;
    let good = worker(|_| vec![Step::Send(response(200, &[], b"fine"))]).await;
    let urls = [silent.url(), good.url()];
    let gateway = Gateway::start(&[("first_token_timeout", "50ms"), ("policy", "round_robin")], &urls).await;
    for _ in 0..2 {
        assert_eq!(gateway.post("/v1/completions", "{}").await.text(), "fine");
    }
    let gateway = Gateway::start(&[("request_timeout", "50ms")], &[silent.url()]).await;
    let answer = gateway.post("/v1/completions", "{}").await;
    assert_eq!((answer.status, answer.json()["error"]["code"].as_str()), (504, Some("deadline_exceeded")));
}

#[tokio::test]
async fn without_a_ready_worker_the_answer_says_when_to_come_back() {
    let gateway = Gateway::start_cold(&[], &["http://127.0.0.1:1".to_owned()]).await;
    let answer = gateway.post("/v1/completions", "{}").await;
    assert_eq!(answer.status, 503);
    assert!(answer.header("retry-after").is_some());
    let gateway = Gateway::start_cold(&[], &[]).await;
    assert_eq!(gateway.post("/v1/completions", r#"{"model":"m","prompt":"x"}"#).await.status, 503);
}

#[tokio::test]
async fn names_that_mean_the_first_model_are_replaced_once_it_is_known_and_pass_before() {
    for name in ["default", ""] {
        let body = format!(r#"{{ "prompt":"x", "model" : "{name}" , "n":1.50}}"#);
        for (known, sent) in
            [(true, body.replace(&format!(r#""{name}" "#), r#""big/one" "#)), (false, body.clone())]
        {
            let echo = worker(|_| vec![Step::Send(response(200, &[], b"{}"))]).await;
            if known {
                echo.serve_models(&["big/one", "other"]);
            }
            let gateway = Gateway::start(&[], &[echo.url()]).await;
            if known {
                let told = gateway.app.fleet.wait_until(|fleet| !fleet.names().is_empty());
                tokio::time::timeout(crate::kit::PATIENCE, told).await.expect("the models are told");
            }
            let answer = gateway.post("/v1/completions", &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let seen = echo.record().seen.pop().expect("it arrives");
            assert_eq!(String::from_utf8_lossy(&seen.body), sent);
        }
    }
}

#[tokio::test]
async fn a_stream_of_known_length_that_breaks_still_ends_in_a_whole_error_event() {
    let worker = worker(|_| {
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{FIRST}",
            FIRST.len()
        );
        vec![Step::Send(head.into_bytes())]
    })
    .await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let answer = gateway.post("/v1/chat/completions", CHAT).await;
    assert_eq!(answer.header("content-length"), None);
    assert_broken(&answer, &[FIRST.trim_end().trim_start_matches("data: ")]);
}

#[tokio::test]
async fn a_failure_that_the_worker_told_itself_is_told_once() {
    let told = "data: {\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\"}}\n\n";
    for end in [vec![last_chunk()], vec![Step::Reset]] {
        let (_worker, gateway) = streaming(texts(&[FIRST, told]), end, &[]).await;
        let answer = gateway.post("/v1/chat/completions", CHAT).await;
        assert_eq!((answer.text(), answer.complete), ([FIRST, told].concat(), true));
    }
    // Text that only speaks of errors, or an empty one, is no failure.
    let odd = "data: {\"content\":\"{\\\"error\\\":1}\",\"error\":null,\"x\":{\"error\":1}}\n\n";
    let (_worker, gateway) = streaming(texts(&[odd]), vec![last_chunk()], &[]).await;
    let answer = gateway.post("/v1/chat/completions", CHAT).await;
    assert_broken(&answer, &[odd.trim_end().trim_start_matches("data: ")]);
}

#[tokio::test]
async fn operators_paths_of_a_worker_can_not_be_reached_through_the_gateway() {
    let echo = worker(|_| vec![Step::Send(response(200, &[], b"{}"))]).await;
    let gateway = Gateway::start(&[], &[echo.url()]).await;
    for path in ["/update_weights_from_disk", "/sleep", "/v1/../sleep", "/v1/%2e%2e/sleep"] {
        assert_eq!(gateway.post(path, "{}").await.status, 404, "{path}");
    }
    assert!(echo.record().seen.is_empty());
    assert_eq!(gateway.post("/v1/embeddings", r#"{"input":"x"}"#).await.status, 200);
    assert_eq!(echo.record().seen.len(), 1);
}

#[tokio::test]
async fn bad_bodies_of_an_abort_and_bad_model_paths_are_named() {
    let gateway = Gateway::start_cold(&[], &[]).await;
    for (body, part) in
        [(r#"{"rid":5}"#, "`rid`"), ("[]", "object"), ("", "the body is empty"), ("{", "JSON")]
    {
        let answer = gateway.post("/abort_request", body).await;
        let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
        assert!(answer.status == 400 && message.contains(part), "{} {message}", answer.status);
    }
    let answer = gateway.get("/v1/models/%ff").await;
    assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("model")));
}
