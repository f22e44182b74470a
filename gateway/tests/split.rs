//! Prefill and decode workers before the gateway: SGLang's wire and vLLM's, and what becomes of a half that fails.

use std::time::Duration;

use branchline_testkit::{ScriptedWorker, Seen, Step, chunk, event_stream, last_chunk, response, within};
use branchline_worker::{Phase, WorkerSpec};
use serde_json::{Value, json};

use crate::kit::Gateway;

const LONG: &str = "a prompt of many words, for what is short is not worth two workers";

async fn worker(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> ScriptedWorker {
    ScriptedWorker::start(script).await.expect("a free port")
}

fn body(seen: &Seen) -> Value {
    serde_json::from_slice(&seen.body).expect("JSON")
}

fn answer(status: u16, body: &Value) -> Vec<Step> {
    vec![Step::Send(response(status, &[("content-type", "application/json")], body.to_string().as_bytes()))]
}

fn spec(worker: &ScriptedWorker, role: &str, runtime: &str) -> WorkerSpec {
    let given = json!({
        "url": worker.url(), "worker_type": role, "runtime_type": runtime, "model_id": "m",
        "bootstrap_port": if role == "prefill" { json!(8998) } else { Value::Null },
    });
    serde_json::from_value(given).expect("a specification")
}

/// A gateway before these workers, all ready.
async fn gateway(workers: &[WorkerSpec], given: &[(&str, &str)]) -> Gateway {
    let mut given = given.to_vec();
    given.push(("pd_bypass_tokens", "0"));
    let gateway = Gateway::start_cold(&given, &[]).await;
    for spec in workers {
        gateway.app.fleet.register(spec.clone()).expect("a good specification");
    }
    let all = |fleet: &branchline_worker::Fleet| fleet.workers().iter().all(|worker| worker.is_ready());
    within("readiness", gateway.app.fleet.wait_until(all)).await;
    gateway
}

fn request(stream: bool) -> String {
    json!({"model": "m", "prompt": LONG, "stream": stream}).to_string()
}

fn phase(gateway: &Gateway, url: &str) -> (Phase, u64) {
    let workers = gateway.app.fleet.workers();
    let worker = workers.iter().find(|worker| worker.url == url).expect("it is in the fleet");
    (worker.breaker(), worker.in_flight())
}

/// No room, no load: whatever the request came to.
async fn is_clean(gateway: &Gateway) {
    let clean = || gateway.app.rooms.is_empty() && gateway.load() == 0;
    within("an end", async {
        while !clean() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

fn text(words: &str) -> Value {
    json!({"choices": [{"index": 0, "text": words, "finish_reason": "stop"}]})
}

#[tokio::test]
async fn both_halves_get_the_clients_bytes_and_the_same_room_and_the_decode_halfs_answer_is_the_answer() {
    let prefill = worker(|_| answer(200, &text("of nobody's interest"))).await;
    let decode = worker(|_| answer(200, &text("four"))).await;
    let gateway =
        gateway(&[spec(&prefill, "prefill", "sglang"), spec(&decode, "decode", "sglang")], &[]).await;
    let sent = r#"{"model":"m", "temperature":0.10, "prompt":"two and two","unknown":{"kept":1e-0}}"#;
    let got = gateway.post("/v1/completions", sent).await;
    assert_eq!((got.status, got.json()), (200, text("four")));
    let (one, other) = (prefill.record().seen[0].clone(), decode.record().seen[0].clone());
    assert_eq!(body(&one), body(&other));
    assert!(one.body.starts_with(&sent.as_bytes()[..sent.len() - 1]), "every byte of the client's");
    let told = body(&one);
    assert_eq!((&told["bootstrap_host"], &told["bootstrap_port"]), (&json!("127.0.0.1"), &json!(8998)));
    assert!(told["bootstrap_room"].as_u64().is_some_and(|room| room < 1 << 63));
    is_clean(&gateway).await;
}

#[tokio::test]
async fn a_list_of_prompts_gets_a_room_each() {
    let prefill = worker(|_| answer(200, &json!([]))).await;
    let decode = worker(|_| answer(200, &json!([]))).await;
    let gateway =
        gateway(&[spec(&prefill, "prefill", "sglang"), spec(&decode, "decode", "sglang")], &[]).await;
    let sent = json!({"model": "m", "text": ["one", "two", "three"]}).to_string();
    assert_eq!(gateway.post("/generate", &sent).await.status, 200);
    let told = body(&decode.record().seen[0]);
    assert_eq!(told["bootstrap_host"], json!(vec!["127.0.0.1"; 3]));
    let rooms = told["bootstrap_room"].as_array().expect("a list");
    assert!(rooms.len() == 3 && rooms[0] != rooms[1] && rooms[1] != rooms[2]);
    assert_eq!(told["rid"].as_array().map(Vec::len), Some(3));
}

#[tokio::test]
async fn pd_prefill_refuses_ends_the_pair_at_once_and_charges_nobody() {
    for stream in [false, true] {
        for silence in [vec![Step::Hold], vec![event_stream(), Step::Hold]] {
            let prefill = worker(|_| {
                let mut steps = vec![Step::Pause(Duration::from_millis(50))];
                steps.extend(answer(400, &json!({"error": {"message": "input too long"}})));
                steps
            })
            .await;
            let decode = worker(move |_| silence.clone()).await;
            decode.on("/abort_request", vec![Step::Send(response(200, &[], b""))]);
            let halves = [spec(&prefill, "prefill", "sglang"), spec(&decode, "decode", "sglang")];
            let gateway = gateway(&halves, &[("breaker_failures", "1")]).await;
            let got = gateway.post("/v1/completions", &request(stream)).await;
            assert_eq!(got.status, 400);
            assert!(got.text().contains("input too long"), "{}", got.text());
            let record = decode.wait_for(|record| record.left == 1).await.expect("it is left");
            let record = match record.requests("/abort_request").len() {
                1 => record,
                _ => decode
                    .wait_for(|record| record.requests("/abort_request").len() == 1)
                    .await
                    .expect("it is told"),
            };
            let rid = body(record.requests("/v1/completions")[0])["rid"].clone();
            assert_eq!(body(record.requests("/abort_request")[0])["rid"], rid);
            assert_eq!(prefill.record().seen.len(), 1, "one attempt");
            for url in [prefill.url(), decode.url()] {
                assert_eq!(phase(&gateway, &url).0, Phase::Closed);
            }
            is_clean(&gateway).await;
        }
    }
}

#[tokio::test]
async fn pd_decode_unreachable_sets_the_prefill_half_free_and_tries_another_with_a_new_room() {
    let prefill = worker(|seen| {
        // It answers only once a decode half has come to the same room; the first one never does.
        let room = body(seen)["bootstrap_room"].clone();
        match FIRST.get_or_init(|| room.clone()) == &room {
            true => vec![Step::Hold],
            false => answer(200, &json!({})),
        }
    })
    .await;
    static FIRST: std::sync::OnceLock<Value> = std::sync::OnceLock::new();
    let (gone, works) = (worker(|_| vec![Step::Hold]).await, worker(|_| answer(200, &text("here"))).await);
    let mut preferred = spec(&gone, "decode", "sglang");
    preferred.priority = 90;
    let halves = [spec(&prefill, "prefill", "sglang"), preferred, spec(&works, "decode", "sglang")];
    let gateway = gateway(&halves, &[("breaker_failures", "1"), ("request_timeout", "1800s")]).await;
    gone.stop();
    within("its end", gone.wait_for(|record| !record.listening)).await;
    let got = gateway.post("/v1/completions", &request(false)).await;
    assert_eq!((got.status, got.json()), (200, text("here")));
    let record = prefill.wait_for(|record| record.left == 1).await.expect("the first half is set free");
    let rooms: Vec<_> = record.seen.iter().map(|seen| body(seen)["bootstrap_room"].clone()).collect();
    assert!(rooms.len() == 2 && rooms[0] != rooms[1]);
    let phases = [prefill.url(), gone.url(), works.url()].map(|url| phase(&gateway, &url).0);
    assert_eq!(phases, [Phase::Closed, Phase::Open, Phase::Closed]);
    is_clean(&gateway).await;
}

#[tokio::test]
async fn pd_open_breaker_sends_no_half_and_one_probe_goes_to_the_pair() {
    let prefill = worker(|_| answer(200, &json!({}))).await;
    // As a real one, it has nothing to say before the pages have come.
    let decode =
        worker(|_| vec![Step::Pause(Duration::from_millis(100)), answer(200, &text("yes")).remove(0)]).await;
    let halves = [spec(&prefill, "prefill", "sglang"), spec(&decode, "decode", "sglang")];
    let given = [("breaker_failures", "1"), ("breaker_open", "300ms"), ("breaker_successes", "1")];
    let gateway = gateway(&halves, &given).await;
    prefill.on("/v1/completions", vec![Step::Reset]);
    assert_eq!(gateway.post("/v1/completions", &request(false)).await.status, 502);
    assert_eq!(phase(&gateway, &prefill.url()).0, Phase::Open);
    let before = decode.record().requests("/v1/completions").len();
    for _ in 0..5 {
        assert_eq!(gateway.post("/v1/completions", &request(false)).await.status, 503);
    }
    assert_eq!(decode.record().requests("/v1/completions").len(), before);
    assert_eq!(phase(&gateway, &decode.url()).0, Phase::Closed);
    prefill.on("/v1/completions", answer(200, &json!({})));
    within("the breaker's time", async {
        while gateway.post("/v1/completions", &request(false)).await.status != 200 {}
    })
    .await;
    assert_eq!(phase(&gateway, &prefill.url()).0, Phase::Closed);
}

#[tokio::test]
async fn a_dead_prefill_worker_costs_no_request_while_there_is_another() {
    let dead = worker(|_| vec![Step::Pause(Duration::from_millis(20)), Step::Reset]).await;
    let (prefill, decode) = (
        worker(|_| answer(200, &json!({}))).await,
        worker(|_| vec![Step::Pause(Duration::from_millis(100)), answer(200, &text("yes")).remove(0)]).await,
    );
    let mut first = spec(&dead, "prefill", "sglang");
    first.priority = 90;
    let halves = [first, spec(&prefill, "prefill", "sglang"), spec(&decode, "decode", "sglang")];
    let gateway = gateway(&halves, &[]).await;
    let got = gateway.post("/v1/completions", &request(false)).await;
    assert_eq!((got.status, got.json()), (200, text("yes")));
    assert_eq!(dead.record().seen.len(), 1);
    is_clean(&gateway).await;
}

#[tokio::test]
async fn the_decode_halfs_first_bytes_flow_while_the_prefill_half_has_not_answered() {
    let prefill = worker(|_| vec![Step::Hold]).await;
    let event = b"data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n";
    let decode = worker(move |_| {
        let end = [chunk(b"data: [DONE]\n\n"), last_chunk()];
        [vec![event_stream(), chunk(event), Step::Pause(Duration::from_millis(50))], end.to_vec()].concat()
    })
    .await;
    let gateway =
        gateway(&[spec(&prefill, "prefill", "sglang"), spec(&decode, "decode", "sglang")], &[]).await;
    let got = gateway.post("/v1/completions", &request(true)).await;
    assert!(got.complete && got.text().ends_with("[DONE]\n\n"), "{}", got.text());
    prefill.wait_for(|record| record.left == 1).await.expect("it is set free with the answer's end");
    is_clean(&gateway).await;
}

#[tokio::test]
async fn a_client_that_leaves_sets_both_halves_free() {
    let (prefill, decode) = (worker(|_| vec![Step::Hold]).await, worker(|_| vec![Step::Hold]).await);
    let halves = [spec(&prefill, "prefill", "sglang"), spec(&decode, "decode", "sglang")];
    let gateway = gateway(&halves, &[]).await;
    let client = gateway.send("POST", "/v1/completions", &[], &request(true)).await;
    for half in [&prefill, &decode] {
        half.wait_for(|record| record.seen.len() == 1).await.expect("it has its half");
    }
    drop(client);
    for half in [&prefill, &decode] {
        half.wait_for(|record| record.left == 1).await.expect("it is set free");
    }
    is_clean(&gateway).await;
}

#[tokio::test]
async fn vllms_halves_come_one_after_the_other_and_the_second_is_told_what_the_first_said() {
    let handed = json!({"do_remote_prefill": true, "remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_port": 5});
    let told = json!({"choices": [], "kv_transfer_params": handed});
    let prefill = worker(move |_| answer(200, &told)).await;
    let decode = worker(|_| answer(200, &text("four"))).await;
    let gateway = gateway(&[spec(&prefill, "prefill", "vllm"), spec(&decode, "decode", "vllm")], &[]).await;
    let sent = json!({
        "model": "m", "prompt": LONG, "max_tokens": 50, "min_tokens": 9, "stream": true, "n": 2,
        "stream_options": {"include_usage": true},
    });
    assert_eq!(gateway.post("/v1/completions", &sent.to_string()).await.json(), text("four"));
    let first = body(&prefill.record().seen[0]);
    assert_eq!((&first["max_tokens"], &first["n"], &first["stream"]), (&json!(1), &json!(1), &json!(false)));
    assert_eq!(first["kv_transfer_params"]["do_remote_decode"], json!(true));
    assert!(first.get("stream_options").is_none() && first.get("min_tokens").is_none());
    let second = body(&decode.record().seen[0]);
    assert_eq!(second["kv_transfer_params"], handed);
    assert_eq!((&second["max_tokens"], &second["stream"]), (&json!(50), &json!(true)));
    is_clean(&gateway).await;
}

#[tokio::test]
async fn a_vllm_decode_worker_serves_alone_when_no_prefill_worker_answers() {
    let prefill = worker(|_| vec![Step::Reset]).await;
    let decode = worker(|_| answer(200, &text("alone"))).await;
    let gateway = gateway(&[spec(&prefill, "prefill", "vllm"), spec(&decode, "decode", "vllm")], &[]).await;
    let got = gateway.post("/v1/completions", &request(false)).await;
    assert_eq!((got.status, got.json()), (200, text("alone")));
    assert!(body(&decode.record().seen[0]).get("kv_transfer_params").is_none());
}

#[tokio::test]
async fn a_short_prompt_goes_to_a_vllm_decode_worker_alone() {
    let (prefill, decode) =
        (worker(|_| answer(200, &json!({}))).await, worker(|_| answer(200, &text("alone"))).await);
    let halves = [spec(&prefill, "prefill", "vllm"), spec(&decode, "decode", "vllm")];
    let gateway = Gateway::start_cold(&[("pd_bypass_tokens", "100")], &[]).await;
    for spec in halves {
        gateway.app.fleet.register(spec).expect("a good specification");
    }
    let all = |fleet: &branchline_worker::Fleet| fleet.workers().iter().all(|worker| worker.is_ready());
    within("readiness", gateway.app.fleet.wait_until(all)).await;
    assert_eq!(gateway.post("/v1/completions", &request(false)).await.json(), text("alone"));
    assert!(prefill.record().seen.is_empty());
}

#[tokio::test]
async fn pd_groups_do_not_mix() {
    let mut workers = Vec::new();
    for _ in 0..5 {
        workers.push(worker(|_| answer(200, &json!({}))).await);
    }
    let roles = [
        ("prefill", Some("g1")),
        ("prefill", Some("g2")),
        ("decode", Some("g1")),
        ("decode", None),
        ("prefill", None),
    ];
    let specs: Vec<WorkerSpec> = workers
        .iter()
        .zip(roles)
        .map(|(worker, (role, group))| WorkerSpec {
            group: group.map(str::to_owned),
            ..spec(worker, role, "sglang")
        })
        .collect();
    let gateway = gateway(&specs, &[]).await;
    let fleet = &gateway.app.fleet;
    let query = branchline_worker::RouteQuery::default();
    let pairs = || {
        let chosen = (0..1000).map(|_| fleet.choose_pair(Some("m"), &query).expect("a pair"));
        let urls = chosen.map(|pair| (pair.prefill.worker.url.clone(), pair.decode.worker.url.clone()));
        urls.collect::<std::collections::BTreeSet<_>>()
    };
    let url = |at: usize| workers[at].url();
    assert_eq!(pairs(), [(url(0), url(2)), (url(4), url(3))].into());
    let id = |at: usize| fleet.workers().iter().find(|worker| worker.url == url(at)).map(|worker| worker.id);
    fleet.forget(id(3).expect("it is there"));
    assert_eq!(pairs(), [(url(0), url(2))].into());
    assert_eq!(gateway.get("/readiness").await.status, 200);
    fleet.forget(id(2).expect("it is there"));
    assert_eq!(gateway.post("/v1/completions", &request(false)).await.status, 503);
    assert_eq!(gateway.get("/readiness").await.status, 503);
}
