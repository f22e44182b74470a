//! What `/generate` writes: one object a sequence, the same in a stream, where text and lists are cumulative.

use serde::{Serialize, Serializer};

use crate::logprobs::{Position, Spelling};
use crate::openai::Matched;
use crate::{GrammarInfo, LeaseNote, MetaTimes};

/// One sequence, so far or whole.
#[derive(Debug, Clone, Serialize)]
pub struct GenerateAnswer<'a> {
    /// All text so far.
    pub text: &'a str,
    /// All ids so far.
    pub output_ids: &'a [u32],
    /// Everything else.
    pub meta_info: Meta<'a>,
    /// Which sequence, in streams of more than one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
}

/// What is known of a sequence.
#[derive(Debug, Clone, Serialize)]
pub struct Meta<'a> {
    /// The request's id.
    pub id: &'a str,
    /// Null while it runs.
    pub finish_reason: Option<Finish>,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated so far.
    pub completion_tokens: u32,
    /// Prompt tokens found in the cache.
    pub cached_tokens: u32,
    /// Seconds since the request arrived.
    pub e2e_latency: f64,
    /// How often it was retracted.
    pub num_retractions: u32,
    /// How often it was continued on another worker after its own had died; left out if never.
    #[serde(skip_serializing_if = "is_zero")]
    pub continuations: u32,
    /// With the end, if the worker tells.
    #[serde(flatten)]
    pub times: Option<MetaTimes>,
    /// Version of the weights.
    pub weight_version: &'a str,
    /// If the request named or acquired a lease.
    #[serde(flatten)]
    pub lease: Option<&'a LeaseNote>,
    /// If asked for.
    #[serde(flatten)]
    pub logprobs: Option<&'a MetaLogprobs>,
    /// How the constraint was met, if asked for, cut off or best effort.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar_info: Option<&'a GrammarInfo>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the form that serde calls")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Why a sequence ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Finish {
    /// A stop string, stop id or end-of-sequence id.
    Stop {
        /// Which; null if unknown.
        matched: Option<Matched>,
    },
    /// The request's limit, or the end of the context or of the cache.
    Length {
        /// Tokens generated until then.
        length: u32,
    },
    /// Aborted by its owner or a deadline.
    Abort {
        /// Words.
        message: String,
    },
}

/// `[logprob, id, text]`; the logprob is null where none exists, the text unless asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Triple(pub Option<f32>, pub u32, pub Option<String>);

impl Serialize for Triple {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // JSON has no minus infinity; the least float keeps the value a number.
        let logprob = self.0.map(|logprob| if logprob == f32::NEG_INFINITY { f32::MIN } else { logprob });
        (logprob, self.1, &self.2).serialize(serializer)
    }
}

/// The six lists of logprobs, grown as positions come.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct MetaLogprobs {
    /// Prompt positions from the start asked for.
    pub input_token_logprobs: Vec<Triple>,
    /// Generated positions.
    pub output_token_logprobs: Vec<Triple>,
    /// Alternatives of the prompt; null where no logprob exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_top_logprobs: Option<Vec<Option<Vec<Triple>>>>,
    /// Alternatives of the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_top_logprobs: Option<Vec<Option<Vec<Triple>>>>,
    /// The ids asked for, over the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_token_ids_logprobs: Option<Vec<Option<Vec<Triple>>>>,
    /// The ids asked for, over the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_token_ids_logprobs: Option<Vec<Option<Vec<Triple>>>>,
    #[serde(skip)]
    with_text: bool,
}

impl MetaLogprobs {
    /// Empty lists; alternatives and chosen ids only if asked for.
    pub fn new(with_top: bool, with_chosen: bool, with_text: bool) -> Self {
        let (top, chosen) = (with_top.then(Vec::new), with_chosen.then(Vec::new));
        Self {
            input_top_logprobs: top.clone(),
            output_top_logprobs: top,
            input_token_ids_logprobs: chosen.clone(),
            output_token_ids_logprobs: chosen,
            with_text,
            ..Self::default()
        }
    }

    /// Adds prompt positions.
    pub fn push_input(&mut self, positions: &[Position], spelling: &impl Spelling) {
        for position in positions {
            self.input_token_logprobs.push(self.triple(position.id, position.logprob, spelling));
            let (top, chosen) = self.lists(position, spelling);
            extend(&mut self.input_top_logprobs, top);
            extend(&mut self.input_token_ids_logprobs, chosen);
        }
    }

