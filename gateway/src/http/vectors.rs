//! Embeddings, reranking and foreign scores: HTTP workers answer them; for a model of our engines they are refused by name.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use branchline_core::{Error, ErrorCode, Result};
use http::{Request, Uri};

use super::intake::{Intake, answer};
use crate::app::App;

pub(super) fn routes() -> Router<Arc<App>> {
    const PATHS: [&str; 8] = [
        "/v1/embeddings",
        "/embeddings",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/score",
        "/v1/classify",
        "/classify",
    ];
    PATHS.into_iter().fold(Router::new(), |router, path| router.route(path, post(handle)))
}

async fn handle(State(app): State<Arc<App>>, uri: Uri, request: Request<Body>) -> Response {
    answer(app, request, |intake| async move { refuse(&intake, &uri) }).await
}

fn refuse(intake: &Intake, uri: &Uri) -> Result<Response> {
    let message = format!(
        "model {:?} is served by Branchline engines, which only generate; send {} for a model of an HTTP worker \
         that has it",
        intake.name,
        uri.path()
    );
    Err(Error::new(ErrorCode::Unimplemented, message).with_field("model"))
}
