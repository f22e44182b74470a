//! The types an option can have, and how text becomes each of them.
//!
//! Flags, environment, file and Python arguments all arrive here as text, so one value means the same
//! whatever its source. Refusals say what would be accepted.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use branchline_telemetry::LogLevel;

/// What the value of an option looks like; drives flags, the reference page and the Python stub.
#[derive(Debug, Clone, Copy)]
pub enum Shape {
    /// One text.
    Text,
    /// One whole number.
    Number,
    /// Like `250ms`, `30s`, `5m`, `1h`, or seconds as a number.
    Duration,
    /// Like `64MiB`, or bytes as a number.
    Size,
    /// `true` or `false`; a flag without a value is `true`.
    Switch,
    /// One of a closed list.
    Choice(fn() -> &'static [&'static str]),
    /// One or more texts.
    List,
}

impl Shape {
    /// A word for the reference page.
    pub fn word(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Number => "number",
            Self::Duration => "duration",
            Self::Size => "size",
            Self::Switch => "switch",
            Self::Choice(_) => "choice",
            Self::List => "list",
        }
    }
}

/// A type that an option can have.
pub trait Value: Sized {
    /// Its shape.
    const SHAPE: Shape;

    /// Reads it from the texts of one source.
    ///
    /// # Errors
    /// A sentence that names the text and says what would be accepted.
    fn parse(texts: &[String]) -> Result<Self, String>;
}

fn single(texts: &[String]) -> Result<&str, String> {
    match texts {
        [text] => Ok(text.trim()),
        _ => Err(format!("takes one value, got {}; give one", texts.len())),
    }
}

impl Value for String {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        match single(texts)? {
            "" => Err("is empty; give a value or leave the option out".to_owned()),
            text => Ok(text.to_owned()),
        }
    }
}

impl Value for PathBuf {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        String::parse(texts).map(Self::from)
    }
}

impl Value for u16 {
    const SHAPE: Shape = Shape::Number;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let text = single(texts)?;
        text.parse()
            .map_err(|_| format!("'{text}' is not a port; give a number from 0 to 65535 (0: any free port)"))
    }
}

impl Value for usize {
    const SHAPE: Shape = Shape::Number;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let text = single(texts)?;
        text.parse().map_err(|_| format!("'{text}' is not a whole number from 0; give one like 4"))
    }
}

impl Value for bool {
    const SHAPE: Shape = Shape::Switch;

    fn parse(texts: &[String]) -> Result<Self, String> {
        match single(texts)?.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(true),
            "false" | "0" | "no" | "off" => Ok(false),
            text => Err(format!("'{text}' is neither true nor false; give one of the two")),
        }
    }
}

impl Value for Duration {
    const SHAPE: Shape = Shape::Duration;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let text = single(texts)?;
        let refuse = || format!("'{text}' is not a duration; give one like 250ms, 30s, 5m or 1h");
        let (number, unit) = split_unit(text);
        let scale = match unit {
            "ms" => 0.001,
            "" | "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3600.0,
            _ => return Err(refuse()),
        };
        let seconds: f64 = number.parse().map_err(|_| refuse())?;
        // A year bounds every timer far from overflow.
        match seconds * scale {
            value if (0.0..=31_536_000.0).contains(&value) => Ok(Self::from_secs_f64(value)),
            _ => Err(format!("'{text}' is out of range; give at most 8760h")),
        }
    }
}

/// Names with commas between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names(pub Vec<String>);

impl Value for Names {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let text = String::parse(texts)?;
        Ok(Self(text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()))
    }
}

/// A share, from 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Fraction(pub f64);

impl Value for Fraction {
    const SHAPE: Shape = Shape::Number;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let text = single(texts)?;
        match text.parse() {
            Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self(share)),
            _ => Err(format!("'{text}' is not a share; give a number from 0 to 1")),
        }
    }
}

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub usize);

impl Value for Size {
    const SHAPE: Shape = Shape::Size;

    fn parse(texts: &[String]) -> Result<Self, String> {
        let text = single(texts)?;
        let refuse = || format!("'{text}' is not a size; give one like 512KiB, 64MiB or 1GiB");
        let (number, unit) = split_unit(text);
        let scale: usize = match unit {
            "" | "B" => 1,
            "KiB" | "K" => 1 << 10,
            "MiB" | "M" => 1 << 20,
            "GiB" | "G" => 1 << 30,
            _ => return Err(refuse()),
        };
        let count: usize = number.parse().map_err(|_| refuse())?;
        count.checked_mul(scale).map(Self).ok_or_else(refuse)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (scale, unit) in [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
            if self.0 >= scale && self.0.is_multiple_of(scale) {
                return write!(f, "{}{unit}", self.0 / scale);
            }
        }
        write!(f, "{}B", self.0)
    }
}

