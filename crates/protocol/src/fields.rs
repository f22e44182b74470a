//! Typed reads from a JSON object. Absent and `null` are the same; every refusal names path, value and remedy.

use std::ops::RangeInclusive;

use branchline_core::{Error, Result};
use serde_json::{Map, Value};

/// The fields of one object and the path that leads to it.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    /// Wraps an object found at `path`; the root's path is empty.
    pub fn new(map: &'a Map<String, Value>, path: impl Into<String>) -> Self {
        Self { map, path: path.into() }
    }

    /// Wraps the value at `path`, which must be an object.
    ///
    /// # Errors
    /// `InvalidArgument` naming the path if it is something else.
    pub fn of(value: &'a Value, path: impl Into<String>) -> Result<Self> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self::new(map, path)),
            other => Err(wrong(&path, "an object", other)),
        }
    }

    /// The full path of a field.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The value, unless absent or null.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// All names present, null ones included.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    /// A boolean.
    ///
    /// # Errors
    /// `InvalidArgument` if it is something else.
    pub fn bool(&self, name: &str) -> Result<Option<bool>> {
        self.get(name).map(|value| as_bool(value, &self.path(name))).transpose()
    }

    /// A string.
    ///
    /// # Errors
    /// `InvalidArgument` if it is something else.
    pub fn string(&self, name: &str) -> Result<Option<&'a str>> {
        self.get(name).map(|value| as_string(value, &self.path(name))).transpose()
    }

    /// A string that must be there.
    ///
    /// # Errors
    /// `InvalidArgument` if it is absent or something else.
    pub fn required(&self, name: &str) -> Result<&'a str> {
        self.string(name)?.ok_or_else(|| {
            let path = self.path(name);
            Error::invalid(path.as_str(), format!("`{path}` is missing; send a string"))
        })
    }

    /// An integer within `range`.
    ///
    /// # Errors
    /// `InvalidArgument` if it is no integer (2.5 and 2.0 are none) or out of range.
    pub fn integer(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>> {
        self.get(name).map(|value| as_integer(value, &self.path(name), range)).transpose()
    }

    /// An integer that fits 32 bits without sign.
    ///
    /// # Errors
    /// `InvalidArgument` as for [`Fields::integer`].
    pub fn unsigned(&self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>> {
        let range = i64::from(*range.start())..=i64::from(*range.end());
        // The range fits u32 by its type, so the conversion loses nothing.
        Ok(self.integer(name, range)?.map(|value| value as u32))
    }

    /// A number within the closed range `low..=high`; `low` itself is refused if `open`.
    ///
    /// # Errors
    /// `InvalidArgument` if it is no number or out of range.
    pub fn number(&self, name: &str, bounds: Bounds) -> Result<Option<f32>> {
        self.get(name).map(|value| as_number(value, &self.path(name), bounds)).transpose()
    }

    /// An object.
    ///
    /// # Errors
    /// `InvalidArgument` if it is something else.
    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        self.get(name).map(|value| Fields::of(value, self.path(name))).transpose()
    }

    /// The raw object map of a field.
    ///
    /// # Errors
    /// `InvalidArgument` if it is something else.
    pub fn map(&self, name: &str) -> Result<Option<&'a Map<String, Value>>> {
        Ok(self.object(name)?.map(|fields| fields.map))
    }

    /// An array.
    ///
    /// # Errors
    /// `InvalidArgument` if it is something else.
    pub fn array(&self, name: &str) -> Result<Option<&'a [Value]>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&self.path(name), "an array", other)),
        }
    }
}

/// A range of numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Least value.
    pub low: f64,
    /// Greatest value.
    pub high: f64,
    /// Whether `low` itself is refused.
    pub open: bool,
}

impl Bounds {
    /// Both ends allowed.
    pub const fn closed(low: f64, high: f64) -> Self {
        Self { low, high, open: false }
    }

    /// The low end is refused.
    pub const fn above(low: f64, high: f64) -> Self {
        Self { low, high, open: true }
    }

    fn words(&self) -> String {
        if self.open {
            format!("a number above {} and at most {}", self.low, self.high)
        } else {
            format!("a number from {} to {}", self.low, self.high)
        }
    }
}

/// What a value is, with its article.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A refusal of a value of the wrong kind.
pub(crate) fn wrong(path: &str, expected: &str, value: &Value) -> Error {
    Error::invalid(path, format!("`{path}` must be {expected}, not {}", show(value)))
}

/// The value itself if short, else what it is, how long, and how it begins.
pub(crate) fn show(value: &Value) -> String {
    const SHOWN: usize = 40;
    match value {
        Value::String(text) if text.chars().nth(SHOWN).is_some() => {
            let start: String = text.chars().take(SHOWN).collect();
            format!("a string of {} characters that begins with {start:?}", text.chars().count())
        }
        Value::Array(items) if items.len() > SHOWN => format!("an array of {} items", items.len()),
        Value::Object(map) if map.len() > SHOWN => format!("an object of {} fields", map.len()),
        other => {
            let text = other.to_string();
            if text.chars().nth(SHOWN).is_some() && other.is_array() | other.is_object() {
                kind(other).to_owned()
            } else {
                text
            }
        }
    }
}

pub(crate) fn as_bool(value: &Value, path: &str) -> Result<bool> {
    value.as_bool().ok_or_else(|| wrong(path, "true or false", value))
}

