//! Sampling options in both spellings. Absent stays absent: defaults are the worker's.

use branchline_core::{Error, Result};
use serde_json::Value;

use crate::fields::{Bounds, Fields, as_number, as_tokens, wrong};
use crate::refused;
use crate::{Constraint, Limits, Terms};

/// Sequences a prompt may ask for.
pub const MAX_N: u32 = 128;
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

/// Which family's names are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// `max_tokens`, `min_tokens`, `seed`.
    OpenAi,
    /// `max_new_tokens`, `min_new_tokens`, `sampling_seed`.
    Native,
}

/// How tokens are chosen and when generation ends.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; [0, 100].
    pub temperature: Option<f32>,
    /// (0, 1].
    pub top_p: Option<f32>,
    /// -1 or 0 for all.
    pub top_k: Option<i32>,
    /// [0, 1].
    pub min_p: Option<f32>,
    /// [0.001, 10]: logits divided by less than that overflow.
    pub repetition_penalty: Option<f32>,
    /// [-2, 2].
    pub frequency_penalty: Option<f32>,
    /// [-2, 2].
    pub presence_penalty: Option<f32>,
    /// Negative seeds keep their bits.
    pub seed: Option<u64>,
    /// Sequences of each prompt; 1 if absent.
    pub n: Option<u32>,
    /// Tokens to generate; absent means up to the context length.
    pub max_tokens: Option<u32>,
    /// Tokens before an end is allowed.
    pub min_tokens: Option<u32>,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Ids that end the sequence.
    pub stop_token_ids: Vec<u32>,
    /// Do not end at the model's own end ids.
    pub ignore_eos: Option<bool>,
    /// Leave special tokens out of the text.
    pub skip_special_tokens: Option<bool>,
    /// Keep the matched stop in the text.
    pub include_stop: Option<bool>,
    /// Added to the logits by id, in rising order of ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// What the output must look like.
    pub constraint: Option<Constraint>,
    /// How that is to be met.
    pub terms: Terms,
}

impl Sampling {
    /// Reads the options from the object that holds them.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field for a wrong type, an out-of-range value, an id outside the vocabulary
    /// or options that contradict each other; `Unimplemented` for constraints.
    pub fn read(fields: &Fields<'_>, dialect: Dialect, limits: Limits) -> Result<Self> {
        refused::check(fields)?;
        refused::foreign(fields, dialect)?;
        let (max_tokens, min_name) = match dialect {
            Dialect::OpenAi => (openai_limit(fields)?, "min_tokens"),
            Dialect::Native => (fields.unsigned("max_new_tokens", 0..=u32::MAX)?, "min_new_tokens"),
        };
        let min_tokens = fields.unsigned(min_name, 0..=u32::MAX)?;
        if let (Some(least), Some(most)) = (min_tokens, max_tokens)
            && least > most
        {
            let path = fields.path(min_name);
            return Err(Error::invalid(
                path.as_str(),
                format!(
                    "`{path}` is {least}, more than the limit of {most} tokens; lower it or raise the limit"
                ),
            ));
        }
        Ok(Self {
            temperature: fields.number("temperature", Bounds::closed(0.0, 100.0))?,
            top_p: fields.number("top_p", Bounds::above(0.0, 1.0))?,
            top_k: fields.integer("top_k", -1..=i64::from(i32::MAX))?.map(|k| k as i32),
            min_p: fields.number("min_p", Bounds::closed(0.0, 1.0))?,
            repetition_penalty: fields.number("repetition_penalty", Bounds::closed(0.001, 10.0))?,
            frequency_penalty: fields.number("frequency_penalty", Bounds::closed(-2.0, 2.0))?,
            presence_penalty: fields.number("presence_penalty", Bounds::closed(-2.0, 2.0))?,
            seed: seed(fields, dialect)?,
            n: fields.unsigned("n", 1..=MAX_N)?,
            max_tokens,
            min_tokens,
            stop: stop(fields)?,
            stop_token_ids: match fields.array("stop_token_ids")? {
                Some(items) => as_tokens(items, &fields.path("stop_token_ids"), limits.vocab_size)?,
                None => Vec::new(),
            },
            ignore_eos: fields.bool("ignore_eos")?,
            skip_special_tokens: fields.bool("skip_special_tokens")?,
            include_stop: include_stop(fields)?,
            logit_bias: logit_bias(fields, limits)?,
            constraint: Constraint::read(fields)?,
            terms: Terms::read(fields)?,
        })
    }

