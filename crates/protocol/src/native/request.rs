//! A request of `/generate`, spread into one item a prompt.

use std::collections::HashSet;

use branchline_core::{Error, Result};
use serde_json::{Map, Value};

use crate::fields::{Fields, as_bool, as_integer, as_tokens, wrong};
use crate::logprobs::{LogprobRequest, MAX_TOP};
use crate::prompt::{Prompt, Routing, check_sequences, many, request_id, text_prompt, token_prompt};
use crate::{Constraint, Dialect, Fit, Limits, Sampling, Terms, refused};

/// One prompt of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateItem {
    /// Text or ids.
    pub prompt: Prompt,
    /// How to sample.
    pub sampling: Sampling,
    /// Which logprobs to return; none for none.
    pub logprobs: Option<LogprobRequest>,
    /// The client's own id.
    pub rid: Option<String>,
    /// Name of a loaded adapter; none for that of the request's model, if it names one.
    pub lora: Option<String>,
}

/// A validated request.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// At least one.
    pub items: Vec<GenerateItem>,
    /// Whether the client sent a list, and gets one.
    pub batch: bool,
    /// As events with cumulative text.
    pub stream: bool,
    /// Fill in the third element of each logprob triple.
    pub text_in_logprobs: bool,
    /// Where to run.
    pub routing: Routing,
}

impl GenerateRequest {
    /// How a prompt is fitted into the context: 128 tokens unless the client says otherwise.
    pub const FIT: Fit<'static> =
        Fit { prompt: "input_ids", limit: "sampling_params.max_new_tokens", default: Some(128) };

    /// Reads and checks a request.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unimplemented`, naming the field; also for lists whose length is not the batch's.
    pub fn read(fields: &Fields<'_>, limits: Limits) -> Result<Self> {
        refused::check_but(fields, &["lora_path"])?;
        let (prompts, batch) = prompts(fields, limits)?;
        let count = prompts.len();
        let mut sampling = sampling(fields, count, batch, limits)?;
        let constraint = Constraint::read(fields)?;
        sampling.iter_mut().try_for_each(|one| one.constrain(constraint.clone()))?;
        let terms = Terms::read(fields)?;
        if terms != Terms::default() {
            sampling.iter_mut().for_each(|one| one.terms = terms.clone());
        }
        check_sequences("sampling_params.n", sampling.iter().map(Sampling::sequences))?;
        let logprobs = logprobs(fields, count, batch, limits)?;
        let rids = rids(fields, count, batch)?;
        let loras =
            spread(fields, "lora_path", count, batch, None, |value, path| lora(value, path).map(Some))?;
        let items = prompts
            .into_iter()
            .zip(sampling)
            .zip(logprobs)
            .zip(rids)
            .zip(loras)
            .map(|((((prompt, sampling), logprobs), rid), lora)| GenerateItem {
                prompt,
                sampling,
                logprobs,
                rid,
                lora,
            })
            .collect();
        Ok(Self {
            items,
            batch,
            stream: fields.bool("stream")?.unwrap_or(false),
            text_in_logprobs: fields.bool("return_text_in_logprobs")?.unwrap_or(false),
            routing: Routing::read(fields)?,
        })
    }
}

fn prompts(fields: &Fields<'_>, limits: Limits) -> Result<(Vec<Prompt>, bool)> {
    match (fields.get("text"), fields.get("input_ids")) {
        (Some(_), Some(_)) => {
            Err(Error::invalid("text", "`text` and `input_ids` are both given; send one of them"))
        }
        (None, None) => Err(Error::invalid("text", "`text` is missing; send it or `input_ids`")),
        (Some(Value::String(text)), None) => Ok((vec![text_prompt(text, "text")?], false)),
        (Some(Value::Array(items)), None) => {
            not_empty(items, "text")?;
            let prompts = many(items, "text", |item, path| match item {
                Value::String(text) => text_prompt(text, path),
                other => Err(wrong(path, "a string", other)),
            })?;
            Ok((prompts, true))
        }
        (Some(other), None) => Err(wrong("text", "a string or an array of strings", other)),
        (None, Some(Value::Array(items))) if matches!(items.first(), Some(Value::Array(_))) => {
            let prompts = many(items, "input_ids", |item, path| match item {
                Value::Array(ids) => token_prompt(ids, path, limits),
                other => Err(wrong(path, "an array of token ids", other)),
            })?;
            Ok((prompts, true))
        }
        (None, Some(Value::Array(items))) => Ok((vec![token_prompt(items, "input_ids", limits)?], false)),
        (None, Some(other)) => Err(wrong("input_ids", "an array of token ids or an array of them", other)),
    }
}

/// The name of a loaded adapter: a path would be read by whoever asks.
fn lora(value: &Value, path: &str) -> Result<String> {
    match value {
        Value::String(name) if !name.is_empty() => Ok(name.clone()),
        Value::String(_) => {
            Err(Error::invalid(path, format!("`{path}` is empty; send an adapter's name, or leave it out")))
        }
        other => Err(wrong(path, "the name of a loaded adapter", other)),
    }
}

