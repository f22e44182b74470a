//! on-route: modules narrow the workers that the gateway's policy may choose from.

use std::sync::Arc;

use branchline_core::{Error, ErrorCode, Result, WorkerId};
use branchline_plugins::{CandidateView, Hook, LabelView, Module, RouteAction, RouteView};
use branchline_worker::{Look, RouteQuery};
use rand::RngExt as _;

use crate::app::App;

/// Bytes of prompt text that pass for one token where nothing tokenises.
const BYTES_PER_TOKEN: usize = 4;

/// The modules that want to choose for one request; travels with it.
pub(crate) struct RouteHooks {
    pub(super) modules: Vec<Arc<Module>>,
    pub(super) id: String,
    pub(super) tenant: Option<String>,
}

/// Who must not be chosen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Plan {
    /// Filtered out: never.
    never: Vec<WorkerId>,
    /// Not picked: only if the one that was picked fails.
    not_first: Vec<WorkerId>,
}

impl Plan {
    /// Whether nobody is ruled out.
    pub(crate) fn is_free(&self) -> bool {
        self.never.is_empty() && self.not_first.is_empty()
    }

    /// Makes a choice with all those left out who must be, given who was tried.
    pub(crate) fn choose<T>(
        &self,
        tried: &[WorkerId],
        choose: impl Fn(&[WorkerId]) -> Result<T>,
    ) -> Result<T> {
        if self.is_free() {
            return choose(tried);
        }
        let mut exclude = [tried, &self.never].concat();
        if !tried.is_empty() || self.not_first.is_empty() {
            return choose(&exclude);
        }
        let rest = exclude.len();
        exclude.extend(&self.not_first);
        choose(&exclude).or_else(|error| match error.code {
            // The one that was picked has left meanwhile.
            ErrorCode::Unavailable => choose(&exclude[..rest]),
            _ => Err(error),
        })
    }
}

/// The plan for a request; none of its modules, no plan.
///
/// # Errors
/// If a module fails closed.
pub(crate) async fn plan(
    app: &App,
    hooks: Option<&Arc<RouteHooks>>,
    model: Option<&str>,
    query: &RouteQuery<'_>,
) -> Result<Plan> {
    let Some(hooks) = hooks else { return Ok(Plan::default()) };
    let mut open = app.fleet.candidates(model, query);
    let mut plan = Plan::default();
    let prompt = query.token_ids.len().max(query.text.len() / BYTES_PER_TOKEN);
    for module in &hooks.modules {
        if open.is_empty() {
            break;
        }
        if module.is_quarantined() {
            module.count_quarantined(Hook::OnRoute);
            if module.fails_open() {
                continue;
            }
            let message = format!("middleware '{}' is quarantined; tell the operator", module.spec.name);
            return Err(Error::new(ErrorCode::Unavailable, message));
        }
        let view = RouteView {
            request_id: hooks.id.clone(),
            model: model.map(str::to_owned),
            tenant: hooks.tenant.clone(),
            prompt_tokens: prompt as u64,
            candidates: open.iter().map(show).collect(),
        };
        match module.on_route(view).await.result {
            Ok(action) => apply(action, &mut open, &mut plan),
            Err(_) if module.fails_open() => {}
            Err(failure) => return Err(failure.refusal(&module.spec.name)),
        }
    }
    Ok(plan)
}

fn show(look: &Look) -> CandidateView {
    let spec = look.worker.spec();
    let kind = std::iter::once(("kind", look.worker.transport().to_string()));
    let own = spec.labels.iter().map(|(key, value)| (key.as_str(), value.clone()));
    let labels = kind.chain(own).map(|(key, value)| LabelView { key: key.to_owned(), value });
    CandidateView {
        id: look.worker.id.to_string(),
        url: look.worker.url.clone(),
        labels: labels.collect(),
        running: look.running,
        queued_tokens: look.queued_tokens,
        cached_tokens: look.cached_tokens,
    }
}

fn apply(action: RouteAction, open: &mut Vec<Look>, plan: &mut Plan) {
    let id = |look: &Look| look.worker.id.to_string();
    let picked = match action {
        RouteAction::Continue => return,
        RouteAction::Filter(ids) => {
            plan.never.extend(open.iter().filter(|look| !ids.contains(&id(look))).map(|look| look.worker.id));
            open.retain(|look| ids.contains(&id(look)));
            return;
        }
        RouteAction::Pick(picked) => picked,
        RouteAction::Weigh(weights) => {
            let sum: f64 = weights.iter().map(|weight| weight.weight).sum();
            let mut at = rand::rng().random_range(0.0..sum);
            let drawn = weights.iter().filter(|weight| weight.weight > 0.0).find(|weight| {
                at -= weight.weight;
                at < 0.0
            });
            // Rounding may leave a rest: it belongs to the last that has a weight.
            let last = weights.iter().rfind(|weight| weight.weight > 0.0);
            match drawn.or(last) {
                Some(weight) => weight.id.clone(),
                None => return,
            }
        }
    };
    plan.not_first.extend(open.iter().filter(|look| id(look) != picked).map(|look| look.worker.id));
    open.retain(|look| id(look) == picked);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_not_picked_is_left_out_once_and_who_was_filtered_for_good() {
        let plan = Plan { never: vec![WorkerId(1)], not_first: vec![WorkerId(2)] };
        let left_out =
            |tried: &[WorkerId]| plan.choose(tried, |exclude| Ok(exclude.to_vec())).expect("chosen");
        assert_eq!(left_out(&[]), [WorkerId(1), WorkerId(2)]);
        assert_eq!(left_out(&[WorkerId(3)]), [WorkerId(3), WorkerId(1)]);
    }

    #[test]
    fn a_pick_that_has_left_is_no_reason_to_refuse() {
        let plan = Plan { never: vec![WorkerId(1)], not_first: vec![WorkerId(2)] };
        let away = |exclude: &[WorkerId]| match exclude.contains(&WorkerId(2)) {
            true => Err(Error::new(ErrorCode::Unavailable, "nobody is ready")),
            false => Ok(exclude.to_vec()),
        };
        assert_eq!(plan.choose(&[], away).expect("the next best"), [WorkerId(1)]);
        let wrong = |_: &[WorkerId]| Err::<(), _>(Error::new(ErrorCode::NotFound, "no such model"));
        assert_eq!(plan.choose(&[], wrong).expect_err("not for want of workers").code, ErrorCode::NotFound);
    }
}
