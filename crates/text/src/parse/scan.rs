//! One JSON value, a character at a time: where it ends, and where it stops being JSON.
//!
//! All that has been taken is always the beginning of some JSON value, so that it may be told of at once. Raw control
//! characters in strings, which models write, are taken.

/// What a character is to the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// Inside.
    Inside,
    /// The value's last character.
    Last,
    /// The first character after the value, which is not part of it.
    Past,
    /// No JSON.
    Broken,
}

/// Deepest nesting of a call's arguments.
const MAX_DEPTH: usize = 127;

/// What may come next.
#[derive(Debug, Clone, Copy)]
enum Want {
    Value,
    /// A value, or the end of an array that is empty so far.
    First,
    Key,
    /// A key, or the end of an object that is empty so far.
    FirstKey,
    Colon,
    /// A comma or the end.
    Next,
    Text {
        key: bool,
    },
    Escape {
        key: bool,
    },
    Hex {
        key: bool,
        left: u8,
    },
    /// The rest of `null`, `true` or `false`.
    Word(&'static str),
    Number(Number),
}

/// What of a number was last.
#[derive(Debug, Clone, Copy)]
enum Number {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    Sign,
    Power,
}

impl Number {
    fn step(self, character: char) -> Option<Self> {
        Some(match (self, character) {
            (Self::Minus, '0') => Self::Zero,
            (Self::Minus | Self::Whole, '0'..='9') => Self::Whole,
            (Self::Zero | Self::Whole, '.') => Self::Point,
            (Self::Point | Self::Fraction, '0'..='9') => Self::Fraction,
            (Self::Zero | Self::Whole | Self::Fraction, 'e' | 'E') => Self::Exponent,
            (Self::Exponent, '+' | '-') => Self::Sign,
            (Self::Exponent | Self::Sign | Self::Power, '0'..='9') => Self::Power,
            _ => return None,
        })
    }

    fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Whole | Self::Fraction | Self::Power)
    }
}

/// A value that has begun.
#[derive(Debug)]
pub(super) struct Scan {
    open: Vec<char>,
    want: Want,
}

impl Scan {
    /// Begins with a value's first character; `None` if none begins so.
    pub(super) fn begin(character: char) -> Option<Self> {
        let mut scan = Self { open: Vec::new(), want: Want::Value };
        (scan.value(character) == At::Inside).then_some(scan)
    }

    /// Whether the next character may be text of a string as it stands.
    pub(super) fn in_string(&self) -> bool {
        matches!(self.want, Want::Text { .. })
    }

    pub(super) fn step(&mut self, character: char) -> At {
        match self.want {
            Want::Text { key } => match character {
                '\\' => self.inside(Want::Escape { key }),
                '"' if key => self.inside(Want::Colon),
                '"' => self.whole(),
                _ => At::Inside,
            },
            Want::Escape { key } => match character {
                '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => self.inside(Want::Text { key }),
                'u' => self.inside(Want::Hex { key, left: 4 }),
                _ => At::Broken,
            },
            Want::Hex { .. } if !character.is_ascii_hexdigit() => At::Broken,
            Want::Hex { key, left: 0 | 1 } => self.inside(Want::Text { key }),
            Want::Hex { key, left } => self.inside(Want::Hex { key, left: left - 1 }),
            Want::Word(rest) => match rest.strip_prefix(character) {
                Some("") => self.whole(),
                Some(rest) => self.inside(Want::Word(rest)),
                None => At::Broken,
            },
            Want::Number(number) => match number.step(character) {
                Some(next) => self.inside(Want::Number(next)),
                None if !number.may_end() => At::Broken,
                None if self.open.is_empty() => At::Past,
                None => self.between(Want::Next, character),
            },
            want => self.between(want, character),
        }
    }

    /// Outside of strings, words and numbers.
    fn between(&mut self, want: Want, character: char) -> At {
        match (want, character) {
            (_, ' ' | '\t' | '\n' | '\r') => self.inside(want),
            (Want::First, ']') | (Want::FirstKey, '}') => self.close(),
            (Want::Value | Want::First, _) => self.value(character),
            (Want::Key | Want::FirstKey, '"') => self.inside(Want::Text { key: true }),
            (Want::Colon, ':') => self.inside(Want::Value),
            (Want::Next, ',') => {
                self.inside(if self.open.last() == Some(&'}') { Want::Key } else { Want::Value })
            }
            (Want::Next, '}' | ']') if self.open.last() == Some(&character) => self.close(),
            _ => At::Broken,
        }
    }

