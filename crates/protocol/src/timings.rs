//! Where a request's time went, in the two forms that clients know: seconds beside `usage`, and in `meta_info`.

use serde::Serialize;

/// What a worker tells of one sequence, milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timings {
    /// From arrival at the worker to the first scheduling.
    pub queue_ms: f64,
    /// From there to the first token.
    pub prefill_ms: f64,
    /// From the first token to the end.
    pub decode_ms: f64,
    /// Of these, spent making text of tokens.
    pub detokenise_ms: f64,
    /// Guessed tokens that were checked.
    pub drafted: u32,
    /// Those of them that were right.
    pub accepted: u32,
}

impl Timings {
    /// Of a request with several sequences: the longest of each part, which run side by side, and all guesses.
    pub fn join(self, other: Self) -> Self {
        Self {
            queue_ms: self.queue_ms.max(other.queue_ms),
            prefill_ms: self.prefill_ms.max(other.prefill_ms),
            decode_ms: self.decode_ms.max(other.decode_ms),
            detokenise_ms: self.detokenise_ms + other.detokenise_ms,
            drafted: self.drafted + other.drafted,
            accepted: self.accepted + other.accepted,
        }
    }
}

/// Seconds beside the counts of `usage`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct UsageTimes {
    /// Until a worker took it up.
    pub queue_time: f64,
    /// Computing the prompt, to the first token.
    pub prompt_time: f64,
    /// From the first token to the end.
    pub completion_time: f64,
    /// Of these, spent making text of tokens.
    pub detokenize_time: f64,
    /// Sum of the first three.
    pub total_time: f64,
    /// Guesses, if any were checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<Predicted>,
}

/// Guessed tokens, in OpenAI's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Predicted {
    /// That were right.
    pub accepted_prediction_tokens: u32,
    /// That were wrong.
    pub rejected_prediction_tokens: u32,
}

impl From<Timings> for UsageTimes {
    fn from(timings: Timings) -> Self {
        let Timings { queue_ms, prefill_ms, decode_ms, detokenise_ms, drafted, accepted } = timings;
        Self {
            queue_time: queue_ms / 1e3,
            prompt_time: prefill_ms / 1e3,
            completion_time: decode_ms / 1e3,
            detokenize_time: detokenise_ms / 1e3,
            total_time: (queue_ms + prefill_ms + decode_ms) / 1e3,
            completion_tokens_details: (drafted > 0).then(|| Predicted {
                accepted_prediction_tokens: accepted,
                rejected_prediction_tokens: drafted.saturating_sub(accepted),
            }),
        }
    }
}

/// The same in SGLang's names, with the last piece of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MetaTimes {
    /// Seconds until a worker took it up.
    pub queue_time: f64,
    /// Seconds from there to the first token.
    pub prefill_time: f64,
    /// Seconds from the first token to the end.
    pub decode_time: f64,
    /// Of these, seconds spent making text of tokens.
    pub detokenize_time: f64,
    /// Guessed tokens that were checked, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec_draft_token_num: Option<u32>,
    /// Those of them that were right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec_accept_token_num: Option<u32>,
    /// Their share.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spec_accept_rate: Option<f64>,
}

impl From<Timings> for MetaTimes {
    fn from(timings: Timings) -> Self {
        let drafted = (timings.drafted > 0).then_some(timings.drafted);
        Self {
            queue_time: timings.queue_ms / 1e3,
            prefill_time: timings.prefill_ms / 1e3,
            decode_time: timings.decode_ms / 1e3,
            detokenize_time: timings.detokenise_ms / 1e3,
            spec_draft_token_num: drafted,
            spec_accept_token_num: drafted.map(|_| timings.accepted),
            spec_accept_rate: drafted.map(|drafted| f64::from(timings.accepted) / f64::from(drafted)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timings(decode_ms: f64, drafted: u32, accepted: u32) -> Timings {
        Timings { queue_ms: 250.0, prefill_ms: 500.0, decode_ms, detokenise_ms: 1.0, drafted, accepted }
    }

    #[test]
    fn usage_tells_seconds_and_guesses_only_if_there_were_any() {
        let plain = serde_json::to_value(UsageTimes::from(timings(1000.0, 0, 0))).unwrap();
        let wanted = serde_json::json!({"queue_time": 0.25, "prompt_time": 0.5, "completion_time": 1.0,
            "detokenize_time": 0.001, "total_time": 1.75});
        assert_eq!(plain, wanted);
        let guessed = serde_json::to_value(UsageTimes::from(timings(1.0, 7, 5))).unwrap();
        let wanted = serde_json::json!({"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2});
        assert_eq!(guessed["completion_tokens_details"], wanted);
    }

    #[test]
    fn meta_info_has_the_share_of_right_guesses() {
        let meta = serde_json::to_value(MetaTimes::from(timings(1.0, 8, 6))).unwrap();
        assert_eq!((&meta["spec_draft_token_num"], &meta["spec_accept_token_num"]), (&8.into(), &6.into()));
        assert_eq!(meta["spec_accept_rate"], 0.75);
        let plain = serde_json::to_value(MetaTimes::from(timings(1.0, 0, 0))).unwrap();
        assert_eq!(plain.as_object().unwrap().len(), 4, "{plain}");
    }

    #[test]
    fn sequences_side_by_side_take_as_long_as_the_longest() {
        let joined = timings(10.0, 3, 1).join(timings(30.0, 4, 4));
        assert_eq!((joined.queue_ms, joined.decode_ms, joined.detokenise_ms), (250.0, 30.0, 2.0));
        assert_eq!((joined.drafted, joined.accepted), (7, 5));
    }
}
