//! Prompts as text or ids, and the fields that say where and in whose cache a request runs.

use branchline_core::{Error, Result};
use serde_json::Value;

use crate::fields::{Fields, as_tokens, wrong};
use crate::{LeaseAsk, Limits, MAX_BATCH, MAX_SEQUENCES};

const MAX_ID_BYTES: usize = 128;
const MAX_KEY_BYTES: usize = 1024;
/// Scheduling classes that a request may ask for.
const PRIORITIES: std::ops::RangeInclusive<i64> = -100..=100;

/// One prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// Text, still to be tokenised.
    Text(String),
    /// Token ids, already checked against the vocabulary.
    Tokens(Vec<u32>),
}

/// A loaded adapter, as a name of the request was understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterChoice {
    /// What engines know it by.
    pub name: String,
    /// The weights that the name meant.
    pub digest: String,
}

/// Cache separation and scheduling class.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Routing {
    /// Secret of the tenant.
    pub cache_salt: Option<String>,
    /// Free key of the caller.
    pub extra_key: Option<String>,
    /// Higher first; within [`PRIORITIES`].
    pub priority: Option<i32>,
    /// A prefix to hold or to hit.
    pub lease: Option<LeaseAsk>,
    /// The adapter, which whoever knows what is loaded fills in.
    pub adapter: Option<AdapterChoice>,
}

impl Routing {
    /// Reads the fields, which all families share.
    ///
    /// # Errors
    /// `InvalidArgument` for wrong types, over-long keys and a priority outside [`PRIORITIES`].
    pub fn read(fields: &Fields<'_>) -> Result<Self> {
        let priority = fields.integer("priority", PRIORITIES)?;
        Ok(Self {
            cache_salt: key(fields, "cache_salt")?,
            extra_key: key(fields, "extra_key")?,
            priority: priority.map(|priority| priority as i32),
            lease: LeaseAsk::read(fields)?,
            adapter: None,
        })
    }
}

fn key(fields: &Fields<'_>, name: &str) -> Result<Option<String>> {
    let Some(text) = fields.string(name)? else { return Ok(None) };
    if text.len() > MAX_KEY_BYTES {
        let path = fields.path(name);
        return Err(Error::invalid(
            path.as_str(),
            format!("`{path}` has {} bytes; send at most {MAX_KEY_BYTES}", text.len()),
        ));
    }
    Ok(Some(text.to_owned()))
}

/// A request id given by the client: 1 to 128 printable bytes.
pub(crate) fn request_id(value: &Value, path: &str) -> Result<String> {
    match value {
        Value::String(text)
            if !text.is_empty() && text.len() <= MAX_ID_BYTES && !text.chars().any(char::is_control) =>
        {
            Ok(text.clone())
        }
        other => Err(wrong(
            path,
            &format!("a string of 1 to {MAX_ID_BYTES} bytes without control characters"),
            other,
        )),
    }
}

/// A prompt of `/v1/completions`: a string, strings, ids, or lists of ids. The flag says whether it was a list
/// of prompts.
pub(crate) fn prompts(value: &Value, path: &str, limits: Limits) -> Result<Vec<Prompt>> {
    prompts_up_to(MAX_BATCH, value, path, limits)
}

/// As [`prompts`], with another bound of their number.
pub(crate) fn prompts_up_to(most: usize, value: &Value, path: &str, limits: Limits) -> Result<Vec<Prompt>> {
    match value {
        Value::String(text) => Ok(vec![text_prompt(text, path)?]),
        Value::Array(items) => match items.first() {
            Some(Value::String(_)) => many_up_to(most, items, path, |item, path| match item {
                Value::String(text) => text_prompt(text, path),
                other => Err(wrong(path, "a string, like the first prompt", other)),
            }),
            Some(Value::Array(_)) => many_up_to(most, items, path, |item, path| match item {
                Value::Array(ids) => token_prompt(ids, path, limits),
                other => Err(wrong(path, "an array of token ids, like the first prompt", other)),
            }),
            _ => Ok(vec![token_prompt(items, path, limits)?]),
        },
        other => Err(wrong(path, "a string, an array of strings, token ids or an array of them", other)),
    }
}