fn not_empty(items: &[Value], path: &str) -> Result<()> {
    if items.is_empty() {
        return Err(Error::invalid(path, format!("`{path}` is empty; send at least one prompt")));
    }
    Ok(())
}

/// Spreads a value over the batch: a list in a batch gives each prompt its own, anything else goes to all.
fn spread<T: Clone>(
    fields: &Fields<'_>,
    name: &str,
    count: usize,
    batch: bool,
    absent: T,
    read: impl Fn(&Value, &str) -> Result<T>,
) -> Result<Vec<T>> {
    let path = fields.path(name);
    match fields.get(name) {
        None => Ok(vec![absent; count]),
        Some(Value::Array(items)) if batch => {
            if items.len() != count {
                return Err(Error::invalid(
                    path.as_str(),
                    format!(
                        "`{path}` has {} {} for {count} {}; send one for each",
                        items.len(),
                        if items.len() == 1 { "entry" } else { "entries" },
                        if count == 1 { "prompt" } else { "prompts" },
                    ),
                ));
            }
            let entry = |(position, item): (usize, &Value)| match item {
                Value::Null => Ok(absent.clone()),
                item => read(item, &format!("{path}[{position}]")),
            };
            items.iter().enumerate().map(entry).collect()
        }
        Some(value) => Ok(vec![read(value, &path)?; count]),
    }
}

fn sampling(fields: &Fields<'_>, count: usize, batch: bool, limits: Limits) -> Result<Vec<Sampling>> {
    let none = Map::new();
    let absent = Sampling::read(&Fields::new(&none, "sampling_params"), Dialect::Native, limits)?;
    spread(fields, "sampling_params", count, batch, absent, |value, path| {
        Sampling::read(&Fields::of(value, path)?, Dialect::Native, limits)
    })
}

fn logprobs(
    fields: &Fields<'_>,
    count: usize,
    batch: bool,
    limits: Limits,
) -> Result<Vec<Option<LogprobRequest>>> {
    let wanted = spread(fields, "return_logprob", count, batch, false, as_bool)?;
    let starts = spread(fields, "logprob_start_len", count, batch, -1, |value, path| {
        as_integer(value, path, -1..=i64::from(u32::MAX))
    })?;
    let tops = spread(fields, "top_logprobs_num", count, batch, 0, |value, path| {
        as_integer(value, path, 0..=i64::from(MAX_TOP))
    })?;
    let ids = chosen(fields, count, batch, limits)?;
    (0..count)
        .map(|item| {
            let ids = &ids[item];
            if !wanted[item] {
                for (asked, name) in
                    [(tops[item] > 0, "top_logprobs_num"), (!ids.is_empty(), "token_ids_logprob")]
                {
                    if asked {
                        return Err(Error::invalid(
                            name,
                            format!(
                                "`{name}` is given without `return_logprob`; set that to true or leave it out"
                            ),
                        ));
                    }
                }
                return Ok(None);
            }
            Ok(Some(LogprobRequest {
                output: true,
                top: tops[item] as u32,
                input_start: u32::try_from(starts[item]).ok(),
                token_ids: ids.clone(),
            }))
        })
        .collect()
}

/// `token_ids_logprob` is itself a list, so that a batch's lists are told apart by their first element.
fn chosen(fields: &Fields<'_>, count: usize, batch: bool, limits: Limits) -> Result<Vec<Vec<u32>>> {
    let read = |value: &Value, path: &str| match value {
        Value::Array(ids) => as_tokens(ids, path, limits.vocab_size),
        other => Err(wrong(path, "an array of token ids", other)),
    };
    let nested = fields
        .array("token_ids_logprob")?
        .is_some_and(|items| matches!(items.first(), Some(Value::Array(_) | Value::Null)));
    spread(fields, "token_ids_logprob", count, batch && nested, Vec::new(), read)
}

/// One string for a batch gives `rid_0`, `rid_1`, …; aborts match those exactly.
fn rids(fields: &Fields<'_>, count: usize, batch: bool) -> Result<Vec<Option<String>>> {
    match fields.get("rid") {
        Some(value @ Value::String(_)) if batch => {
            let rid = request_id(value, "rid")?;
            (0..count).map(|item| request_id(&format!("{rid}_{item}").into(), "rid").map(Some)).collect()
        }
        _ => {
            let rids =
                spread(fields, "rid", count, batch, None, |value, path| request_id(value, path).map(Some))?;
            let mut seen = HashSet::new();
            match rids.iter().flatten().find(|rid| !seen.insert(rid.as_str())) {
                Some(twice) => {
                    let text = format!("`rid` has {twice:?} more than once; send another id for each prompt");
                    Err(Error::invalid("rid", text))
                }
                None => Ok(rids),
            }
        }
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