pub(crate) fn as_string<'a>(value: &'a Value, path: &str) -> Result<&'a str> {
    value.as_str().ok_or_else(|| wrong(path, "a string", value))
}

pub(crate) fn as_integer(value: &Value, path: &str, range: RangeInclusive<i64>) -> Result<i64> {
    match value.as_i64() {
        Some(integer) if range.contains(&integer) => Ok(integer),
        _ => Err(wrong(path, &format!("an integer from {} to {}", range.start(), range.end()), value)),
    }
}

pub(crate) fn as_number(value: &Value, path: &str, bounds: Bounds) -> Result<f32> {
    match value.as_f64() {
        Some(number)
            if number <= bounds.high && (number > bounds.low || (!bounds.open && number >= bounds.low))
            // A number that no longer is inside once rounded to 32 bits is refused as the client wrote it.
            && (!bounds.open || f64::from(number as f32) > bounds.low) =>
        {
            Ok(number as f32)
        }
        _ => Err(wrong(path, &bounds.words(), value)),
    }
}

/// A token id of a vocabulary of `size`.
pub(crate) fn as_token(value: &Value, path: &str, size: u32) -> Result<u32> {
    match value.as_u64() {
        Some(id) if id < u64::from(size) => Ok(id as u32),
        _ => Err(wrong(
            path,
            &format!("a token id from 0 to {} (the vocabulary has {size} ids)", size.saturating_sub(1)),
            value,
        )),
    }
}

/// A list of token ids of a vocabulary of `size`.
pub(crate) fn as_tokens(items: &[Value], path: &str, size: u32) -> Result<Vec<u32>> {
    let mut tokens = Vec::with_capacity(items.len());
    for (position, item) in items.iter().enumerate() {
        match item.as_u64() {
            Some(id) if id < u64::from(size) => tokens.push(id as u32),
            // The slow way only for the message, so that good prompts format no path.
            _ => {
                return Err(as_token(item, &format!("{path}[{position}]"), size)
                    .err()
                    .unwrap_or_else(|| wrong(path, "token ids", item)));
            }
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refusal<T: std::fmt::Debug>(result: Result<T>) -> (String, String) {
        let error = result.expect_err("must be refused");
        (error.field.unwrap_or_default(), error.message)
    }

    #[test]
    fn absent_and_null_are_the_same() {
        let value = json!({"a": null});
        let fields = Fields::of(&value, "").unwrap();
        assert_eq!(fields.bool("a").unwrap(), None);
        assert_eq!(fields.bool("b").unwrap(), None);
    }

    #[test]
    fn a_refusal_names_the_path_the_range_and_the_value() {
        let value = json!({"n": 2.5, "t": "hot", "deep": {"p": 0}});
        let fields = Fields::of(&value, "").unwrap();
        assert_eq!(
            refusal(fields.unsigned("n", 1..=128)),
            ("n".into(), "`n` must be an integer from 1 to 128, not 2.5".into())
        );
        assert_eq!(
            refusal(fields.number("t", Bounds::closed(0.0, 100.0))),
            ("t".into(), "`t` must be a number from 0 to 100, not \"hot\"".into())
        );
        let deep = fields.object("deep").unwrap().unwrap();
        assert_eq!(
            refusal(deep.number("p", Bounds::above(0.0, 1.0))),
            ("deep.p".into(), "`deep.p` must be a number above 0 and at most 1, not 0".into())
        );
    }

    #[test]
    fn long_values_are_named_by_their_kind() {
        let value = json!({"s": vec!["x"; 100]});
        let fields = Fields::of(&value, "").unwrap();
        assert_eq!(refusal(fields.string("s")).1, "`s` must be a string, not an array of 100 items");
        let value = json!({"n": "x".repeat(500_000), "few": ["y".repeat(60)]});
        let fields = Fields::of(&value, "").unwrap();
        let message = refusal(fields.bool("n")).1;
        let start = "x".repeat(40);
        assert_eq!(
            message,
            format!(
                "`n` must be true or false, not a string of 500000 characters that begins with \"{start}\""
            )
        );
        assert_eq!(refusal(fields.bool("few")).1, "`few` must be true or false, not an array");
    }

    #[test]
    fn a_number_that_rounds_out_of_its_range_is_refused_as_it_was_written() {
        let value = json!({"top_p": 1e-300, "small": 1e-30});
        let fields = Fields::of(&value, "").unwrap();
        assert_eq!(
            refusal(fields.number("top_p", Bounds::above(0.0, 1.0))),
            ("top_p".into(), "`top_p` must be a number above 0 and at most 1, not 1e-300".into())
        );
        assert_eq!(fields.number("small", Bounds::above(0.0, 1.0)).unwrap(), Some(1e-30));
    }

    #[test]
    fn token_ids_are_checked_at_both_ends_and_by_type() {
        assert_eq!(as_tokens(&[json!(0), json!(49151)], "ids", 49152).unwrap(), [0, 49151]);
        for bad in [json!(-1), json!(49152), json!(200_000), json!(2.5), json!("1"), json!(true)] {
            let (path, message) = refusal(as_tokens(&[json!(1), bad], "ids", 49152));
            assert_eq!(path, "ids[1]");
            assert!(message.contains("the vocabulary has 49152 ids"), "{message}");
        }
    }
}
