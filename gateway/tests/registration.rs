//! `/workers` and its older forms, state files, worker files, aliases, sessions, explanations.

use crate::kit::{Gateway, PATIENCE};
use branchline_testkit::{EngineSetup, FakeEngine, ScriptedWorker, Seen, Step, response};
use serde_json::json;

async fn worker(script: impl Fn(&Seen) -> Vec<Step> + Send + Sync + 'static) -> ScriptedWorker {
    ScriptedWorker::start(script).await.expect("a free port")
}

async fn fine() -> ScriptedWorker {
    worker(|_| vec![Step::Send(response(200, &[], b"{}"))]).await
}

async fn ready(gateway: &Gateway, count: usize) {
    let all = gateway.app.fleet.wait_until(|fleet| {
        fleet.workers().len() == count && fleet.workers().iter().all(|worker| worker.is_ready())
    });
    tokio::time::timeout(PATIENCE, all).await.expect("workers become ready");
}

fn urls(gateway: &Gateway) -> Vec<String> {
    gateway.app.fleet.workers().iter().map(|worker| worker.url.clone()).collect()
}

#[tokio::test]
async fn a_worker_is_registered_shown_changed_and_removed() {
    let one = fine().await;
    let gateway = Gateway::start_cold(&[], &[]).await;
    let body =
        json!({"url": one.url(), "models": [{"id": "m", "aliases": ["gpt"]}], "labels": {"zone": "a"}});
    let added = gateway.post("/workers", &body.to_string()).await;
    assert_eq!((added.status, added.json()["status"].as_str()), (202, Some("accepted")));
    let place = added.header("location").expect("a location").to_owned();
    ready(&gateway, 1).await;
    let shown = gateway.get(&place).await.json();
    for (name, value) in [
        ("priority", json!(50)),
        ("cost", json!(1.0)),
        ("worker_type", json!("regular")),
        ("is_healthy", json!(true)),
        ("status", json!("Ready")),
        ("connection_mode", json!("http")),
        ("model_id", json!("m")),
        ("labels", json!({"zone": "a"})),
    ] {
        assert_eq!(shown[name], value, "{name}");
    }
    let changed = gateway.call("PATCH", &place, &[], r#"{"priority":7,"draining":true}"#).await.json();
    assert_eq!((&changed["priority"], &changed["status"]), (&json!(7), &json!("Draining")));
    assert_eq!(gateway.post("/v1/completions", r#"{"model":"m"}"#).await.status, 503);
    assert_eq!(gateway.call("PATCH", &place, &[], r#"{"cost":0}"#).await.status, 400);
    assert_eq!(gateway.call("PATCH", &place, &[], r#"{"draining":false}"#).await.status, 200);
    assert_eq!(gateway.post("/v1/completions", r#"{"model":"gpt","x":1}"#).await.status, 200);
    assert_eq!(one.record().seen[0].body, br#"{"model":"m","x":1}"#, "the worker gets its own name");
    let stats = gateway.get("/workers?model=m").await.json()["stats"].clone();
    assert_eq!((&stats["total_workers"], &stats["total_models"]), (&json!(1), &json!(1)));
    assert_eq!(gateway.get("/workers?model=n").await.json()["total"], 0);
    assert_eq!(gateway.call("DELETE", &place, &[], "").await.status, 200);
    assert_eq!(gateway.call("DELETE", &place, &[], "").await.status, 404);
}

#[tokio::test]
async fn the_older_forms_work_by_url() {
    let one = fine().await;
    let gateway = Gateway::start_cold(&[], &[]).await;
    let url = one.url();
    assert_eq!(gateway.post(&format!("/add_worker?url={url}"), "").await.status, 200);
    assert_eq!(gateway.get("/list_workers").await.json(), json!({"urls": [url]}));
    assert_eq!(gateway.post(&format!("/remove_worker?url={url}"), "").await.status, 200);
    assert_eq!(gateway.get("/list_workers").await.json(), json!({"urls": []}));
    assert_eq!(gateway.post(&format!("/remove_worker?url={url}"), "").await.status, 404);
}

#[tokio::test]
async fn bad_registrations_name_their_field() {
    let gateway = Gateway::start_cold(&[], &[]).await;
    for (body, words) in [
        (r#"{}"#, "url"),
        (r#"{"url":"http://a:1","colour":"red"}"#, "colour"),
        (r#"{"url":"http://a:1","worker_type":"encode"}"#, "worker_type"),
        (r#"{"url":"http://a:1","connection_mode":"grpc"}"#, "connection_mode"),
        (r#"{"url":"just-a-host"}"#, "port"),
        (r#"{"url":"169.254.169.254:80"}"#, "no worker can be"),
        (r#"{"url":"metadata.google.internal:80"}"#, "no worker can be"),
    ] {
        let answer = gateway.post("/workers", body).await;
        assert!(answer.status == 400 && answer.text().contains(words), "{body}: {}", answer.text());
    }
    assert!(urls(&gateway).is_empty() && gateway.app.workers.pending().is_empty(), "none is spoken to");
}

#[tokio::test]
async fn an_address_without_a_scheme_is_asked_what_it_speaks() {
    let (http, engine) = (fine().await, FakeEngine::start(EngineSetup::default()).await.expect("an engine"));
    let bare = |url: String| url.split_once("://").expect("a scheme").1.to_owned();
    let gateway = Gateway::start_cold(&[], &[bare(http.url()), bare(engine.url())]).await;
    ready(&gateway, 2).await;
    let mut found = urls(&gateway);
    found.sort();
    assert_eq!(found, [engine.url(), http.url()]);
}

#[tokio::test]
async fn what_was_added_and_removed_survives_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state.json").display().to_string();
    let given = [("state_file", state.as_str())];
    let (flagged, added) = (fine().await, fine().await);
    let gateway = Gateway::start(&given, &[flagged.url()]).await;
    gateway.post("/workers", &json!({"url": added.url(), "priority": 60}).to_string()).await;
    gateway.post(&format!("/remove_worker?url={}", flagged.url()), "").await;
    gateway.stop().await;
    let gateway = Gateway::start(&given, &[flagged.url()]).await;
    assert_eq!(urls(&gateway), [added.url()]);
    assert_eq!(gateway.app.fleet.workers()[0].spec().priority, 60);
}

fn bare(url: &str) -> &str {
    url.split_once("://").expect("a scheme").1
}

#[tokio::test]
async fn a_worker_added_without_its_scheme_is_changed_and_found_again_as_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state.json").display().to_string();
    let given = [("state_file", state.as_str())];
    let (one, two) = (fine().await, fine().await);
    let gateway = Gateway::start_cold(&given, &[]).await;
    gateway.post("/workers", &json!({"url": bare(&one.url())}).to_string()).await;
    ready(&gateway, 1).await;
    let place = format!("/workers/{}", bare(&one.url()));
    let changed = gateway.call("PATCH", &place, &[], r#"{"priority":7,"draining":true}"#).await;
    assert_eq!(changed.status, 200, "{}", changed.text());
    gateway.stop().await;
    // The options name it too, once more, and another one twice.
    let gateway = Gateway::start(&given, &[one.url(), two.url(), format!("{}/", two.url())]).await;
    ready(&gateway, 2).await;
    let workers = gateway.app.fleet.workers();
    let kept = workers.iter().find(|worker| worker.url == one.url()).expect("the changed one");
    assert_eq!((kept.spec().priority, kept.is_draining()), (7, true));
}

/// Nobody listens there.
const NOBODY: &str = "127.0.0.1:1";

#[tokio::test]
async fn an_address_that_has_not_told_what_it_speaks_is_taken_back_and_stays_away() {
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state.json").display().to_string();
    let given = [("state_file", state.as_str())];
    let gateway = Gateway::start_cold(&given, &[]).await;
    let add = || gateway.post("/workers", r#"{"url":"127.0.0.1:1"}"#);
    for _ in 0..3 {
        assert_eq!(add().await.status, 202);
        assert_eq!(add().await.status, 409);
        assert_eq!(gateway.call("DELETE", &format!("/workers/{NOBODY}"), &[], "").await.status, 200);
    }
    assert_eq!(add().await.status, 202);
    // The tasks of the earlier ones end, and leave the entry that is not theirs.
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert_eq!(gateway.app.workers.pending(), [NOBODY]);
    assert_eq!(gateway.post(&format!("/remove_worker?url={NOBODY}"), "").await.status, 200);
    gateway.stop().await;
    let gateway = Gateway::start_cold(&given, &[]).await;
    assert!(gateway.app.workers.pending().is_empty());
}

#[tokio::test]
async fn what_cannot_be_kept_is_not_asked_either() {
    let nowhere = tempfile::tempdir().expect("a folder").path().join("gone/state.json").display().to_string();
    let gateway = Gateway::start_cold(&[("state_file", nowhere.as_str())], &[]).await;
    assert_eq!(gateway.post("/workers", &json!({"url": NOBODY}).to_string()).await.status, 500);
    assert!(gateway.app.workers.pending().is_empty());
}

#[tokio::test]
async fn a_file_takes_out_its_own_workers_only_and_brings_no_removed_one_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("workers.txt");
    let (flagged, mine) = (fine().await, fine().await);
    std::fs::write(&path, format!("{}\n{}\n", flagged.url(), mine.url())).expect("written");
    let file = path.display().to_string();
    let given = [("worker_file", file.as_str()), ("worker_refresh", "10ms")];
    let gateway = Gateway::start_cold(&given, &[flagged.url()]).await;
    ready(&gateway, 2).await;
    gateway.post(&format!("/remove_worker?url={}", mine.url()), "").await;
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(urls(&gateway), [flagged.url()], "what was removed stays away");
    gateway.post("/workers", &json!({"url": mine.url()}).to_string()).await;
    std::fs::write(&path, "# none\n").expect("written");
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    assert_eq!(urls(&gateway), [flagged.url(), mine.url()], "others named them");
}

#[tokio::test]
async fn a_worker_file_is_followed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("workers.txt");
    let (one, two) = (fine().await, fine().await);
    std::fs::write(&path, format!("# ours\n{}\n", one.url())).expect("written");
    let file = path.display().to_string();
    let given = [("worker_file", file.as_str()), ("worker_refresh", "20ms")];
    let gateway = Gateway::start_cold(&given, &[]).await;
    ready(&gateway, 1).await;
    std::fs::write(&path, format!("[\"{}\"]", two.url())).expect("written");
    let moved = gateway.app.fleet.wait_until(|fleet| {
        fleet.workers().len() == 1 && fleet.workers()[0].url == two.url() && fleet.workers()[0].is_ready()
    });
    tokio::time::timeout(PATIENCE, moved).await.expect("the file is read again");
}

#[tokio::test]
async fn routing_hash_respects_breaker_and_priority_comes_first() {
    for policy in ["consistent_hashing", "sticky"] {
        let workers = [fine().await, fine().await, fine().await];
        let given = [("policy", policy), ("breaker_open", "50ms"), ("breaker_successes", "1")];
        let gateway = Gateway::start(&given, &workers.each_ref().map(ScriptedWorker::url)).await;
        let key = [("x-session-id", "user-7")];
        gateway.call("POST", "/v1/completions", &key, "{}").await;
        let home = workers.iter().position(|worker| worker.record().seen.len() == 1).expect("one of them");
        for _ in 0..5 {
            gateway.call("POST", "/v1/completions", &key, "{}").await;
        }
        assert_eq!(workers[home].record().seen.len(), 6, "{policy}");
        let id = gateway.app.fleet.workers()[home].id;
        let place = format!("/workers/{id}");
        gateway.call("PATCH", &place, &[], r#"{"draining":true}"#).await;
        let before = workers.each_ref().map(|worker| worker.record().seen.len());
        for _ in 0..10 {
            gateway.call("POST", "/v1/completions", &key, "{}").await;
        }
        let now = workers.each_ref().map(|worker| worker.record().seen.len());
        let mut moved: Vec<usize> = now.iter().zip(before).map(|(now, before)| now - before).collect();
        assert_eq!(moved.remove(home), 0, "{policy}");
        moved.sort_unstable();
        assert_eq!(moved, [0, 10], "{policy}: one other worker stands in");
        gateway.call("PATCH", &place, &[], r#"{"draining":false}"#).await;
        gateway.call("POST", "/v1/completions", &key, "{}").await;
        assert_eq!(workers[home].record().seen.len(), 7, "{policy}: it comes back");
    }
}

#[tokio::test]
async fn a_choice_is_explained_on_the_answer_and_afterwards() {
    let workers = [fine().await, fine().await];
    let gateway = Gateway::start(&[], &workers.each_ref().map(ScriptedWorker::url)).await;
    let headers = [("x-branchline-explain", "1"), ("x-request-id", "req-42")];
    let answer = gateway.call("POST", "/v1/completions", &headers, r#"{"prompt":"x"}"#).await;
    assert_eq!(answer.header("x-request-id"), Some("req-42"));
    let told: serde_json::Value =
        serde_json::from_str(answer.header("x-branchline-explain").unwrap()).unwrap();
    assert_eq!(
        (&told["policy"], told["candidates"].as_array().map(Vec::len)),
        (&json!("cache_aware"), Some(2))
    );
    assert!(told["reason"].as_str().is_some_and(|words| words.contains("cache_aware")), "{told}");
    let later = gateway.get("/explain/req-42").await.json();
    assert_eq!(later["choices"][0]["chosen"], told["chosen"]);
    assert_eq!(gateway.get("/explain/nobody").await.status, 404);
    let unnamed = gateway.call("POST", "/v1/completions", &headers[..1], "{}").await;
    assert!(unnamed.header("x-request-id").is_some() && unnamed.header("x-branchline-explain").is_some());
    let plain = gateway.post("/v1/completions", "{}").await;
    assert_eq!((plain.header("x-request-id"), plain.header("x-branchline-explain")), (None, None));
}

#[tokio::test]
async fn only_operators_are_told_of_a_choice_and_of_their_own_request() {
    let one = fine().await;
    let given = [("api_key", "admins"), ("user_api_key", "users")];
    let gateway = Gateway::start(&given, &[one.url()]).await;
    let ask = async |key: &str, body: &str| {
        let headers = [("x-api-key", key), ("x-branchline-explain", "1"), ("x-request-id", "same")];
        let answer = gateway.call("POST", "/v1/completions", &headers, body).await;
        assert_eq!((answer.status, answer.header("x-request-id")), (200, Some("same")));
        answer.header("x-branchline-explain").map(str::to_owned)
    };
    assert_eq!(ask("users", r#"{"prompt":"x"}"#).await, None);
    assert!(ask("admins", r#"{"prompt":"x"}"#).await.is_some_and(|told| told.contains(&one.url())));
    // No choice is made for this one; that of another with its name is none of its business.
    let headers = [("x-api-key", "admins"), ("x-branchline-explain", "1"), ("x-request-id", "same")];
    let models = gateway.call("GET", "/v1/models", &headers, "").await;
    assert_eq!(models.header("x-branchline-explain"), None);
}
