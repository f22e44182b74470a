//! `/v1/embeddings` and `/v1/rerank` before engines that embed or rank: shapes, refusals, other workers' tries.

use crate::kit::Gateway;
use branchline_testkit::{EngineSetup, FakeEngine};
use serde_json::{Value, json};

/// A gateway before one engine whose model has these tasks.
async fn with_tasks(tasks: &[&str]) -> (FakeEngine, Gateway) {
    let mut setup = EngineSetup::default();
    setup.info.tasks = tasks.iter().map(|&task| task.to_owned()).collect();
    setup.info.context_length = 16;
    setup.info.max_request_tokens = 16;
    setup.info.embedding_size = tasks.contains(&"embed").then_some(4);
    let engine = FakeEngine::start(setup).await.expect("a free port");
    let gateway = Gateway::start(&[], &[engine.url()]).await;
    (engine, gateway)
}

async fn ask(gateway: &Gateway, path: &str, body: Value) -> (u16, Value) {
    let answer = gateway.post(path, &body.to_string()).await;
    (answer.status, answer.json())
}

#[tokio::test]
async fn every_form_of_input_has_one_vector_a_text_in_order() {
    let (_engine, gateway) = with_tasks(&["embed"]).await;
    for (input, lengths) in [
        (json!("abc"), vec![3.0]),
        (json!(["a", "bcd", "ef"]), vec![1.0, 3.0, 2.0]),
        (json!([1, 2]), vec![2.0]),
        (json!([[1, 2, 3], [4]]), vec![3.0, 1.0]),
    ] {
        let (status, answer) =
            ask(&gateway, "/v1/embeddings", json!({"model": "fake", "input": input})).await;
        assert_eq!(status, 200, "{answer}");
        let entry = |(index, length): (usize, &f64)| json!({"object": "embedding", "index": index, "embedding": vec![*length; 4]});
        let tokens = lengths.iter().sum::<f64>() as usize;
        let data: Vec<Value> = lengths.iter().enumerate().map(entry).collect();
        assert_eq!(
            answer,
            json!({
                "object": "list", "data": data, "model": "fake",
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens}
            })
        );
    }
}

#[tokio::test]
async fn vectors_are_cut_and_written_as_asked() {
    let (_engine, gateway) = with_tasks(&["embed"]).await;
    let body = json!({"input": "ab", "dimensions": 2, "encoding_format": "base64"});
    let (_, answer) = ask(&gateway, "/embeddings", body).await;
    assert_eq!(answer["data"][0]["embedding"], json!("AAAAQAAAAEA="), "two times 2.0");
    let (_, answer) =
        ask(&gateway, "/v1/embeddings", json!({"input": "a".repeat(40), "truncate_prompt_tokens": -1})).await;
    assert_eq!(answer["usage"]["prompt_tokens"], json!(16), "{answer}");
}

#[tokio::test]
async fn bad_requests_for_vectors_name_their_field() {
    let (_engine, gateway) = with_tasks(&["embed"]).await;
    for (body, field) in [
        (json!({"input": "x".repeat(17)}), "input"),
        (json!({"input": ["x", "x".repeat(17)]}), "input[1]"),
        (json!({"input": [[1], vec![1; 17]]}), "input[1]"),
        (json!({"input": "x", "dimensions": 5}), "dimensions"),
        (json!({"input": [300]}), "input[0]"),
        (json!({}), "input"),
    ] {
        let (status, answer) = ask(&gateway, "/v1/embeddings", body.clone()).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{body} {answer}");
    }
}

#[tokio::test]
async fn a_model_that_embeds_ranks_by_nearness_and_one_that_ranks_by_its_own_scores() {
    for task in ["embed", "rank"] {
        let (_engine, gateway) = with_tasks(&[task]).await;
        let body = json!({"query": "q", "documents": ["a", {"text": "bcd"}, "ef"], "top_n": 2});
        for path in ["/v1/rerank", "/v2/rerank", "/rerank"] {
            let (status, answer) = ask(&gateway, path, body.clone()).await;
            assert_eq!(status, 200, "{answer}");
            let order: Vec<&Value> =
                answer["results"].as_array().unwrap().iter().map(|one| &one["index"]).collect();
            // The engine here scores by length, and its vectors all point the same way.
            let wanted = if task == "rank" { [1, 2] } else { [0, 1] };
            assert_eq!(order, wanted.map(|index| json!(index)).iter().collect::<Vec<_>>(), "{answer}");
            assert!(answer["id"].as_str().unwrap().starts_with("rank-"), "{answer}");
            assert!(answer["results"][0]["document"]["text"].is_string(), "{answer}");
        }
        let body = json!({"query": "q", "documents": ["a"], "return_documents": false});
        let (_, answer) = ask(&gateway, "/v1/rerank", body).await;
        assert!(answer["results"][0].get("document").is_none(), "{answer}");
    }
}

#[tokio::test]
async fn a_long_document_is_refused_or_cut_and_the_query_is_kept_whole() {
    for task in ["embed", "rank"] {
        let (_engine, gateway) = with_tasks(&[task]).await;
        let mut body = json!({"query": "what", "documents": ["a", "b".repeat(30)]});
        let (status, answer) = ask(&gateway, "/v1/rerank", body.clone()).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("documents[1]")), "{answer}");
        body["truncate_prompt_tokens"] = json!(8);
        let (status, answer) = ask(&gateway, "/v1/rerank", body.clone()).await;
        let tokens = 13; // the query with its first document 5, the second one cut to 8
        assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(tokens)), "{answer}");
        if task == "rank" {
            body["truncate_prompt_tokens"] = json!(4);
            let (status, answer) = ask(&gateway, "/v1/rerank", body).await;
            assert_eq!(
                (status, &answer["error"]["param"]),
                (400, &json!("truncate_prompt_tokens")),
                "{answer}"
            );
        }
    }
}

#[tokio::test]
async fn a_model_without_the_task_is_refused_by_name() {
    let (_engine, gateway) = with_tasks(&["rank"]).await;
    let (status, answer) = ask(&gateway, "/v1/embeddings", json!({"input": "x"})).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("unimplemented")));
    assert!(answer["error"]["message"].as_str().unwrap().contains("/v1/rerank"), "{answer}");
    let (_engine, gateway) = with_tasks(&["embed"]).await;
    let (status, answer) = ask(&gateway, "/score", json!({"text_1": "x", "text_2": "y"})).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("model")), "{answer}");
}
