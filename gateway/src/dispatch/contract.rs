//! A validated request as the engine contract says it. Absent stays absent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use branchline_core::Error;
use branchline_protocol::{Constraint, Form, LogprobRequest, Routing, Sampling, Terms};
use branchline_worker::{AdapterKey, CacheKey, Hints, Model, RouteQuery, Transport, proto};

use super::{JobLease, LiveGuard};
use crate::guard::Permit;
use crate::http::Asked;
use crate::middleware::route::Plan;

/// One prompt, ready to run.
#[derive(Debug)]
pub struct Job {
    /// The model that serves it.
    pub model: Arc<Model>,
    /// Its entry in the table of live requests.
    pub live: LiveGuard,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// How to sample.
    pub sampling: Sampling,
    /// Which logprobs to return.
    pub logprobs: Option<LogprobRequest>,
    /// Cache separation and class.
    pub routing: Routing,
    /// Its lease, checked.
    pub lease: Option<JobLease>,
    /// What it was let in with, if anything is limited: told what it used.
    pub permit: Option<Arc<Permit>>,
    /// The client's W3C trace context, if any.
    pub traceparent: String,
    /// The client's own name for the request, if any.
    pub tag: Option<String>,
    /// Its mark, if its answer tells why it went where it went.
    pub asked: Option<Asked>,
    /// Hash of the session that it belongs to, if the policy asks.
    pub key: Option<u64>,
    /// What its client expects of it.
    pub hints: Hints,
    /// What stands for a seed that the client did not give, so that a continuation draws the same numbers.
    pub seed: u64,
    /// Whom middleware rules out.
    pub(crate) plan: Plan,
}

/// How much time is left to a request, by the gateway's limit and by its client's word.
pub(in crate::dispatch) fn time_left(
    permit: Option<&Permit>,
    limit: Option<Duration>,
    arrived: Instant,
) -> Option<Duration> {
    let own = permit.and_then(Permit::deadline);
    let own = own.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let limit = limit.map(|limit| limit.saturating_sub(arrived.elapsed()));
    own.into_iter().chain(limit).min()
}

impl Job {
    /// What the fleet is asked when a worker is chosen for `tokens`: the prompt, or that and what was emitted.
    pub(crate) fn query<'a>(&'a self, tokens: &'a [u32]) -> RouteQuery<'a> {
        let expected = self.hints.expected_tokens;
        let expected = expected.map(|expected| expected.min(self.sampling.max_tokens.unwrap_or(u32::MAX)));
        RouteQuery {
            token_ids: tokens,
            hints: Hints { expected_tokens: expected, ..self.hints },
            namespace: cache_key(&self.routing),
            key: self.key,
            transport: Some(Transport::Grpc),
            engine_id: self.lease.as_ref().and_then(JobLease::engine_id),
            ..RouteQuery::default()
        }
    }

    /// Tells the door that so many tokens were computed or emitted.
    pub(in crate::dispatch) fn used(&self, tokens: u32) {
        if let Some(permit) = &self.permit {
            permit.used(tokens);
        }
    }

    /// The request of the contract.
    pub(in crate::dispatch) fn request(&self) -> proto::GenerateRequest {
        let routing = &self.routing;
        let mut sampling = sampling(&self.sampling);
        // A model's own default of several sequences would be more than the client can tell apart.
        let usual = self.model.info.default_sampling.as_ref().and_then(|usual| usual.n);
        if sampling.n.is_none() && usual.is_some_and(|n| n > 1) {
            sampling.n = Some(1);
        }
        sampling.seed = sampling.seed.or(Some(self.seed));
        proto::GenerateRequest {
            request_id: self.live.id().as_str().to_owned(),
            token_ids: self.tokens.clone(),
            sampling: Some(sampling),
            logprobs: self.logprobs.as_ref().map(|logprobs| self.logprob_params(logprobs)),
            cache_namespace: cache_namespace(routing),
            priority: routing.priority,
            traceparent: self.traceparent.clone(),
            lease: self.lease.as_ref().map(JobLease::to_proto),
            grammar: self.sampling.constraint.as_ref().map(|one| grammar(one, &self.sampling.terms)),
            ..proto::GenerateRequest::default()
        }
    }

    /// Whether one worker may compute its prompt and another one its output: not if the prompt's own scores are wanted,
    /// which only who computes it knows, if a lease says where it belongs, or if there is no output.
    pub(super) fn may_be_split(&self) -> bool {
        let scored = self.logprobs.as_ref().is_some_and(|logprobs| logprobs.input_start.is_some());
        !scored && self.lease.is_none() && self.sampling.max_tokens != Some(0)
    }

    /// A worker's refusal in the client's own words: it knows the constraint as `grammar` only, the rest by message.
    pub(super) fn in_clients_words(&self, mut error: Error) -> Error {
        let asked = self.sampling.constraint.as_ref();
        if let (Some("grammar"), Some(constraint)) = (error.field.as_deref(), asked) {
            let own = format!("`{}`", constraint.field);
            error.message = match error.message.strip_prefix("grammar ") {
                Some(rest) => format!("{own} {rest}"),
                None => error.message.replacen("`grammar`", &own, 1),
            };
            error.field = Some(constraint.field.clone());
        } else if let Some(own) = error.field.as_deref().and_then(clients_name) {
            error.field = Some(own.to_owned());
        }
        error
    }

