//! From body bytes to a JSON object: encoding, nesting and syntax, each with the place of the fault.
//!
//! The nesting check runs over the raw bytes first, so that no parser ever recurses on a bomb.

use branchline_core::{Error, ErrorCode, Result};
use serde_json::{Map, Value};

use crate::fields::Fields;

/// Deepest nesting of arrays and objects in a body.
pub const MAX_DEPTH: usize = 127;

/// A request body that is one JSON object.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    map: Map<String, Value>,
}

impl Document {
    /// Parses a body.
    ///
    /// # Errors
    /// `InvalidArgument` with the byte, or the line and column, for an empty body, invalid UTF-8, nesting over
    /// [`MAX_DEPTH`], invalid JSON and JSON that is no object.
    pub fn parse(body: &[u8]) -> Result<Self> {
        if body.iter().all(u8::is_ascii_whitespace) {
            return Err(refuse("the body is empty; send a JSON object"));
        }
        let text = std::str::from_utf8(body).map_err(|error| {
            refuse(format!("the body is not valid UTF-8 at byte {}; encode it as UTF-8", error.valid_up_to()))
        })?;
        check_depth(body)?;
        match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(map)) => Ok(Self { map }),
            Ok(other) => Err(refuse(format!(
                "the body is {}, not a JSON object; send {{…}}",
                crate::fields::kind(&other)
            ))),
            Err(error) => Err(syntax(text, &error)),
        }
    }

    /// The object's fields, with the empty path.
    pub fn fields(&self) -> Fields<'_> {
        Fields::new(&self.map, "")
    }
}

fn refuse(message: impl Into<String>) -> Error {
    Error::new(ErrorCode::InvalidArgument, message)
}

fn syntax(body: &str, error: &serde_json::Error) -> Error {
    let said = error.to_string();
    // serde_json ends its messages in " at line L column C"; the place is said in our own words.
    let cause = said.split(" at line ").next().unwrap_or(&said);
    let place = offset(body, error.line(), error.column());
    // A sign is read before the fault is noticed.
    let place = if body[..place].ends_with('-') { place - 1 } else { place };
    let (before, after) = body.split_at(place);
    let remedy = if body.starts_with('\u{feff}') {
        "the body begins with a byte order mark; leave that out".to_owned()
    } else if let Some(word) =
        ["NaN", "Infinity", "-Infinity"].into_iter().find(|word| after.starts_with(word))
    {
        format!("{word} is not JSON; send a finite number, or leave the field out")
    } else if cause.contains("surrogate") || cause == "unexpected end of hex escape" {
        "half of a surrogate pair (\\ud800 to \\udfff); send both halves, or the character itself as UTF-8"
            .to_owned()
    } else {
        cause.to_owned()
    };
    let error = refuse(format!("invalid JSON at line {} column {}: {remedy}", error.line(), error.column()));
    match key_before(before) {
        Some(key) => error.with_field(key),
        None => error,
    }
}

/// The byte of a line and column of serde_json's, which count from 1; on a character's edge.
fn offset(body: &str, line: usize, column: usize) -> usize {
    let start: usize = body.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    let mut place = (start + column.saturating_sub(1)).min(body.len());
    while !body.is_char_boundary(place) {
        place -= 1;
    }
    place
}

/// The key whose value would come next: `… "key":`.
fn key_before(before: &str) -> Option<&str> {
    let quoted = before.trim_end().strip_suffix(':')?.trim_end().strip_suffix('"')?;
    let key = &quoted[quoted.rfind('"')? + 1..];
    (!key.is_empty() && key.len() <= 64).then_some(key)
}

fn check_depth(body: &[u8]) -> Result<()> {
    let mut depth = 0usize;
    let mut position = 0usize;
    while let Some(&byte) = body.get(position) {
        match byte {
            b'"' => position = string_end(body, position),
            b'{' | b'[' => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return Err(refuse(format!(
                        "the body is nested deeper than {MAX_DEPTH} levels at byte {position}; flatten it"
                    )));
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        position += 1;
    }
    Ok(())
}

/// The position of the quote that closes the string opened at `start`, or the last byte.
fn string_end(body: &[u8], start: usize) -> usize {
    let mut position = start + 1;
    while let Some(offset) = body.get(position..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        position += offset;
        if body[position] == b'"' {
            return position;
        }
        position += 2;
    }
    body.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(body: &[u8]) -> String {
        Document::parse(body).expect_err("must be refused").message
    }

    #[test]
    fn a_syntax_fault_is_reported_with_its_line_and_column() {
        assert_eq!(message(b"{\n  \"a\": 1,\n  \"b\": }"), "invalid JSON at line 3 column 8: expected value");
    }

    #[test]
    fn nan_and_infinity_and_huge_exponents_are_not_json() {
        for body in ["{\"a\": NaN}", "{\"a\": Infinity}", "{\"a\": -Infinity}", "{\"a\": 1e999}"] {
            assert!(message(body.as_bytes()).starts_with("invalid JSON at line 1 column"), "{body}");
        }
        let error = Document::parse(b"{\"x\": [1],\n \"temperature\" : NaN}").unwrap_err();
        assert_eq!(error.field.as_deref(), Some("temperature"));
        assert!(error.message.contains("NaN is not JSON; send a finite number"), "{}", error.message);
        let error = Document::parse(b"{\"top_p\": -Infinity}").unwrap_err();
        assert_eq!(error.field.as_deref(), Some("top_p"));
    }

    #[test]
    fn marks_and_half_pairs_are_named_with_their_remedy() {
        assert!(message("\u{feff}{\"a\": 1}".as_bytes()).contains("byte order mark"));
        for body in
            [r#"{"a": "\ud800"}"#, r#"{"a": "\ud800x"}"#, r#"{"a": "\udc00"}"#, r#"{"a": "\ud83d\u0041"}"#]
        {
            assert!(
                message(body.as_bytes()).contains("half of a surrogate pair"),
                "{body}: {}",
                message(body.as_bytes())
            );
        }
        assert!(Document::parse(r#"{"a": "\ud83d\ude00"}"#.as_bytes()).is_ok());
    }

    #[test]
    fn invalid_utf8_is_reported_with_its_byte() {
        assert_eq!(
            message(b"{\"a\": \"\xff\"}"),
            "the body is not valid UTF-8 at byte 7; encode it as UTF-8"
        );
    }

    #[test]
    fn a_body_that_is_no_object_is_refused_by_its_kind() {
        assert_eq!(message(b"[1]"), "the body is an array, not a JSON object; send {…}");
        assert_eq!(message(b" \n"), "the body is empty; send a JSON object");
    }

    #[test]
    fn nesting_is_bounded_before_parsing_and_brackets_in_strings_do_not_count() {
        let bomb = format!("{{\"a\": {}", "[".repeat(1_000_000));
        assert!(message(bomb.as_bytes()).starts_with("the body is nested deeper than 127 levels"));
        let deepest = format!("{{\"a\": {}1{}}}", "[".repeat(MAX_DEPTH - 1), "]".repeat(MAX_DEPTH - 1));
        assert!(Document::parse(deepest.as_bytes()).is_ok());
        let text = format!("{{\"a\": \"\\\"{}\"}}", "[".repeat(1_000));
        assert!(Document::parse(text.as_bytes()).is_ok());
    }
}
