//! What HTTP workers keep under ids of their own: found wherever it is, without the gateway keeping a list.

use crate::kit::Gateway;
use branchline_testkit::{EngineSetup, FakeEngine, ScriptedWorker, Step, response};

const ID: &str = "resp_theirs";

/// A worker that has one response.
async fn keeper() -> ScriptedWorker {
    ScriptedWorker::start(|seen| {
        let query = seen.target.split_once('?').map_or("", |(_, query)| query);
        let body = match seen.path() {
            "/v1/responses/resp_theirs" | "/v1/responses/resp_theirs/cancel" => {
                format!(r#"{{"id":"{ID}","query":"{query}"}}"#)
            }
            "/v1/responses/resp_theirs/input_items" => r#"{"object":"list","data":[1]}"#.to_owned(),
            _ => return vec![Step::Send(response(404, &[], br#"{"error":"no such id"}"#))],
        };
        vec![Step::Send(response(200, &[("x-kept", "1")], body.as_bytes()))]
    })
    .await
    .expect("a free port")
}

async fn answering(status: u16) -> ScriptedWorker {
    ScriptedWorker::start(move |_| vec![Step::Send(response(status, &[], b"{}"))]).await.expect("a free port")
}

#[tokio::test]
async fn a_response_that_a_worker_keeps_is_found_whichever_worker_it_is() {
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let (one, two, keeper) = (answering(404).await, answering(501).await, keeper().await);
    let urls = [one.url(), two.url(), keeper.url(), engine.url()];
    let gateway = Gateway::start(&[("user_api_key", "secret")], &urls).await;
    let call = async |method, path: &str| {
        let path = format!("/v1/responses/{ID}{path}");
        gateway.call(method, &path, &[("x-api-key", "secret"), ("x-my-label", "a")], "").await
    };
    let shown = call("GET", "?include[]=x").await;
    assert_eq!((shown.status, shown.header("x-kept")), (200, Some("1")));
    assert_eq!(shown.json()["query"], "include[]=x", "the query goes with it");
    assert_eq!(call("GET", "/input_items").await.json()["data"][0], 1);
    assert_eq!(call("POST", "/cancel").await.json()["id"], ID);
    assert_eq!(call("DELETE", "").await.status, 200);
    let record = keeper.record();
    let methods: Vec<&str> = record.seen.iter().map(|seen| seen.method.as_str()).collect();
    assert_eq!(methods, ["POST", "DELETE"], "the record leaves GET out");
    assert!(record.seen.iter().all(|seen| seen.header("x-my-label") == Some("a")));
    assert!(record.seen.iter().all(|seen| seen.header("x-api-key").is_none()), "our key is not theirs");
    let unknown = gateway.call("GET", "/v1/responses/resp_nobodys", &[("x-api-key", "secret")], "").await;
    assert_eq!((unknown.status, unknown.json()["error"]["param"].as_str()), (404, Some("response_id")));
    assert_eq!(gateway.get(&format!("/v1/responses/{ID}")).await.status, 401, "strangers ask nobody");
    assert_eq!(keeper.record().seen.len(), 2);
}

#[tokio::test]
async fn that_nobody_has_it_is_said_only_when_everybody_was_asked() {
    let (one, ill) = (answering(404).await, answering(500).await);
    let gateway = Gateway::start(&[], &[one.url(), ill.url()]).await;
    let answer = gateway.get(&format!("/v1/responses/{ID}")).await;
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{}", answer.text());
    ill.stop();
    assert_eq!(gateway.get(&format!("/v1/responses/{ID}")).await.status, 503);
}