fn split_unit(text: &str) -> (&str, &str) {
    let cut = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..cut], text[cut..].trim())
}

/// A text that no log and no page shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself, for hashing or for a header.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

impl Value for Secret {
    const SHAPE: Shape = Shape::Text;

    fn parse(texts: &[String]) -> Result<Self, String> {
        // The refusal must not repeat the text.
        let text = String::parse(texts)?;
        match text.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(text)),
            false => Err("holds a blank or a character outside ASCII; a header can't carry it".to_owned()),
        }
    }
}

impl<T: Value> Value for Option<T> {
    const SHAPE: Shape = T::SHAPE;

    fn parse(texts: &[String]) -> Result<Self, String> {
        match texts {
            [] => Ok(None),
            [text] if text.trim() == "off" => Ok(None),
            _ => T::parse(texts).map(Some),
        }
    }
}

impl<T: Value> Value for Vec<T> {
    const SHAPE: Shape = Shape::List;

    fn parse(texts: &[String]) -> Result<Self, String> {
        texts.iter().map(|text| T::parse(std::slice::from_ref(text))).collect()
    }
}

impl Value for LogLevel {
    const SHAPE: Shape = Shape::Choice(|| &LogLevel::NAMES);

    fn parse(texts: &[String]) -> Result<Self, String> {
        let text = single(texts)?;
        LogLevel::parse(text).ok_or_else(|| not_listed(text, &LogLevel::NAMES))
    }
}

/// The refusal of a name outside a closed list, with the nearest one where there is one.
pub(crate) fn not_listed(text: &str, names: &[&str]) -> String {
    let hint = nearest(text, names.iter().copied())
        .map(|name| format!("did you mean '{name}'? "))
        .unwrap_or_default();
    format!("'{text}' is not one of the choices; {hint}give one of {}", names.join(", "))
}

/// The known name nearest to `text` by edit distance, if it is near at all.
pub(crate) fn nearest<'a>(text: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, name) =
        names.map(|name| (edit_distance(text, name), name)).min_by_key(|(distance, _)| *distance)?;
    (distance <= 1 + text.len() / 3).then_some(name)
}

fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, from) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(row[j + 1] + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse<T: Value>(text: &str) -> Result<T, String> {
        T::parse(&[text.to_owned()])
    }

    #[test]
    fn durations_take_units_and_plain_seconds() {
        for (text, millis) in
            [("250ms", 250), ("30", 30_000), ("1.5s", 1500), ("5m", 300_000), ("1h", 3_600_000)]
        {
            assert_eq!(parse::<Duration>(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "-1s", "soon", "1d", "1e99", "99999h", "nan"] {
            assert!(parse::<Duration>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_size_survives_its_own_spelling() {
        proptest!(|(bytes in 0usize..usize::MAX / 2)| {
            prop_assert_eq!(parse::<Size>(&Size(bytes).to_string()), Ok(Size(bytes)));
        });
        assert!(parse::<Size>("99999999999GiB").is_err());
        assert!(parse::<Size>("64MB").is_err());
    }

    #[test]
    fn off_switches_an_optional_value_off() {
        assert_eq!(parse::<Option<Duration>>("off"), Ok(None));
        assert_eq!(parse::<Option<u16>>("80"), Ok(Some(80)));
    }

    #[test]
    fn a_share_lies_between_none_and_all() {
        assert_eq!(
            (parse("0"), parse("1"), parse("0.25")),
            (Ok(Fraction(0.0)), Ok(Fraction(1.0)), Ok(Fraction(0.25)))
        );
        for text in ["", "-0.1", "1.1", "nan", "half"] {
            assert!(parse::<Fraction>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_secret_is_never_shown() {
        let secret: Secret = parse("hunter2").expect("plain text");
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        let refusal = parse::<Secret>("hunter 2").expect_err("a blank");
        assert!(!refusal.contains("hunter"));
    }

    #[test]
    fn a_near_miss_gets_its_name_and_a_far_one_none() {
        assert_eq!(nearest("worker-url", ["worker-urls", "port"].into_iter()), Some("worker-urls"));
        assert_eq!(nearest("zzzzzz", ["worker-urls", "port"].into_iter()), None);
        assert!(parse::<LogLevel>("inof").expect_err("no level").contains("did you mean 'info'"));
    }
}
