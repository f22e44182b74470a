//! What one delta of the contract says, in the words of the API families.

use branchline_core::{Error, ErrorCode, Result};
use branchline_protocol::openai::{FinishReason, Matched};
use branchline_protocol::{GrammarInfo, LeaseNote, Position, Timings};
use branchline_worker::proto;

use super::LeaseName;

/// News of one sequence.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    /// Which of the n sequences.
    pub index: u32,
    /// New ids.
    pub token_ids: Vec<u32>,
    /// New text, whole characters.
    pub text: String,
    /// Of the new ids, if asked for.
    pub logprobs: Vec<Position>,
    /// Of the prompt, if asked for; may come in several pieces.
    pub input: Vec<Position>,
    /// With the request's first piece.
    pub prompt: Option<PromptFound>,
    /// Once a request that has a lease.
    pub lease: Option<LeaseFound>,
    /// With the sequence's last piece.
    pub end: Option<End>,
}

/// What was found of the prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptFound {
    /// Its length.
    pub tokens: u32,
    /// Tokens found in the cache.
    pub cached: u32,
}

/// What became of a request's lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseFound {
    /// `held`, `lost` or `unmatched`.
    pub state: &'static str,
    /// The engine's names of the lease, if it was acquired.
    pub name: Option<LeaseName>,
    /// Its signed id; filled in by whoever knows the owner.
    pub id: Option<String>,
    /// Tokens held.
    pub tokens: u32,
    /// Pages held.
    pub pages: u32,
    /// Time until it runs out.
    pub ttl_ms: u64,
}

/// How a lease was found, in the words of answers.
pub fn lease_state(report: &proto::LeaseReport) -> Option<&'static str> {
    match report.state() {
        proto::LeaseState::Held => Some("held"),
        proto::LeaseState::Lost => Some("lost"),
        proto::LeaseState::Unmatched => Some("unmatched"),
        proto::LeaseState::Unspecified => None,
    }
}

impl LeaseFound {
    fn read(report: proto::LeaseReport) -> Result<Self> {
        let state = lease_state(&report).ok_or_else(|| nonsense("a lease has no state"))?;
        let Some(grant) = report.grant else { return Ok(Self { state, ..Self::default() }) };
        Ok(Self {
            state,
            name: Some(LeaseName { engine_id: grant.engine_id, lease_id: grant.lease_id }),
            id: None,
            tokens: grant.tokens,
            pages: grant.pages,
            ttl_ms: grant.ttl_ms,
        })
    }

    /// As answers tell it.
    pub fn note(&self) -> LeaseNote {
        LeaseNote {
            lease: self.state,
            lease_id: self.id.clone(),
            lease_tokens: self.id.is_some().then_some(self.tokens),
        }
    }
}

/// The end of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// Why.
    pub reason: FinishReason,
    /// What matched, for a stop.
    pub matched: Option<Matched>,
    /// Tokens generated.
    pub completion_tokens: u32,
    /// How often it was retracted.
    pub retractions: u32,
    /// Words for an abort.
    pub message: String,
    /// Where the time went, if the worker tells.
    pub timings: Option<Timings>,
    /// How often the request was continued on another worker after its own had died.
    pub continuations: u32,
    /// How its constraint was met, if the worker tells.
    pub grammar: Option<GrammarInfo>,
}

impl Piece {
    /// Reads a delta.
    ///
    /// # Errors
    /// `UpstreamFailed` if the worker spoke nonsense: an unknown finish reason or columns of unequal length.
    pub(super) fn read(delta: proto::SequenceDelta) -> Result<Self> {
        let asked = delta.logprobs.is_some();
        let logprobs = delta.logprobs.map(positions).transpose()?.unwrap_or_default();
        if asked && logprobs.len() != delta.token_ids.len() {
            return Err(nonsense("a delta has not one logprob for each token"));
        }
        Ok(Self {
            index: delta.index,
            token_ids: delta.token_ids,
            text: delta.text,
            logprobs,
            input: delta.input_logprobs.map(positions).transpose()?.unwrap_or_default(),
            prompt: delta
                .prompt
                .map(|prompt| PromptFound { tokens: prompt.prompt_tokens, cached: prompt.cached_tokens }),
            lease: delta.lease.map(LeaseFound::read).transpose()?,
            end: delta.finish.map(end).transpose()?,
        })
    }
}