    fn logprob_params(&self, logprobs: &LogprobRequest) -> proto::LogprobParams {
        let top = logprobs.top_within(super::limits(&self.model));
        proto::LogprobParams {
            output: Some(logprobs.output),
            top_k: Some(top),
            input_start: logprobs.input_start,
            token_ids: logprobs.token_ids.clone(),
        }
    }
}

/// What separates a request's cached prefixes, for choosing its worker.
pub(in crate::dispatch) fn cache_key(routing: &Routing) -> CacheKey<'_> {
    let adapter = routing.adapter.as_ref();
    CacheKey {
        cache_salt: routing.cache_salt.as_deref(),
        extra_key: routing.extra_key.as_deref(),
        adapter: adapter.map(|own| AdapterKey { name: &own.name, digest: &own.digest }),
    }
}

/// The same as the contract says it; absent if nothing separates them.
pub(super) fn cache_namespace(routing: &Routing) -> Option<proto::CacheNamespace> {
    let adapter = routing.adapter.as_ref();
    let separated = routing.cache_salt.is_some() || routing.extra_key.is_some() || adapter.is_some();
    separated.then(|| proto::CacheNamespace {
        cache_salt: routing.cache_salt.clone(),
        extra_key: routing.extra_key.clone(),
        adapter: adapter.map(|own| own.name.clone()),
        adapter_digest: adapter.map(|own| own.digest.clone()),
    })
}

fn grammar(constraint: &Constraint, terms: &Terms) -> proto::Grammar {
    let form = match &constraint.form {
        Form::JsonSchema(text) => proto::grammar::Form::JsonSchema(text.clone()),
        Form::Regex(text) => proto::grammar::Form::Regex(text.clone()),
        Form::Ebnf(text) => proto::grammar::Form::Ebnf(text.clone()),
        Form::StructuralTag(text) => proto::grammar::Form::StructuralTag(text.clone()),
        Form::Choice(all) => proto::grammar::Form::Choice(serde_json::json!(all).to_string()),
    };
    let enforcement = match terms.best_effort {
        true => proto::Enforcement::BestEffort,
        false => proto::Enforcement::Unspecified,
    };
    proto::Grammar {
        form: Some(form),
        reasoning: terms.marks.as_ref().map(|marks| proto::Reasoning {
            begin: marks.begin.clone(),
            end: marks.end.clone(),
            implicit: marks.implicit || terms.reasons,
            max_tokens: terms.budget.or(terms.allowance),
        }),
        enforcement: enforcement.into(),
        report: terms.report,
        ..proto::Grammar::default()
    }
}

fn sampling(sampling: &Sampling) -> proto::SamplingParams {
    proto::SamplingParams {
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        frequency_penalty: sampling.frequency_penalty,
        presence_penalty: sampling.presence_penalty,
        seed: sampling.seed,
        n: sampling.n,
        max_tokens: sampling.max_tokens,
        min_tokens: sampling.min_tokens,
        stop: sampling.stop.clone(),
        stop_token_ids: sampling.stop_token_ids.clone(),
        ignore_eos: sampling.ignore_eos,
        skip_special_tokens: sampling.skip_special_tokens,
        include_stop: sampling.include_stop,
        logit_bias: sampling.logit_bias.iter().copied().collect(),
    }
}

/// What clients call a field of the contract; none if it is no other name.
fn clients_name(field: &str) -> Option<&str> {
    match field {
        "logprobs.token_ids" => Some("token_ids_logprob"),
        "cache_namespace.adapter" | "cache_namespace.adapter_digest" => Some("model"),
        "logprobs.input_start" => Some("logprob_start_len"),
        _ => field.strip_prefix("sampling."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_names_fields_as_the_contract_does_and_clients_hear_their_own() {
        assert_eq!(clients_name("sampling.stop_token_ids"), Some("stop_token_ids"));
        assert_eq!(clients_name("logprobs.token_ids"), Some("token_ids_logprob"));
        assert_eq!(clients_name("token_ids"), None);
    }

    #[test]
    fn a_field_the_client_did_not_send_is_absent_on_the_wire() {
        assert_eq!(sampling(&Sampling::default()), proto::SamplingParams::default());
    }

    #[test]
    fn a_constraint_reaches_the_engine_in_its_own_form() {
        let wire = |form| grammar(&Constraint { form, field: "regex".into() }, &Terms::default()).form;
        assert_eq!(wire(Form::Regex("a+".into())), Some(proto::grammar::Form::Regex("a+".into())));
        let choice = wire(Form::Choice(vec!["a".into(), "b\"".into()]));
        assert_eq!(choice, Some(proto::grammar::Form::Choice(r#"["a","b\""]"#.into())));
    }

    #[test]
    fn explicit_zeros_and_ones_arrive() {
        let explicit = Sampling {
            temperature: Some(0.0),
            top_p: Some(1.0),
            top_k: Some(-1),
            logit_bias: vec![(3, -100.0)],
            ..Sampling::default()
        };
        let wire = sampling(&explicit);
        assert_eq!((wire.temperature, wire.top_p, wire.top_k), (Some(0.0), Some(1.0), Some(-1)));
        assert_eq!(wire.logit_bias.get(&3), Some(&-100.0));
    }
}