    /// Adds a constraint that another field asks for.
    ///
    /// # Errors
    /// `InvalidArgument` if there is one already.
    pub fn constrain(&mut self, further: Option<Constraint>) -> Result<()> {
        let Some(further) = further else { return Ok(()) };
        if let Some(first) = &self.constraint {
            let message = format!(
                "`{}` and `{}` both constrain the output; send one of them",
                first.field, further.field
            );
            return Err(Error::invalid(further.field.as_str(), message));
        }
        self.constraint = Some(further);
        Ok(())
    }

    /// Sequences of each prompt.
    pub fn sequences(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    /// Fits the request into the context: a prompt must leave room for one token (or for none if none is asked
    /// for), an explicit limit must be possible, an absent one is set to what is left.
    ///
    /// # Errors
    /// `InvalidArgument` naming both numbers.
    pub fn fit(&mut self, prompt_tokens: usize, limits: Limits, names: Fit<'_>) -> Result<()> {
        let context = limits.context_length as usize;
        let least = if self.max_tokens == Some(0) { 0 } else { 1 };
        if prompt_tokens + least > context {
            return Err(Error::invalid(
                names.prompt,
                format!(
                    "`{}` has {prompt_tokens} tokens and the context length is {context}, prompt and output \
                     together; shorten it",
                    names.prompt
                ),
            ));
        }
        let pool = limits.pool_tokens as usize;
        if prompt_tokens + least > pool {
            return Err(Error::invalid(
                names.prompt,
                format!(
                    "the prompt has {prompt_tokens} tokens and the worker's KV pool holds {pool}, prompt and output \
                     together; shorten the prompt, or start the worker with a larger --max-total-tokens"
                ),
            ));
        }
        let room = context - prompt_tokens;
        match self.max_tokens {
            Some(limit) if limit as usize > room => Err(Error::invalid(
                names.limit,
                format!(
                    "`{}` is {limit} and the prompt has {prompt_tokens} tokens, together more than the context length \
                     of {context}; ask for at most {room}",
                    names.limit
                ),
            )),
            Some(_) => Ok(()),
            None => {
                let room = room as u32;
                self.max_tokens = Some(names.default.map_or(room, |default| default.min(room)));
                Ok(())
            }
        }
    }
}

/// What differs between families in [`Sampling::fit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fit<'a> {
    /// The prompt's field, as the client spells it.
    pub prompt: &'a str,
    /// The limit's field, as the client spells it.
    pub limit: &'static str,
    /// The limit if the client gives none, cut to what is left; none for all that is left.
    pub default: Option<u32>,
}

impl<'a> Fit<'a> {
    /// The same for a prompt of that name.
    pub fn of(self, prompt: &'a str) -> Self {
        Self { prompt, ..self }
    }
}

fn openai_limit(fields: &Fields<'_>) -> Result<Option<u32>> {
    let old = fields.unsigned("max_tokens", 0..=u32::MAX)?;
    let new = fields.unsigned("max_completion_tokens", 0..=u32::MAX)?;
    if let (Some(old), Some(new)) = (old, new)
        && old != new
    {
        return Err(Error::invalid(
            "max_completion_tokens",
            format!("`max_completion_tokens` is {new} and `max_tokens` is {old}; send one of them"),
        ));
    }
    Ok(new.or(old))
}

fn seed(fields: &Fields<'_>, dialect: Dialect) -> Result<Option<u64>> {
    let name = match dialect {
        Dialect::Native if fields.get("sampling_seed").is_some() => "sampling_seed",
        _ => "seed",
    };
    match fields.get(name) {
        None => Ok(None),
        Some(value) => match value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned)) {
            Some(seed) => Ok(Some(seed)),
            None => Err(wrong(&fields.path(name), "an integer of 64 bits", value)),
        },
    }
}

fn include_stop(fields: &Fields<'_>) -> Result<Option<bool>> {
    let ours = fields.bool("include_stop_str_in_output")?;
    Ok(ours.or(fields.bool("no_stop_trim")?))
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>> {
    let path = fields.path("stop");
    let items = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => return Ok(vec![stop_string(text, &path)?]),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong(&path, "a string or an array of strings", other)),
    };
    if items.len() > MAX_STOPS {
        return Err(Error::invalid(
            path.as_str(),
            format!("`{path}` has {} strings; send at most {MAX_STOPS}", items.len()),
        ));
    }
    items
        .iter()
        .enumerate()
        .map(|(position, item)| {
            let path = format!("{path}[{position}]");
            match item {
                Value::String(text) => stop_string(text, &path),
                other => Err(wrong(&path, "a string", other)),
            }
        })
        .collect()
}

