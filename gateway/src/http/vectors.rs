//! Embeddings and reranking by our engines that embed or rank; foreign scores and classes are refused by name.
//!
//! All of these paths are relayed as they came for models of HTTP workers.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::{
    DocumentText, EmbeddingAnswer, EmbeddingEntry, EmbeddingRequest, Prompt, RankedDocument, ReadUsage,
    RerankAnswer, RerankRequest, VectorText,
};
use branchline_worker::proto::{EmbedInput, EmbedTask};
use http::{Request, StatusCode, Uri};

use super::answer::json;
use super::intake::{Intake, answer};
use crate::app::App;
use crate::dispatch::{self, EmbedJob};

pub(super) fn routes() -> Router<Arc<App>> {
    let router = ["/v1/embeddings", "/embeddings"]
        .into_iter()
        .fold(Router::new(), |router, path| router.route(path, post(embeddings)));
    let router = ["/v1/rerank", "/v2/rerank", "/rerank"]
        .into_iter()
        .fold(router, |router, path| router.route(path, post(rerank)));
    ["/score", "/v1/classify", "/classify"]
        .into_iter()
        .fold(router, |router, path| router.route(path, post(others)))
}

async fn embeddings(State(app): State<Arc<App>>, uri: Uri, request: Request<Body>) -> Response {
    answer(app, request, |intake| serve_embeddings(intake, uri)).await
}

async fn rerank(State(app): State<Arc<App>>, uri: Uri, request: Request<Body>) -> Response {
    answer(app, request, |intake| serve_rerank(intake, uri)).await
}

async fn others(State(app): State<Arc<App>>, uri: Uri, request: Request<Body>) -> Response {
    answer(app, request, |intake| async move { Err(refusal(&intake, &uri)) }).await
}

/// Why a model of ours does not answer a path.
fn refusal(intake: &Intake, uri: &Uri) -> Error {
    let can = match () {
        () if intake.model.can("generate") => "only generate",
        () if intake.model.can("rank") => "only rank (/v1/rerank)",
        () => "only embed (/v1/embeddings, /v1/rerank)",
    };
    let message = format!(
        "model {:?} is served by Branchline engines, which {can}; send {} for a model of a worker that has it",
        intake.name,
        uri.path()
    );
    Error::new(ErrorCode::Unimplemented, message).with_field("model")
}

async fn serve_embeddings(intake: Intake, uri: Uri) -> Result<Response> {
    if !intake.model.can("embed") {
        return Err(refusal(&intake, &uri));
    }
    let request = EmbeddingRequest::read(&intake.fields(), intake.limits())?;
    let size = intake.model.info.embedding_size.unwrap_or(u32::MAX);
    if let Some(asked) = request.dimensions.filter(|&asked| asked > size) {
        let message = format!("`dimensions` is {asked} and the model's vectors have {size} values; lower it");
        return Err(Error::invalid("dimensions", message));
    }
    let live = intake.register(None, "embd-")?;
    let mut inputs = Vec::with_capacity(request.inputs.len());
    for (position, prompt) in request.inputs.into_iter().enumerate() {
        let field = if request.single { "input".to_owned() } else { format!("input[{position}]") };
        inputs.push(one(&intake, prompt, request.truncate, &field).await?);
    }
    let mut job = EmbedJob::new(Arc::clone(&intake.model), live, inputs, EmbedTask::Embed);
    job.dimensions = request.dimensions;
    let vectors = run(&intake, &mut job).await?;
    let entry = |(index, vector): (usize, Vec<f32>)| EmbeddingEntry {
        object: "embedding",
        index,
        embedding: if request.base64 {
            VectorText::Base64(base64(&vector))
        } else {
            VectorText::Float(vector)
        },
    };
    Ok(json(
        StatusCode::OK,
        &EmbeddingAnswer {
            object: "list",
            data: vectors.into_iter().enumerate().map(entry).collect(),
            model: &intake.name,
            usage: ReadUsage::of(job.tokens()),
        },
    ))
}

async fn serve_rerank(intake: Intake, uri: Uri) -> Result<Response> {
    let pairs = intake.model.can("rank");
    if !pairs && !intake.model.can("embed") {
        return Err(refusal(&intake, &uri));
    }
    let request = RerankRequest::read(&intake.fields(), intake.limits())?;
    let live = intake.register(None, "rank-")?;
    let id = live.id().as_str().to_owned();
    let (task, inputs) = match pairs {
        true => (EmbedTask::Rank, joined(&intake, &request).await?),
        false => (EmbedTask::Embed, apart(&intake, &request).await?),
    };
    let mut job = EmbedJob::new(Arc::clone(&intake.model), live, inputs, task);
    let results = run(&intake, &mut job).await?;
    let scores: Vec<f32> = match pairs {
        true => results.iter().map(|result| result[0]).collect(),
        false => results[1..].iter().map(|document| cosine(&results[0], document)).collect(),
    };
    let documents = request.return_documents.then_some(request.documents);
    Ok(json(
        StatusCode::OK,
        &RerankAnswer {
            id: &id,
            model: &intake.name,
            results: best(&scores, documents, request.top_n),
            usage: ReadUsage::of(job.tokens()),
        },
    ))
}

