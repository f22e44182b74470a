//! Pairs of workers that split a request: who fits whom, and the choice of both at once.
//!
//! A pair is taken whole or not at all: as long as one half is missing or failing, the other one hears of nothing.

use std::sync::Arc;

use branchline_core::{Error, Result, Role};
use branchline_routing::{PolicyKind, cheapest_pair};

use crate::fleet::Fleet;
use crate::route::{Choice, Hints, RouteQuery, unavailable};
use crate::worker::Worker;

/// The two workers of one request.
#[derive(Debug)]
pub struct PairChoice {
    /// Computes the prompt.
    pub prefill: Choice,
    /// Gets its pages and decodes.
    pub decode: Choice,
}

impl Worker {
    /// What it is there for: as the operator says, else as it says itself.
    pub fn role(&self) -> Role {
        let told = self.spec().role();
        if told != Role::Regular {
            return told;
        }
        self.model().map_or(Role::Regular, |model| match model.info.role.as_str() {
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            _ => Role::Regular,
        })
    }

    /// Whether it can answer a request without another one. SGLang's halves can't.
    pub fn serves_alone(&self) -> bool {
        match self.role() {
            Role::Regular | Role::Both => true,
            Role::Decode => self.runtime() != "sglang",
            Role::Prefill => false,
        }
    }
}

/// Whether pages can go from one to the other.
fn fits(prefill: &Worker, decode: &Worker) -> bool {
    if prefill.id == decode.id
        || prefill.transport() != decode.transport()
        || prefill.spec().group != decode.spec().group
    {
        return false;
    }
    match (prefill.model(), decode.model()) {
        (Some(one), Some(other)) => {
            let (one, other) = (&one.info, &other.info);
            one.numerics_id == other.numerics_id
                && one.page_size == other.page_size
                && one.weight_version == other.weight_version
        }
        (None, None) => prefill.runtime() == decode.runtime(),
        _ => false,
    }
}

impl Fleet {
    /// Whether requests of this kind for `model` may be split: some worker is there for each half.
    pub fn may_split(&self, model: Option<&str>, query: &RouteQuery<'_>) -> bool {
        let (prefill, decode) = self.halves(model, query);
        !prefill.is_empty() && !decode.is_empty()
    }

    /// Chooses two workers that fit each other and counts the request on both.
    ///
    /// # Errors
    /// `Unavailable` if no whole pair can take it now.
    pub fn choose_pair(&self, model: Option<&str>, query: &RouteQuery<'_>) -> Result<PairChoice> {
        let (prefill, decode) = self.halves(model, query);
        for _ in 0..=prefill.len() + decode.len() {
            let mut first = self.fit(&refs(&prefill), query);
            let mut second = self.fit(&refs(&decode), query);
            // Only whole pairs: a half without its other one takes no part in the choice.
            first.retain(|one| second.iter().any(|other| fits(one, other)));
            second.retain(|other| first.iter().any(|one| fits(one, other)));
            if first.is_empty() {
                break;
            }
            if let Some(pair) = self.take_pair(&first, &second, query) {
                return Ok(pair);
            }
        }
        Err(self.no_pair(model))
    }

    fn take_pair(
        &self,
        prefill: &[&Arc<Worker>],
        decode: &[&Arc<Worker>],
        query: &RouteQuery<'_>,
    ) -> Option<PairChoice> {
        let router = &self.shared.router;
        let first = router.weigh(PolicyKind::CacheAware, prefill, query);
        let second = router.weigh(PolicyKind::CacheAware, decode, query);
        let (at, with) = cheapest_pair(
            &first.candidates,
            &second.candidates,
            |at, with| fits(prefill[at], decode[with]),
            &mut *router.random.lock(),
        )?;
        // If the second one has just let in its one probe, the first choice is dropped, which takes it off the load.
        // The first one writes nothing.
        let alone = RouteQuery { hints: Hints { expected_tokens: None, ..query.hints }, ..*query };
        let prefill = router.take(prefill, first, at, &alone)?;
        let mut decode = router.take(decode, second, with, query)?;
        decode.guard.waits_for_another();
        Some(PairChoice { prefill, decode })
    }

    /// Ready workers for each half that have a ready other half.
    fn halves(&self, model: Option<&str>, query: &RouteQuery<'_>) -> (Vec<Arc<Worker>>, Vec<Arc<Worker>>) {
        let workers = self.workers.load();
        let of = |wanted: Role| {
            let serving = workers.iter().filter(|worker| {
                let role = worker.role();
                (role == wanted || role == Role::Both)
                    && query.transport.is_none_or(|transport| worker.transport() == transport)
                    && worker.holds(query.namespace.adapter)
                    && worker.is_ready()
                    && worker.can_serve(model)
            });
            serving.cloned().collect::<Vec<_>>()
        };
        let (mut prefill, mut decode) = (of(Role::Prefill), of(Role::Decode));
        prefill.retain(|one| decode.iter().any(|other| fits(one, other)));
        decode.retain(|other| prefill.iter().any(|one| fits(one, other)));
        (prefill, decode)
    }

    pub(crate) fn no_pair(&self, model: Option<&str>) -> Error {
        let named = model.map(|name| format!(" for model '{name}'")).unwrap_or_default();
        unavailable(format!(
            "no pair of a prefill and a decode worker{named} can take the request; try again"
        ))
    }

    /// Whether a request for `model` (absent: any) could be served now: by a worker alone, or by a whole pair.
    pub fn is_serving(&self, model: Option<&str>) -> bool {
        let workers = self.workers.load();
        let alone = workers
            .iter()
            .any(|worker| worker.is_ready() && worker.serves_alone() && worker.can_serve(model));
        alone || self.may_split(model, &RouteQuery::default())
    }
}

fn refs(workers: &[Arc<Worker>]) -> Vec<&Arc<Worker>> {
    workers.iter().collect()
}
