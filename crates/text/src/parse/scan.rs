//! Where one JSON value ends, a character at a time. Checks brackets and strings, not more.

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

/// A value that has begun.
#[derive(Debug)]
pub(super) struct Scan {
    open: Vec<char>,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    /// Begins with a value's first character; `None` if none begins so.
    pub(super) fn begin(character: char) -> Option<Self> {
        let open = match character {
            '{' => vec!['}'],
            '[' => vec![']'],
            '"' | '-' | '0'..='9' | 'a'..='z' | 'N' | 'I' => Vec::new(),
            _ => return None,
        };
        Some(Self { open, in_string: character == '"', escaped: false })
    }

    pub(super) fn step(&mut self, character: char) -> At {
        if self.in_string {
            return self.string(character);
        }
        match character {
            ',' | '}' | ']' if self.open.is_empty() => At::Past,
            character if self.open.is_empty() && character.is_whitespace() => At::Past,
            '"' if !self.open.is_empty() => {
                self.in_string = true;
                At::Inside
            }
            '{' | '[' if !self.open.is_empty() && self.open.len() < MAX_DEPTH => {
                self.open.push(if character == '{' { '}' } else { ']' });
                At::Inside
            }
            '}' | ']' if self.open.last() == Some(&character) => {
                self.open.pop();
                if self.open.is_empty() { At::Last } else { At::Inside }
            }
            ',' | ':' => At::Inside,
            '+' | '-' | '.' => At::Inside,
            character if character.is_ascii_alphanumeric() || character.is_whitespace() => At::Inside,
            _ => At::Broken,
        }
    }

    fn string(&mut self, character: char) -> At {
        match character {
            _ if self.escaped => self.escaped = false,
            '\\' => self.escaped = true,
            '"' => {
                self.in_string = false;
                if self.open.is_empty() {
                    return At::Last;
                }
            }
            _ => {}
        }
        At::Inside
    }
}

/// The text of a JSON string literal, its quotes included; raw control characters, which models write, are taken.
pub(super) fn literal(raw: &str) -> Option<String> {
    serde_json::from_str(raw).ok().or_else(|| {
        let escaped: String = raw
            .chars()
            .map(|character| match character {
                '\n' => "\\n".to_owned(),
                '\r' => "\\r".to_owned(),
                '\t' => "\\t".to_owned(),
                other => other.to_string(),
            })
            .collect();
        serde_json::from_str(&escaped).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str) -> Vec<At> {
        let mut characters = text.chars();
        let mut scan = Scan::begin(characters.next().unwrap()).unwrap();
        characters.map(|character| scan.step(character)).collect()
    }

    #[test]
    fn values_end_where_json_says() {
        for text in ["{\"a\": [1, {\"b\": \"}\\\"\"}]}", "[]", "\"a\\\\\"", "{\"a\": null}"] {
            let seen = run(text);
            assert_eq!(seen.last(), Some(&At::Last), "{text}");
            assert!(seen[..seen.len() - 1].iter().all(|at| *at == At::Inside), "{text}");
        }
        assert_eq!(run("12,").last(), Some(&At::Past));
        assert_eq!(run("{]").last(), Some(&At::Broken));
        assert_eq!(run("{<").last(), Some(&At::Broken));
        assert!(Scan::begin('<').is_none());
    }

    #[test]
    fn nesting_is_bounded() {
        assert!(run(&"[".repeat(1_000)).contains(&At::Broken));
    }

    #[test]
    fn literals_are_decoded() {
        assert_eq!(literal("\"a\\u00e9\"").as_deref(), Some("aé"));
        assert_eq!(literal("\"a\nb\"").as_deref(), Some("a\nb"));
        assert_eq!(literal("\"a"), None);
    }
}
