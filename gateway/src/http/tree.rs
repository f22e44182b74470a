//! `GET /cache/tree`: engines' radix trees for operators, a bounded piece at a time.
//!
//! Sizes, holders, uses and ages for whoever may call admin routes; the tokens and the text behind them are other
//! clients' prompts and are shown to an administrator only.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::response::Response;
use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_worker::{Model, Worker, proto};
use http::{HeaderMap, StatusCode, Uri};
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Refusal, json as answer};
use super::{admin, fan, info};
use crate::app::App;
use crate::guard::{Keys, is_loopback};

const USUAL_NODES: u32 = 200;
/// The contract's bound.
const MOST_NODES: u32 = 10_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    /// A worker's id.
    worker: Option<String>,
    limit: Option<u32>,
    cursor: Option<u64>,
    #[serde(default)]
    token_ids: bool,
    #[serde(default)]
    text: bool,
}

/// Every engine's tree, or that of `worker`.
pub(super) async fn tree(
    State(app): State<Arc<App>>,
    uri: Uri,
    headers: HeaderMap,
) -> std::result::Result<Response, Refusal> {
    let asked = read(&uri)?;
    if asked.text || asked.token_ids {
        check_admin(&app, &headers)?;
    }
    let request = proto::GetCacheTreeRequest {
        limit: asked.limit.unwrap_or(USUAL_NODES),
        cursor: asked.cursor.unwrap_or(0),
        include_token_ids: asked.text || asked.token_ids,
    };
    let workers = match &asked.worker {
        Some(id) => {
            let worker = named(&app, id)?;
            let outcome = one(&worker, &request, &asked).await;
            vec![(worker, outcome)]
        }
        None => {
            fan::ask_all(&app, |worker| {
                let asked = &asked;
                async move { one(&worker, &request, asked).await }
            })
            .await
        }
    };
    let shown: Vec<Value> =
        workers.into_iter().map(|(worker, outcome)| admin::report(&worker, outcome)).collect();
    Ok(answer(StatusCode::OK, &json!({"workers": shown})))
}

fn read(uri: &Uri) -> Result<Asked> {
    let Query(asked) = Query::<Asked>::try_from_uri(uri).map_err(|error| {
        let message = format!(
            "the query is not what this path takes: {}; give worker, limit, cursor, token_ids and text as needed",
            error.body_text().to_lowercase()
        );
        Error::new(ErrorCode::InvalidArgument, message)
    })?;
    if let Some(limit) = asked.limit.filter(|limit| !(1..=MOST_NODES).contains(limit)) {
        return Err(Error::invalid("limit", format!("limit is {limit}; give 1 to {MOST_NODES} nodes")));
    }
    if asked.cursor.is_some() && asked.worker.is_none() {
        let message = "a cursor is of one worker; give worker too, as in /cache/tree?worker=w1&cursor=…";
        return Err(Error::invalid("worker", message));
    }
    Ok(asked)
}

/// Prompts of others are for the holder of the administrator's key; where there are no keys and only this
/// machine can call, for its user.
fn check_admin(app: &App, headers: &HeaderMap) -> Result<()> {
    let options = &app.options;
    let allowed = match &options.admin_api_key {
        Some(key) => Keys::only(key).accept(headers).is_some(),
        None => !options.is_keyed() && is_loopback(&options.host),
    };
    if allowed {
        return Ok(());
    }
    let message = "tokens and text of cached prompts are shown to an administrator only; send the key given by \
                   --admin-api-key, or leave token_ids and text out";
    Err(Error::new(ErrorCode::PermissionDenied, message))
}

fn named(app: &App, id: &str) -> Result<Arc<Worker>> {
    let number = id.strip_prefix('w').and_then(|number| number.parse().ok()).map(WorkerId);
    number.and_then(|id| app.fleet.worker(id)).ok_or_else(|| {
        let message = format!("worker '{id}' is not in the fleet; GET /workers lists all");
        Error::new(ErrorCode::NotFound, message).with_field("worker")
    })
}

/// One worker's piece. Workers of other kinds have no such tree: an empty object, as in `/server_info`.
async fn one(worker: &Worker, request: &proto::GetCacheTreeRequest, asked: &Asked) -> Result<Value> {
    if worker.http().is_some() {
        return Ok(json!({"supported": false}));
    }
    let tree = worker.cache_tree(*request).await?;
    let model = worker.model();
    let nodes: Vec<Value> = tree.nodes.iter().map(|node| show(node, asked, model.as_deref())).collect();
    Ok(json!({
        "nodes_total": tree.nodes_total,
        "namespaces_total": tree.namespaces_total,
        "cache": tree.cache.as_ref().map(info::cache),
        "truncated": tree.next != 0,
        "next": (tree.next != 0).then_some(tree.next),
        "nodes": nodes,
    }))
}

fn show(node: &proto::CacheTreeNode, asked: &Asked, model: Option<&Model>) -> Value {
    let mut shown = json!({
        "node": node.node,
        "parent": (node.parent != 0).then_some(node.parent),
        "namespace": format!("{:016x}", node.namespace_hash),
        "pages": node.pages,
        "tokens": node.tokens,
        "depth_tokens": node.depth_tokens,
        "locks": node.locks,
        "leases": node.leases,
        "hits": node.hits,
        "age_ms": node.age_ms,
        "children": node.children,
        "tier": if node.on_host { "host" } else { "device" },
    });
    if asked.token_ids {
        shown["token_ids"] = json!(node.token_ids);
    }
    if asked.text {
        // Bytes that are part of a character only show as U+FFFD: a node may begin or end within one.
        shown["text"] = json!(model.map(|model| model.tokenizer.decode(&node.token_ids, false)));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(query: &str) -> String {
        let uri: Uri = format!("/cache/tree?{query}").parse().unwrap();
        read(&uri).err().map(|error| error.message).unwrap_or_default()
    }

    #[test]
    fn a_query_is_read_or_refused_by_name() {
        for fine in ["", "limit=1", "limit=10000&text=true", "worker=w1&cursor=7", "token_ids=false"] {
            assert_eq!(refused(fine), "", "{fine}");
        }
        for (query, words) in [
            ("limit=0", "limit is 0; give 1 to 10000 nodes"),
            ("limit=10001", "limit is 10001"),
            ("limit=x", "limit: invalid digit"),
            ("depth=3", "unknown field `depth`"),
            ("cursor=5", "a cursor is of one worker"),
            ("text=1", "text: provided string was not `true` or `false`"),
        ] {
            assert!(refused(query).contains(words), "{query}: {}", refused(query));
        }
    }
}