fn stop_string(text: &str, path: &str) -> Result<String> {
    if text.is_empty() {
        return Err(Error::invalid(
            path,
            format!("`{path}` is an empty string, which ends nothing; leave it out"),
        ));
    }
    if text.len() > MAX_STOP_BYTES {
        return Err(Error::invalid(
            path,
            format!("`{path}` has {} bytes; send at most {MAX_STOP_BYTES}", text.len()),
        ));
    }
    Ok(text.to_owned())
}

fn logit_bias(fields: &Fields<'_>, limits: Limits) -> Result<Vec<(u32, f32)>> {
    let Some(map) = fields.map("logit_bias")? else { return Ok(Vec::new()) };
    let size = limits.vocab_size;
    let mut biases = Vec::with_capacity(map.len());
    for (key, value) in map {
        let path = format!("{}.{key}", fields.path("logit_bias"));
        // "+1" and "01" are refused too: two keys must never speak of one id.
        let canonical = |id: &u32| *id < size && id.to_string() == *key;
        let id = key.parse::<u32>().ok().filter(canonical).ok_or_else(|| {
            Error::invalid(
                path.as_str(),
                format!(
                    "`{}` has the key {key:?}; keys must be token ids from 0 to {} in plain decimal digits (the vocabulary has {size} ids)",
                    fields.path("logit_bias"),
                    size.saturating_sub(1)
                ),
            )
        })?;
        biases.push((id, as_number(value, &path, Bounds::closed(-100.0, 100.0))?));
    }
    biases.sort_unstable_by_key(|(id, _)| *id);
    Ok(biases)
}

#[cfg(test)]
mod tests {
    use super::*;
    use branchline_core::ErrorCode;
    use serde_json::json;

    const LIMITS: Limits = Limits { vocab_size: 49152, context_length: 100, pool_tokens: 100 };

    fn read(value: Value) -> Result<Sampling> {
        Sampling::read(&Fields::of(&value, "").unwrap(), Dialect::OpenAi, LIMITS)
    }

    #[test]
    fn unset_fields_stay_absent_and_zero_stays_zero() {
        assert_eq!(read(json!({})).unwrap(), Sampling::default());
        let explicit = read(json!({"temperature": 0, "top_p": 1, "top_k": -1})).unwrap();
        assert_eq!((explicit.temperature, explicit.top_p, explicit.top_k), (Some(0.0), Some(1.0), Some(-1)));
    }

    #[test]
    fn each_out_of_range_value_is_refused_with_its_name() {
        let cases = [
            json!({"temperature": -0.1}),
            json!({"temperature": "1"}),
            json!({"temperature": 101}),
            json!({"top_p": 0}),
            json!({"top_p": 1.1}),
            json!({"top_k": -2}),
            json!({"top_k": 1.5}),
            json!({"min_p": 2}),
            json!({"repetition_penalty": 0}),
            json!({"frequency_penalty": 3}),
            json!({"presence_penalty": -3}),
            json!({"n": 0}),
            json!({"n": 129}),
            json!({"seed": "x"}),
            json!({"seed": 1.5}),
            json!({"max_tokens": -1}),
            json!({"max_completion_tokens": true}),
            json!({"min_tokens": 2.5}),
            json!({"stop": 3}),
            json!({"stop": ""}),
            json!({"ignore_eos": "yes"}),
            json!({"stop_token_ids": "x"}),
            json!({"logit_bias": []}),
        ];
        for case in cases {
            let name = case.as_object().unwrap().keys().next().unwrap().clone();
            let error = read(case.clone()).expect_err(&case.to_string());
            assert_eq!(error.code, ErrorCode::InvalidArgument);
            assert_eq!(error.field.as_deref(), Some(name.as_str()), "{case}");
            assert!(error.message.contains(&format!("`{name}`")), "{}", error.message);
        }
    }

