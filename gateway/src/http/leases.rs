//! `POST /v1/leases`, `POST /v1/leases/{id}/renew` and `DELETE /v1/leases/{id}`: prefixes held in a worker's cache.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::{delete, post};
use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::{Document, Fit, LeaseAsk, Prompt, PromptInput, Routing, Sampling, lease_ttl};
use branchline_worker::proto;
use http::{Request, StatusCode};
use serde_json::json;

use super::answer::{Refusal, json as reply};
use super::gather::gather;
use super::intake::{Intake, answer, tenant_of};
use crate::app::App;
use crate::dispatch::{self, LeaseName, read_lease};
use crate::guard::read_body;

const FIT: Fit<'static> = Fit { prompt: "prompt", limit: "ttl_ms", default: Some(0) };

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/leases", post(acquire))
        .route("/v1/leases/{id}", delete(release))
        .route("/v1/leases/{id}/renew", post(renew))
}

async fn acquire(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, plant).await
}

async fn plant(intake: Intake) -> Result<Response> {
    let fields = intake.fields();
    let limits = intake.limits();
    let ttl_ms = lease_ttl(&fields)?;
    let input = PromptInput::read(&fields, limits)?;
    let mut routing = Routing::read(&fields)?;
    if routing.lease.is_some() {
        return Err(Error::invalid("lease", "`lease` is not a field of this path; it takes `ttl_ms`"));
    }
    routing.lease = Some(LeaseAsk::Take { ttl_ms });
    let live = intake.register(None, "lease-")?;
    let tokens = tokens_of(&intake, input, "prompt").await?;
    let mut sampling = Sampling { max_tokens: Some(0), ..Sampling::default() };
    sampling.fit(tokens.len(), limits, FIT)?;
    let job = intake.start(live, tokens, (sampling, None), routing).await?;
    let gathered = gather(vec![job]).await?;
    let prompt = &gathered.prompts[0];
    let granted = prompt.lease.as_ref().and_then(|lease| Some((lease.id.as_ref()?, lease)));
    let Some((id, lease)) = granted else {
        let reason = gathered.sequences[0].end.as_ref().map_or("", |end| end.message.as_str());
        let message = format!("no lease was granted: {reason}");
        return Err(Error::new(ErrorCode::UpstreamFailed, message));
    };
    Ok(reply(
        StatusCode::OK,
        &json!({
            "id": id,
            "object": "lease",
            "model": intake.name,
            "tokens": lease.tokens,
            "pages": lease.pages,
            "ttl_ms": lease.ttl_ms,
            "expires_at": expires_at(lease.ttl_ms),
            "prompt_tokens": prompt.tokens,
            "cached_tokens": prompt.cached,
        }),
    ))
}

/// The prompt's ids, whatever form it came in.
pub(super) async fn tokens_of(intake: &Intake, input: PromptInput, field: &'static str) -> Result<Vec<u32>> {
    let (app, model) = (&intake.app, &intake.model);
    match input {
        PromptInput::Prompt(prompt) => {
            dispatch::encode(&app.offload, model, prompt, model.add_special_tokens, field).await
        }
        PromptInput::Messages(messages) => {
            let text = dispatch::render(&app.offload, model, *messages, intake.bytes).await?;
            // The template has put the special tokens in its text.
            dispatch::encode(&app.offload, model, Prompt::Text(text), false, "messages").await
        }
    }
}

async fn renew(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request<Body>,
) -> std::result::Result<Response, Refusal> {
    let tenant = tenant_of(request.extensions());
    let name = read_lease(&app.leases, &id, &tenant, ErrorCode::NotFound, "id")?;
    let body = Document::parse(&read_body(request.into_body(), app.body_limit()).await?)?;
    let ttl_ms = lease_ttl(&body.fields())?;
    let Some(worker) = app.fleet.engine(&name.engine_id) else {
        return Err(lost("its worker has left or restarted").into());
    };
    let LeaseName { lease_id, .. } = name;
    let renewed = worker.renew_lease(proto::RenewLeaseRequest { lease_id, tenant, ttl_ms }).await;
    let grant = renewed.map_err(|error| match error.code {
        ErrorCode::NotFound => lost("it was released or ran out"),
        _ => error,
    })?;
    let grant = grant.grant.unwrap_or_default();
    Ok(reply(
        StatusCode::OK,
        &json!({
            "id": id,
            "object": "lease",
            "tokens": grant.tokens,
            "pages": grant.pages,
            "ttl_ms": grant.ttl_ms,
            "expires_at": expires_at(grant.ttl_ms),
        }),
    ))
}

/// A lease that is over already is no error: whoever cleans up need not know.
async fn release(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    request: Request<Body>,
) -> std::result::Result<Response, Refusal> {
    let tenant = tenant_of(request.extensions());
    let name = read_lease(&app.leases, &id, &tenant, ErrorCode::NotFound, "id")?;
    let released = match app.fleet.engine(&name.engine_id) {
        Some(worker) => {
            worker.release_lease(proto::ReleaseLeaseRequest { lease_id: name.lease_id, tenant }).await?
        }
        None => false,
    };
    Ok(reply(StatusCode::OK, &json!({"id": id, "object": "lease", "released": released})))
}

fn lost(why: &str) -> Error {
    Error::new(ErrorCode::NotFound, format!("the lease is lost: {why}; acquire a new one")).with_field("id")
}

/// Unix seconds.
fn expires_at(ttl_ms: u64) -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |elapsed| elapsed.as_secs_f64());
    now + ttl_ms as f64 / 1e3
}
