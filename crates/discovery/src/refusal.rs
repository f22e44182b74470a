//! What went wrong, said once and not at every try.

use std::collections::{BTreeMap, BTreeSet};

use crate::api::Failure;
use crate::plan::Query;

/// What has been said already.
#[derive(Debug, Default)]
pub(crate) struct Said {
    /// Kind of the last failure of each query.
    failing: BTreeMap<usize, &'static str>,
    objects: BTreeSet<String>,
}

/// Sentences of objects that are kept apart; a fleet with more of them hears some twice.
const OBJECTS: usize = 1024;

impl Said {
    /// Tells of a query's failure, unless its last one was of the same kind.
    pub(crate) fn failure(&mut self, at: usize, query: &Query, verb: &str, failure: &Failure) {
        if self.failing.insert(at, failure.kind()) == Some(failure.kind()) {
            tracing::debug!(%query, verb, error = %failure, "the API server still refuses");
            return;
        }
        match failure.status {
            Some(403) => tracing::error!(
                %query, verb, error = %failure,
                "the API server forbids to {verb} {query}; grant {}. Tried again until it works; known workers stay",
                query.rule()
            ),
            Some(401) => tracing::error!(
                %query, error = %failure,
                "the API server does not know this token; mount a service account's or mend the kubeconfig"
            ),
            Some(410 | 504) => {
                tracing::info!(%query, error = %failure, "the watch has expired, listing again")
            }
            _ => {
                tracing::warn!(%query, verb, error = %failure, "the API server gives no answer; known workers stay")
            }
        }
    }

    /// A query works; told if it did not before.
    pub(crate) fn success(&mut self, at: usize, query: &Query) {
        if self.failing.remove(&at).is_some() {
            tracing::info!(%query, "the API server answers again");
        }
    }

    /// Tells what is wrong with an object, once.
    pub(crate) fn object(&mut self, sentence: String) {
        if self.objects.len() >= OBJECTS {
            self.objects.clear();
        }
        if self.objects.insert(sentence.clone()) {
            tracing::warn!("{sentence}");
        }
    }
}