    #[test]
    fn stop_takes_a_string_or_a_bounded_list() {
        assert_eq!(read(json!({"stop": "."})).unwrap().stop, ["."]);
        assert_eq!(read(json!({"stop": [" two", " zzz"]})).unwrap().stop, [" two", " zzz"]);
        assert_eq!(read(json!({"stop": null})).unwrap().stop, Vec::<String>::new());
        assert!(read(json!({"stop": vec!["x"; 64]})).is_ok());
        assert!(read(json!({"stop": vec!["x"; 65]})).unwrap_err().message.contains("at most 64"));
        assert_eq!(read(json!({"stop": ["a", 1]})).unwrap_err().field.as_deref(), Some("stop[1]"));
        assert!(read(json!({"stop": "x".repeat(1025)})).is_err());
    }

    #[test]
    fn logit_bias_keys_are_ids_of_the_vocabulary() {
        for (bias, good) in [
            (json!({"49152": 5}), false),
            (json!({"-1": 5}), false),
            (json!({"49151": -100}), true),
            (json!({"cat": -100}), false),
            (json!({"1": 101}), false),
            (json!({"1711": 100, "01711": -100}), false),
            (json!({"+1711": 5}), false),
            (json!({"00": 5}), false),
            (json!({"+0": 5}), false),
            (json!({"1e3": 5}), false),
            (json!({" 1": 5}), false),
            (json!({"0": 5, "10": 5}), true),
            (json!({}), true),
        ] {
            assert_eq!(read(json!({"logit_bias": bias})).is_ok(), good, "{bias}");
        }
        let error = read(json!({"logit_bias": {"1711": 100, "01711": -100}})).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("logit_bias.01711"));
    }

    #[test]
    fn stop_token_ids_are_ids_of_the_vocabulary() {
        for (ids, good) in
            [(json!([49152]), false), (json!([-5]), false), (json!([49151]), true), (json!([]), true)]
        {
            assert_eq!(read(json!({"stop_token_ids": ids})).is_ok(), good, "{ids}");
        }
    }

    #[test]
    fn contradictory_limits_are_refused() {
        assert_eq!(
            read(json!({"min_tokens": 5, "max_tokens": 4})).unwrap_err().message,
            "`min_tokens` is 5, more than the limit of 4 tokens; lower it or raise the limit"
        );
        assert!(read(json!({"max_tokens": 1, "max_completion_tokens": 2})).is_err());
        assert_eq!(read(json!({"max_tokens": 2, "max_completion_tokens": 2})).unwrap().max_tokens, Some(2));
    }

    #[test]
    fn native_names_are_read_in_the_native_dialect() {
        let value =
            json!({"max_new_tokens": 3, "min_new_tokens": 1, "sampling_seed": 9, "no_stop_trim": true});
        let sampling =
            Sampling::read(&Fields::of(&value, "sampling_params").unwrap(), Dialect::Native, LIMITS).unwrap();
        assert_eq!(sampling.max_tokens, Some(3));
        assert_eq!(sampling.min_tokens, Some(1));
        assert_eq!(sampling.seed, Some(9));
        assert_eq!(sampling.include_stop, Some(true));
    }

    #[test]
    fn negative_seeds_keep_their_bits() {
        assert_eq!(read(json!({"seed": -1})).unwrap().seed, Some(u64::MAX));
        assert_eq!(read(json!({"seed": u64::MAX})).unwrap().seed, Some(u64::MAX));
    }

    #[test]
    fn a_request_is_fitted_into_the_context() {
        let names = Fit { prompt: "prompt", limit: "max_tokens", default: None };
        let mut open = Sampling::default();
        open.fit(40, LIMITS, names).unwrap();
        assert_eq!(open.max_tokens, Some(60));
        for (default, limit) in [(16, 16), (128, 60)] {
            let mut open = Sampling::default();
            open.fit(40, LIMITS, Fit { default: Some(default), ..names }).unwrap();
            assert_eq!(open.max_tokens, Some(limit));
        }
        let mut over = Sampling { max_tokens: Some(61), ..Sampling::default() };
        let error = over.fit(40, LIMITS, names).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("max_tokens"));
        assert!(
            error.message.contains("61") && error.message.contains("40") && error.message.contains("100")
        );
        let mut exact = Sampling { max_tokens: Some(60), ..Sampling::default() };
        assert!(exact.fit(40, LIMITS, names).is_ok());
        let error = Sampling::default().fit(100, LIMITS, names).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("prompt"));
        let mut plant = Sampling { max_tokens: Some(0), ..Sampling::default() };
        assert!(plant.fit(100, LIMITS, names).is_ok());
        assert!(plant.fit(101, LIMITS, names).is_err());
    }
}
