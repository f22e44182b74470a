//! `POST /v1/tokenize` and `/v1/detokenize`, also without the version. No engine is asked.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use branchline_core::Result;
use branchline_protocol::{
    DetokenizeRequest, DetokenizeResponse, TokenizeInput, TokenizeRequest, TokenizeResponse,
};
use http::{Request, StatusCode};

use super::answer::json;
use super::intake::{Intake, answer};
use crate::app::App;
use crate::dispatch;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/tokenize", post(tokenize))
        .route("/tokenize", post(tokenize))
        .route("/v1/detokenize", post(detokenize))
        .route("/detokenize", post(detokenize))
}

async fn tokenize(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve_tokenize).await
}

async fn detokenize(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve_detokenize).await
}

async fn serve_tokenize(intake: Intake) -> Result<Response> {
    let app = &intake.app;
    let request = TokenizeRequest::read(&intake.fields())?;
    let (text, usual) = match request.input {
        TokenizeInput::Text(text) => (text, intake.model.add_special_tokens),
        TokenizeInput::Chat(input) => {
            (dispatch::render(&app.offload, &intake.model, input, intake.bytes).await?, false)
        }
    };
    let add_special = request.add_special_tokens.unwrap_or(usual);
    let (model, char_count) = (Arc::clone(&intake.model), text.chars().count());
    // An empty text has no tokens, which is an answer here.
    let tokens = app.offload.run(text.len(), move || model.tokenizer.encode(&text, add_special)).await?;
    let whole = TokenizeResponse {
        count: tokens.len(),
        tokens,
        char_count,
        max_model_len: intake.limits().context_length,
    };
    Ok(json(StatusCode::OK, &whole))
}

async fn serve_detokenize(intake: Intake) -> Result<Response> {
    let DetokenizeRequest { tokens, skip_special_tokens } =
        DetokenizeRequest::read(&intake.fields(), intake.limits().vocab_size)?;
    let model = Arc::clone(&intake.model);
    let text = intake
        .app
        .offload
        .run(tokens.len(), move || Ok(model.tokenizer.decode(&tokens, skip_special_tokens)))
        .await?;
    Ok(json(StatusCode::OK, &DetokenizeResponse { text }))
}