fn end(finish: proto::Finish) -> Result<End> {
    let reason = match finish.reason() {
        proto::FinishReason::Stop => FinishReason::Stop,
        proto::FinishReason::Length => FinishReason::Length,
        proto::FinishReason::Abort => FinishReason::Abort,
        proto::FinishReason::Unspecified => return Err(nonsense("a sequence ended without a reason")),
    };
    Ok(End {
        reason,
        matched: finish.matched.map(|matched| match matched {
            proto::finish::Matched::MatchedTokenId(id) => Matched::Token(id),
            proto::finish::Matched::MatchedStop(text) => Matched::Text(text),
        }),
        completion_tokens: finish.completion_tokens,
        retractions: finish.retractions,
        message: finish.message,
        timings: finish.timings.map(|told| Timings {
            queue_ms: told.queue_ms,
            prefill_ms: told.prefill_ms,
            decode_ms: told.decode_ms,
            detokenise_ms: told.detokenise_ms,
            drafted: told.drafted_tokens,
            accepted: told.accepted_tokens,
        }),
        continuations: 0,
        grammar: finish.grammar.map(|told| GrammarInfo {
            backend: told.backend,
            reason: told.reason,
            compile_ms: told.compile_ms,
            mask_p99_ms: told.mask_p99_ms,
            forced_share: f64::from(told.forced_tokens) / f64::from(told.constrained_tokens.max(1)),
            complete: told.complete,
            enforced: told.enforced,
            valid: told.valid,
        }),
    })
}

fn positions(columns: proto::TokenLogprobs) -> Result<Vec<Position>> {
    let count = columns.token_ids.len();
    let fits = |length: usize| length == 0 || length == count;
    if columns.logprobs.len() != count || !fits(columns.top.len()) || !fits(columns.chosen.len()) {
        return Err(nonsense("logprob columns have unequal lengths"));
    }
    let mut top = columns.top.into_iter();
    let mut chosen = columns.chosen.into_iter();
    Ok(columns
        .token_ids
        .into_iter()
        .zip(columns.logprobs)
        .map(|(id, logprob)| Position {
            id,
            logprob: (!logprob.is_nan()).then_some(logprob),
            top: top.next().map(pairs).unwrap_or_default(),
            chosen: chosen.next().map(pairs).unwrap_or_default(),
        })
        .collect())
}

fn pairs(alternatives: proto::TopLogprobs) -> Vec<(u32, f32)> {
    alternatives.token_ids.into_iter().zip(alternatives.logprobs).collect()
}

pub(super) fn nonsense(what: &str) -> Error {
    Error::new(ErrorCode::UpstreamFailed, format!("the worker's answer is unusable: {what}; try again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> proto::TokenLogprobs {
        let top = |id| proto::TopLogprobs { token_ids: vec![id, 9], logprobs: vec![-0.5, -1.0] };
        proto::TokenLogprobs {
            start: 0,
            token_ids: vec![1, 2],
            logprobs: vec![f32::NAN, -0.5],
            top: vec![proto::TopLogprobs::default(), top(2)],
            chosen: Vec::new(),
        }
    }

    #[test]
    fn a_position_without_a_logprob_is_none_and_keeps_its_place() {
        let delta = proto::SequenceDelta { input_logprobs: Some(columns()), ..Default::default() };
        let piece = Piece::read(delta).unwrap();
        assert_eq!(piece.input[0], Position { id: 1, ..Position::default() });
        assert_eq!(piece.input[1].top, [(2, -0.5), (9, -1.0)]);
    }

    #[test]
    fn unequal_columns_and_unknown_reasons_blame_the_worker() {
        let short = proto::TokenLogprobs { logprobs: vec![0.0], ..columns() };
        let deltas = [
            proto::SequenceDelta { input_logprobs: Some(short), ..Default::default() },
            proto::SequenceDelta { logprobs: Some(columns()), ..Default::default() },
            proto::SequenceDelta { lease: Some(proto::LeaseReport::default()), ..Default::default() },
            proto::SequenceDelta { finish: Some(proto::Finish::default()), ..Default::default() },
        ];
        for delta in deltas {
            assert_eq!(Piece::read(delta).unwrap_err().code, ErrorCode::UpstreamFailed);
        }
    }

    #[test]
    fn what_matched_is_kept() {
        let finish = |matched| proto::Finish {
            reason: proto::FinishReason::Stop.into(),
            matched: Some(matched),
            completion_tokens: 3,
            ..Default::default()
        };
        let read = |matched| end(finish(matched)).unwrap().matched;
        assert_eq!(read(proto::finish::Matched::MatchedTokenId(2)), Some(Matched::Token(2)));
        assert_eq!(read(proto::finish::Matched::MatchedStop(".".into())), Some(Matched::Text(".".into())));
    }
}
