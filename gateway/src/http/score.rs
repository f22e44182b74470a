//! `POST /v1/score`: the exact logprobs of several continuations of one prompt, computed once.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::post;
use branchline_core::{Error, Result};
use branchline_protocol::{ChoiceInput, Fit, PromptInput, Routing, Sampling, read_choices};
use http::{Request, StatusCode};
use serde_json::{Value, json};

use super::answer::json as reply;
use super::intake::{Intake, answer};
use super::leases::tokens_of;
use crate::app::App;
use crate::dispatch::{self, ScoreJob};
use crate::middleware::route::Plan;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new().route("/v1/score", post(score))
}

async fn score(State(app): State<Arc<App>>, request: Request<Body>) -> Response {
    answer(app, request, serve).await
}

async fn serve(intake: Intake) -> Result<Response> {
    let fields = intake.fields();
    let limits = intake.limits();
    let choices = read_choices(&fields, limits)?;
    let input = PromptInput::read(&fields, limits)?;
    let routing = Routing { adapter: intake.adapter.clone(), ..Routing::read(&fields)? };
    let lease = intake.lease(&routing, None)?;
    let live = intake.register(None, "score-")?;
    let prefix = tokens_of(&intake, input, "prompt").await?;
    let choices = encode(&intake, choices).await?;
    for (position, choice) in choices.iter().enumerate() {
        let field = format!("choices[{position}]");
        let fit = Fit { prompt: "prompt", limit: "choices", default: Some(0) };
        if choice.is_empty() {
            return Err(Error::invalid(&field, format!("`{field}` has no tokens; send text that has some")));
        }
        Sampling { max_tokens: Some(0), ..Sampling::default() }.fit(
            prefix.len() + choice.len(),
            limits,
            fit,
        )?;
    }
    let model = Arc::clone(&intake.model);
    let permit = intake.permit.clone();
    let mut job = ScoreJob { model, live, prefix, choices, routing, lease, permit, plan: Plan::default() };
    job.plan = intake.plan(&job.query()).await?;
    let (job, found) = dispatch::score(&intake.app, job, intake.arrived).await?;
    let sums: Vec<f64> = found.scores.iter().map(|score| score.sum).collect();
    let scores: Vec<Value> = found
        .scores
        .iter()
        .zip(&job.choices)
        .enumerate()
        .map(|(index, (score, tokens))| {
            json!({"index": index, "sum": score.sum, "token_logprobs": score.token_logprobs, "tokens": tokens})
        })
        .collect();
    let prompt = found.prompt.unwrap_or_default();
    let mut body = json!({
        "object": "score",
        "model": intake.name,
        "scores": scores,
        "probabilities": shares(&sums),
        "usage": {
            "prompt_tokens": prompt.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": prompt.cached_tokens},
        },
    });
    if let Some(state) = found.lease.as_ref().and_then(dispatch::lease_state) {
        body["lease"] = json!(state);
    }
    Ok(reply(StatusCode::OK, &body))
}

/// Choices as ids: they go on from the prompt's own tokens, so no special token comes before them.
async fn encode(intake: &Intake, choices: Vec<ChoiceInput>) -> Result<Vec<Vec<u32>>> {
    let mut encoded = Vec::with_capacity(choices.len());
    for choice in choices {
        encoded.push(dispatch::encode(&intake.app.offload, &intake.model, choice, false, "choices").await?);
    }
    Ok(encoded)
}

/// Each one's share of the probability of all of them.
fn shares(sums: &[f64]) -> Vec<f64> {
    let best = sums.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if best == f64::NEG_INFINITY {
        return vec![1.0 / sums.len() as f64; sums.len()];
    }
    let weights: Vec<f64> = sums.iter().map(|sum| (sum - best).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / total).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_and_follow_the_sums() {
        let found = shares(&[-1.0, -1.0, -50.0]);
        assert!((found.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!((found[0] - found[1]).abs() < 1e-12 && found[2] < 1e-20);
        assert_eq!(shares(&[f64::NEG_INFINITY; 2]), [0.5, 0.5]);
    }
}