    /// Adds generated positions.
    pub fn push_output(&mut self, positions: &[Position], spelling: &impl Spelling) {
        for position in positions {
            self.output_token_logprobs.push(self.triple(position.id, position.logprob, spelling));
            let (top, chosen) = self.lists(position, spelling);
            extend(&mut self.output_top_logprobs, top);
            extend(&mut self.output_token_ids_logprobs, chosen);
        }
    }

    fn triple(&self, id: u32, logprob: Option<f32>, spelling: &impl Spelling) -> Triple {
        Triple(logprob, id, self.with_text.then(|| spelling.text(id)))
    }

    #[allow(clippy::type_complexity, reason = "two lists of one kind, named at both ends")]
    fn lists(
        &self,
        position: &Position,
        spelling: &impl Spelling,
    ) -> (Option<Vec<Triple>>, Option<Vec<Triple>>) {
        let spell = |list: &[(u32, f32)]| {
            position
                .logprob
                .is_some()
                .then(|| list.iter().map(|&(id, logprob)| self.triple(id, Some(logprob), spelling)).collect())
        };
        (spell(&position.top), spell(&position.chosen))
    }
}

fn extend(column: &mut Option<Vec<Option<Vec<Triple>>>>, entry: Option<Vec<Triple>>) {
    if let Some(column) = column {
        column.push(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    struct Letters;

    impl Spelling for Letters {
        fn text(&self, id: u32) -> String {
            String::from_utf8(self.bytes(id)).unwrap()
        }
        fn bytes(&self, id: u32) -> Vec<u8> {
            vec![b'a' + id as u8]
        }
    }

    #[test]
    fn triples_and_finish_reasons_have_the_native_shape() {
        let mut lists = MetaLogprobs::new(true, false, true);
        lists.push_input(&[Position { id: 0, ..Position::default() }], &Letters);
        let position =
            Position { id: 1, logprob: Some(-0.5), top: vec![(1, -0.5), (2, -1.0)], chosen: vec![] };
        lists.push_output(&[position], &Letters);
        let answer = GenerateAnswer {
            text: "b",
            output_ids: &[1],
            meta_info: Meta {
                id: "r",
                finish_reason: Some(Finish::Length { length: 1 }),
                prompt_tokens: 1,
                completion_tokens: 1,
                cached_tokens: 0,
                e2e_latency: 0.5,
                num_retractions: 0,
                continuations: 0,
                times: None,
                weight_version: "v",
                lease: None,
                logprobs: Some(&lists),
                grammar_info: None,
            },
            index: None,
        };
        assert_eq!(
            serde_json::to_value(answer).unwrap(),
            json!({"text": "b", "output_ids": [1], "meta_info": {"id": "r",
                "finish_reason": {"type": "length", "length": 1}, "prompt_tokens": 1, "completion_tokens": 1,
                "cached_tokens": 0, "e2e_latency": 0.5, "num_retractions": 0, "weight_version": "v",
                "input_token_logprobs": [[null, 0, "a"]], "output_token_logprobs": [[-0.5, 1, "b"]],
                "input_top_logprobs": [null], "output_top_logprobs": [[[-0.5, 1, "b"], [-1.0, 2, "c"]]]}})
        );
    }

    #[test]
    fn a_stop_says_what_matched() {
        let shape = |matched| serde_json::to_value(Finish::Stop { matched }).unwrap();
        assert_eq!(shape(Some(Matched::Token(2))), json!({"type": "stop", "matched": 2}));
        assert_eq!(shape(Some(Matched::Text(".".into()))), json!({"type": "stop", "matched": "."}));
    }

    #[test]
    fn no_text_and_minus_infinity_stay_readable() {
        let mut lists = MetaLogprobs::new(false, false, false);
        let position = Position { id: 1, logprob: Some(f32::NEG_INFINITY), ..Position::default() };
        lists.push_output(&[position], &Letters);
        let value = serde_json::to_value(&lists).unwrap();
        assert!(value["output_token_logprobs"][0][0].as_f64().unwrap() < -1e38);
        assert!(value["output_token_logprobs"][0][2].is_null());
        assert!(value.get("output_top_logprobs").is_none());
    }
}