async fn run(intake: &Intake, job: &mut EmbedJob) -> Result<Vec<Vec<f32>>> {
    job.permit.clone_from(&intake.permit);
    job.plan = intake.plan(&job.query()).await?;
    dispatch::embed(&intake.app, job, intake.arrived).await
}

/// A text as ids with its marks. Ids of a client are taken to have theirs.
async fn one(intake: &Intake, prompt: Prompt, truncate: Option<u32>, field: &str) -> Result<EmbedInput> {
    let most = intake.limits().context_length;
    let mut token_ids = match (prompt, truncate) {
        (Prompt::Text(text), Some(limit)) => {
            let tokenizer = Arc::clone(&intake.model.tokenizer);
            intake.app.offload.run(text.len(), move || tokenizer.encode_cut(&text, limit as usize)).await?
        }
        (prompt, _) => {
            let add_special = intake.model.add_special_tokens;
            dispatch::encode(&intake.app.offload, &intake.model, prompt, add_special, field).await?
        }
    };
    token_ids.truncate(truncate.unwrap_or(u32::MAX) as usize);
    check_length(token_ids.len(), most, field)?;
    Ok(EmbedInput { token_ids, type_ids: Vec::new() })
}

fn check_length(tokens: usize, most: u32, field: &str) -> Result<()> {
    if tokens <= most as usize {
        return Ok(());
    }
    let message = format!(
        "`{field}` has {tokens} tokens and the model reads {most}; shorten it, or send `truncate_prompt_tokens`"
    );
    Err(Error::invalid(field, message))
}

/// The query joined to each document, for a model that reads both at once.
async fn joined(intake: &Intake, request: &RerankRequest) -> Result<Vec<EmbedInput>> {
    let most = intake.limits().context_length;
    let mut inputs = Vec::with_capacity(request.documents.len());
    for (position, document) in request.documents.iter().enumerate() {
        let tokenizer = Arc::clone(&intake.model.tokenizer);
        let (query, text) = (request.query.clone(), document.clone());
        let limit = request.truncate.map(|limit| limit as usize);
        let work = move || tokenizer.encode_pair(&query, &text, limit);
        let (token_ids, type_ids) = intake.app.offload.run(document.len(), work).await?;
        check_length(token_ids.len(), most, &format!("documents[{position}]"))?;
        inputs.push(EmbedInput { token_ids, type_ids });
    }
    Ok(inputs)
}

/// The query, then the documents, for a model that reads one text at a time.
async fn apart(intake: &Intake, request: &RerankRequest) -> Result<Vec<EmbedInput>> {
    let mut inputs = Vec::with_capacity(request.documents.len() + 1);
    inputs.push(one(intake, Prompt::Text(request.query.clone()), request.truncate, "query").await?);
    for (position, document) in request.documents.iter().enumerate() {
        let field = format!("documents[{position}]");
        inputs.push(one(intake, Prompt::Text(document.clone()), request.truncate, &field).await?);
    }
    Ok(inputs)
}

/// The documents by falling score, earlier ones first among equals.
fn best(scores: &[f32], documents: Option<Vec<String>>, top_n: Option<usize>) -> Vec<RankedDocument> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(top_n.unwrap_or(scores.len()));
    let text = |index: usize| documents.as_ref().map(|texts| DocumentText { text: texts[index].clone() });
    order
        .into_iter()
        .map(|index| RankedDocument { index, relevance_score: scores[index], document: text(index) })
        .collect()
}

fn cosine(one: &[f32], other: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let lengths = (dot(one, one) * dot(other, other)).sqrt();
    if lengths == 0.0 { 0.0 } else { (dot(one, other) / lengths) as f32 }
}

fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    BASE64_STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_equals_keep_their_order() {
        let places = |top_n| {
            let found = best(&[0.1, 0.9, 0.9, f32::MIN], None, top_n);
            found.iter().map(|one| one.index).collect::<Vec<_>>()
        };
        assert_eq!(places(None), [1, 2, 0, 3]);
        assert_eq!(places(Some(2)), [1, 2]);
        assert_eq!(places(Some(9)).len(), 4);
        let told = best(&[0.1, 0.2], Some(vec!["a".into(), "b".into()]), Some(1));
        assert_eq!(told[0].document.as_ref().map(|text| text.text.as_str()), Some("b"));
    }

    #[test]
    fn cosines_do_not_depend_on_lengths() {
        assert!((cosine(&[3.0, 0.0], &[2.0, 0.0]) - 1.0).abs() < 1e-6);
        assert!(cosine(&[1.0, 0.0], &[0.0, 5.0]).abs() < 1e-6);
        assert!(cosine(&[0.0, 0.0], &[1.0, 1.0]).abs() < 1e-6);
    }

    #[test]
    fn base64_is_of_little_endian_floats() {
        assert_eq!(base64(&[1.0, -2.0]), "AACAPwAAAMA=");
    }
}