    fn value(&mut self, character: char) -> At {
        let want = match character {
            '{' | '[' if self.open.len() == MAX_DEPTH => return At::Broken,
            '{' => {
                self.open.push('}');
                Want::FirstKey
            }
            '[' => {
                self.open.push(']');
                Want::First
            }
            '"' => Want::Text { key: false },
            'n' => Want::Word("ull"),
            't' => Want::Word("rue"),
            'f' => Want::Word("alse"),
            '-' => Want::Number(Number::Minus),
            '0' => Want::Number(Number::Zero),
            '1'..='9' => Want::Number(Number::Whole),
            _ => return At::Broken,
        };
        self.inside(want)
    }

    fn inside(&mut self, want: Want) -> At {
        self.want = want;
        At::Inside
    }

    fn close(&mut self) -> At {
        self.open.pop();
        self.whole()
    }

    fn whole(&mut self) -> At {
        self.want = Want::Next;
        if self.open.is_empty() { At::Last } else { At::Inside }
    }
}

/// Adds a character of JSON; a raw control character, which may stand in no string, is spelt as an escape.
pub(super) fn spell(character: char, in_string: bool, out: &mut String) {
    match character {
        '\n' if in_string => out.push_str("\\n"),
        '\r' if in_string => out.push_str("\\r"),
        '\t' if in_string => out.push_str("\\t"),
        '\0'..='\x1f' if in_string => out.push_str(&format!("\\u{:04x}", u32::from(character))),
        _ => out.push(character),
    }
}

/// The text of a JSON string literal, its quotes included; raw control characters are taken.
pub(super) fn literal(raw: &str) -> Option<String> {
    serde_json::from_str(raw).ok().or_else(|| {
        let mut escaped = String::with_capacity(raw.len());
        raw.chars().for_each(|character| spell(character, true, &mut escaped));
        serde_json::from_str(&escaped).ok()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(text: &str) -> Vec<At> {
        let mut characters = text.chars();
        let mut scan = Scan::begin(characters.next().unwrap()).unwrap();
        characters.map(|character| scan.step(character)).collect()
    }

    /// Whether the text is one JSON value and nothing else.
    fn is_json(text: &str) -> bool {
        let mut characters = text.chars();
        let Some(mut scan) = characters.next().and_then(Scan::begin) else { return false };
        let mut last = At::Inside;
        for character in characters {
            if last != At::Inside {
                return false;
            }
            last = scan.step(character);
        }
        last == At::Last || (last == At::Inside && scan.step(' ') == At::Past)
    }

    #[test]
    fn values_end_where_json_says() {
        for text in ["{\"a\": [1, {\"b\": \"}\\\"\"}]}", "[]", "\"a\\\\\"", "{\"a\": null}", "null", "[[]]"] {
            let seen = run(text);
            assert_eq!(seen.last(), Some(&At::Last), "{text}");
            assert!(seen[..seen.len() - 1].iter().all(|at| *at == At::Inside), "{text}");
        }
        assert_eq!(run("12,").last(), Some(&At::Past));
        assert!(Scan::begin('<').is_none() && Scan::begin('N').is_none());
    }

    #[test]
    fn a_value_breaks_at_the_first_character_that_no_json_has_there() {
        for text in [
            "{]",
            "{<",
            "{'",
            "{\"a\": }",
            "{\"a\":1,}",
            "[,",
            "[1,]",
            "{\"a\" 1",
            "{a",
            "[fo",
            "[nul,",
            "[01",
            "[1.,",
            "[-,",
            "[1e,",
            "[+",
            "[.",
            "\"\\x",
            "\"\\u12g",
            "{1",
            "[1 2",
            "{\"a\":1 \"",
            "[N",
            "[\u{a0}",
        ] {
            let seen = run(text);
            assert_eq!(seen.last(), Some(&At::Broken), "{text}");
            assert!(seen[..seen.len() - 1].iter().all(|at| *at == At::Inside), "{text}");
        }
    }

    #[test]
    fn nesting_is_bounded() {
        assert!(run(&"[".repeat(1_000)).contains(&At::Broken));
        assert!(is_json(&format!("{}{}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH))));
    }

    #[test]
    fn literals_are_decoded() {
        assert_eq!(literal("\"a\\u00e9\"").as_deref(), Some("aé"));
        assert_eq!(literal("\"a\nb\u{1}\"").as_deref(), Some("a\nb\u{1}"));
        assert_eq!(literal("\"a"), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2048))]

        #[test]
        fn json_is_what_serde_takes_for_json(text in "[{]?([\\[\\]{},: ]|\"a\"|\"[\\\\]?[a-u\"1]{0,5}\"|null|true|-|0|12|[.eE+]){0,9}[}]?") {
            prop_assume!(!text.starts_with(' ') && !text.ends_with(' '));
            let wanted = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            prop_assert_eq!(is_json(&text), wanted, "{}", text);
        }
    }
}