/// Refuses more sequences than one request may have; `path` is the field that multiplies the prompts.
pub(crate) fn check_sequences(path: &str, sequences: impl Iterator<Item = u32>) -> Result<()> {
    let (prompts, all) = sequences.fold((0, 0), |(prompts, all), n| (prompts + 1, all + n as usize));
    if all <= MAX_SEQUENCES {
        return Ok(());
    }
    let message = format!(
        "`{path}` makes {all} sequences of {prompts} prompts; send at most {MAX_SEQUENCES} in one request"
    );
    Err(Error::invalid(path, message))
}

pub(crate) fn many<T>(
    items: &[Value],
    path: &str,
    read: impl Fn(&Value, &str) -> Result<T>,
) -> Result<Vec<T>> {
    many_up_to(MAX_BATCH, items, path, read)
}

fn many_up_to<T>(
    most: usize,
    items: &[Value],
    path: &str,
    read: impl Fn(&Value, &str) -> Result<T>,
) -> Result<Vec<T>> {
    if items.len() > most {
        return Err(Error::invalid(
            path,
            format!("`{path}` has {} prompts; send at most {most} at once", items.len()),
        ));
    }
    items.iter().enumerate().map(|(position, item)| read(item, &format!("{path}[{position}]"))).collect()
}

pub(crate) fn text_prompt(text: &str, path: &str) -> Result<Prompt> {
    if text.is_empty() { Err(empty(path)) } else { Ok(Prompt::Text(text.to_owned())) }
}

pub(crate) fn token_prompt(items: &[Value], path: &str, limits: Limits) -> Result<Prompt> {
    if items.is_empty() {
        return Err(empty(path));
    }
    Ok(Prompt::Tokens(as_tokens(items, path, limits.vocab_size)?))
}

fn empty(path: &str) -> Error {
    Error::invalid(path, format!("`{path}` is empty; send at least one token"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const LIMITS: Limits = Limits { vocab_size: 100, context_length: 10, pool_tokens: 10 };

    #[test]
    fn all_four_forms_of_a_prompt_are_read() {
        let read = |value: Value| prompts(&value, "prompt", LIMITS).unwrap();
        assert_eq!(read(json!("a")), [Prompt::Text("a".into())]);
        assert_eq!(read(json!(["a", "b"])), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
        assert_eq!(read(json!([1, 2])), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(read(json!([[1], [2]])), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2])]);
    }

    #[test]
    fn bad_prompts_are_refused_with_their_place() {
        for (value, field) in [
            (json!(""), "prompt"),
            (json!([]), "prompt"),
            (json!([[]]), "prompt[0]"),
            (json!([""]), "prompt[0]"),
            (json!(["a", 1]), "prompt[1]"),
            (json!([[1], "a"]), "prompt[1]"),
            (json!([[-1]]), "prompt[0][0]"),
            (json!([1, 100]), "prompt[1]"),
            (json!(7), "prompt"),
            (json!({"a": 1}), "prompt"),
            (json!(vec!["x"; 1025]), "prompt"),
        ] {
            let error = prompts(&value, "prompt", LIMITS).expect_err(&value.to_string());
            assert_eq!(error.field.as_deref(), Some(field), "{value}");
        }
    }

    #[test]
    fn priorities_are_small_integers() {
        let read = |value: Value| Routing::read(&Fields::of(&value, "").unwrap());
        for given in [0, 1, -100, 100] {
            assert_eq!(read(json!({"priority": given})).unwrap().priority, Some(given));
        }
        assert_eq!(read(json!({})).unwrap().priority, None);
        for wrong in [json!(101), json!(-101), json!(1.5), json!("1"), json!(true)] {
            assert_eq!(
                read(json!({"priority": wrong})).unwrap_err().field.as_deref(),
                Some("priority"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn absent_and_empty_keys_differ() {
        let read = |value: Value| Routing::read(&Fields::of(&value, "").unwrap()).unwrap();
        assert_eq!(read(json!({})).cache_salt, None);
        assert_eq!(read(json!({"cache_salt": ""})).cache_salt.as_deref(), Some(""));
    }

    #[test]
    fn request_ids_are_short_and_printable() {
        assert_eq!(request_id(&json!("job-1"), "rid").unwrap(), "job-1");
        for bad in [json!(""), json!("a\nb"), json!("x".repeat(129)), json!(1)] {
            assert!(request_id(&bad, "rid").is_err(), "{bad}");
        }
    }
}
