//! Python's literals as JSON text, as Python reads them. What JSON cannot say, or what is no literal, is none.

/// Deepest nesting of a value.
const MAX_DEPTH: usize = 64;

/// The JSON object of a call's keyword arguments, from behind the opening bracket to before the closing one; `None`
/// if they are anything else.
pub(super) fn keywords(text: &str) -> Option<String> {
    let mut reader = Reader { rest: text };
    let mut pairs = Vec::<(String, String)>::new();
    while !reader.is_done() {
        let key = reader.identifier()?;
        if !reader.take('=') || pairs.iter().any(|(other, _)| *other == key) {
            return None;
        }
        pairs.push((key, reader.value(0)?));
        if !reader.take(',') && !reader.is_done() {
            return None;
        }
    }
    Some(map_text(&pairs, ": ", ", "))
}

fn map_text(pairs: &[(String, String)], colon: &str, comma: &str) -> String {
    let pair = |(key, value): &(String, String)| format!("{}{colon}{value}", quoted(key));
    format!("{{{}}}", pairs.iter().map(pair).collect::<Vec<_>>().join(comma))
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn is_done(&mut self) -> bool {
        self.skip_space();
        self.rest.is_empty()
    }

    fn take(&mut self, wanted: char) -> bool {
        self.skip_space();
        let rest = self.rest.strip_prefix(wanted);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// The characters up to the first that is refused.
    fn run(&mut self, takes: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|character| !takes(character)).unwrap_or(self.rest.len());
        let (run, rest) = self.rest.split_at(end);
        self.rest = rest;
        run
    }

    fn identifier(&mut self) -> Option<String> {
        self.skip_space();
        let name = self.run(|character| character.is_alphanumeric() || character == '_');
        name.starts_with(|first: char| !first.is_numeric()).then(|| name.to_owned())
    }

    /// The JSON text of the next value.
    fn value(&mut self, depth: usize) -> Option<String> {
        self.skip_space();
        if depth > MAX_DEPTH {
            return None;
        }
        match self.rest.chars().next()? {
            '[' => self.items('[', ']', depth).map(|(items, _)| format!("[{}]", items.join(","))),
            // Brackets around one value alone make no tuple.
            '(' => self.items('(', ')', depth).map(|(mut items, comma)| match items.len() {
                1 if !comma => items.swap_remove(0),
                _ => format!("[{}]", items.join(",")),
            }),
            '{' => self.map(depth),
            '+' | '-' | '.' | '0'..='9' => self.number(),
            _ if self.begins_string() => self.strings().map(|text| quoted(&text)),
            _ => self.word(),
        }
    }

    /// The items, and whether a comma stands after the last.
    fn items(&mut self, open: char, close: char, depth: usize) -> Option<(Vec<String>, bool)> {
        self.take(open);
        let (mut items, mut comma) = (Vec::new(), true);
        while !self.take(close) {
            if !comma {
                return None;
            }
            items.push(self.value(depth + 1)?);
            comma = self.take(',');
        }
        Some((items, comma))
    }

    /// A dictionary; of two equal keys the later value counts. Keys that are no text are spelt as such.
    fn map(&mut self, depth: usize) -> Option<String> {
        self.take('{');
        let (mut map, mut comma) = (serde_json::Map::new(), true);
        while !self.take('}') {
            if !comma {
                return None;
            }
            let key = match serde_json::from_str(&self.value(depth + 1)?).ok()? {
                serde_json::Value::String(text) => text,
                serde_json::Value::Array(_) | serde_json::Value::Object(_) => return None,
                other => other.to_string(),
            };
            if !self.take(':') {
                return None;
            }
            map.insert(key, serde_json::Value::String(self.value(depth + 1)?));
            comma = self.take(',');
        }
        let text = |value| if let serde_json::Value::String(text) = value { text } else { String::new() };
        let pairs: Vec<_> = map.into_iter().map(|(key, value)| (key, text(value))).collect();
        Some(map_text(&pairs, ":", ","))
    }

    /// Python's words and, since models mix them up, JSON's.
    fn word(&mut self) -> Option<String> {
        let json = match self.identifier()?.as_str() {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            _ => return None,
        };
        Some(json.to_owned())
    }

    fn number(&mut self) -> Option<String> {
        let mut minus = false;
        loop {
            if self.take('-') {
                minus = !minus;
            } else if !self.take('+') {
                break;
            }
        }
        let mut text =
            self.run(|character| character.is_ascii_alphanumeric() || matches!(character, '_' | '.'));
        let exponent = text.ends_with(['e', 'E']) && !text.starts_with("0x") && !text.starts_with("0X");
        let mut whole = text.to_owned();
        if exponent && self.rest.starts_with(['+', '-']) {
            let (sign, rest) = self.rest.split_at(1);
            self.rest = rest;
            text = self.run(|character| character.is_ascii_digit() || character == '_');
            whole = format!("{whole}{sign}{text}");
        }
        unsigned(&whole, minus)
    }

    fn begins_string(&self) -> bool {
        let after = self.rest.strip_prefix(['r', 'R', 'u', 'U']).unwrap_or(self.rest);
        after.starts_with(['"', '\''])
    }

    /// Strings that stand one after the other are one.
    fn strings(&mut self) -> Option<String> {
        let mut out = String::new();
        while self.begins_string() {
            let raw = self.rest.starts_with(['r', 'R']);
            self.rest = self.rest.strip_prefix(['r', 'R', 'u', 'U']).unwrap_or(self.rest);
            self.string(raw, &mut out)?;
            self.skip_space();
        }
        Some(out)
    }

    fn string(&mut self, raw: bool, out: &mut String) -> Option<()> {
        let quote = opening(self.rest)?;
        self.rest = self.rest.get(quote.len()..)?;
        loop {
            if let Some(rest) = self.rest.strip_prefix(quote) {
                self.rest = rest;
                return Some(());
            }
            match self.next()? {
                '\\' if raw => {
                    out.push('\\');
                    out.push(self.next()?);
                }
                '\\' => self.escape(out)?,
                character => out.push(character),
            }
        }
    }

    fn next(&mut self) -> Option<char> {
        let mut characters = self.rest.chars();
        let character = characters.next()?;
        self.rest = characters.as_str();
        Some(character)
    }

    /// What follows a backslash.
    fn escape(&mut self, out: &mut String) -> Option<()> {
        let character = match self.next()? {
            '\n' => return Some(()),
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'v' => '\x0b',
            same @ ('\\' | '\'' | '"') => same,
            first @ '0'..='7' => {
                let more = self.rest.chars().take(2).take_while(|digit| digit.is_digit(8)).count();
                let code = format!("{first}{}", self.rest.get(..more)?);
                self.rest = self.rest.get(more..)?;
                char::from_u32(u32::from_str_radix(&code, 8).ok()?)?
            }
            'x' => char::from_u32(self.hex(2)?)?,
            'U' => char::from_u32(self.hex(8)?)?,
            'u' => self.utf16()?,
            // A character by its name, whose table is not here.
            'N' => return None,
            // Python leaves an unknown escape as it stands.
            other => {
                out.push('\\');
                other
            }
        };
        out.push(character);
        Some(())
    }

    fn hex(&mut self, count: usize) -> Option<u32> {
        let digits =
            self.rest.get(..count).filter(|text| text.chars().all(|digit| digit.is_ascii_hexdigit()))?;
        self.rest = self.rest.get(count..)?;
        u32::from_str_radix(digits, 16).ok()
    }

    /// One character, or two halves of one; a half alone is no text.
    fn utf16(&mut self) -> Option<char> {
        let first = self.hex(4)?;
        if !(0xd800..0xdc00).contains(&first) {
            return char::from_u32(first);
        }
        self.rest = self.rest.strip_prefix("\\u")?;
        let second = self.hex(4)?.checked_sub(0xdc00).filter(|low| *low < 0x400)?;
        char::from_u32(0x10000 + ((first - 0xd800) << 10) + second)
    }
}

/// The quote that a text begins with: one or three characters.
fn opening(text: &str) -> Option<&'static str> {
    ["\"\"\"", "'''", "\"", "'"].into_iter().find(|quote| text.starts_with(quote))
}

/// The JSON of a number without its sign. Whole decimal numbers of any length stay exact; no number is complex,
/// endless or, in other bases, longer than 128 bits.
fn unsigned(text: &str, minus: bool) -> Option<String> {
    let digits = |text: &str, base: u32| {
        let fits = |part: &str| !part.is_empty() && part.chars().all(|digit| digit.is_digit(base));
        text.split('_').all(fits).then(|| text.replace('_', ""))
    };
    let sign = |magnitude: &str| if minus && magnitude != "0" { "-" } else { "" }.to_owned() + magnitude;
    let lower = text.to_ascii_lowercase();
    for (mark, base) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(rest) = lower.strip_prefix(mark) {
            let rest = digits(rest.strip_prefix('_').unwrap_or(rest), base)?;
            return Some(sign(&u128::from_str_radix(&rest, base).ok()?.to_string()));
        }
    }
    if let Some(whole) = digits(&lower, 10) {
        let magnitude = whole.trim_start_matches('0');
        return match magnitude {
            "" => Some("0".to_owned()),
            _ if magnitude.len() < whole.len() => None,
            _ => Some(sign(magnitude)),
        };
    }
    let (mantissa, exponent) = lower.split_once('e').unwrap_or((&lower, "0"));
    digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent), 10)?;
    let (before, after) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    for part in [before, after].into_iter().filter(|part| !part.is_empty()) {
        digits(part, 10)?;
    }
    if before.is_empty() && after.is_empty() {
        return None;
    }
    let number: f64 = lower.replace('_', "").parse().ok()?;
    Some(serde_json::Number::from_f64(if minus { -number } else { number })?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(python: &str) -> Option<String> {
        let mut reader = Reader { rest: python };
        reader.value(0).filter(|_| reader.is_done())
    }

    #[test]
    fn python_literals_become_json() {
        for (python, json) in [
            ("True", "true"),
            ("None", "null"),
            ("[1, (2, 3,), {'a': [False]}]", "[1,[2,3],{\"a\":[false]}]"),
            ("{}", "{}"),
            ("()", "[]"),
            ("(5)", "5"),
            ("(5,)", "[5]"),
            ("{1: 2, None: 3, 'a': 4, 'a': 5}", "{\"1\":2,\"null\":3,\"a\":5}"),
        ] {
            assert_eq!(value(python).as_deref(), Some(json), "{python}");
        }
    }

    #[test]
    fn numbers_are_read_as_python_reads_them() {
        for (python, json) in [
            ("-1.5e3", "-1500.0"),
            ("0x10", "16"),
            ("-0X_ff", "-255"),
            ("0o17", "15"),
            ("0b101", "5"),
            (".5", "0.5"),
            ("-.5", "-0.5"),
            ("5.", "5.0"),
            ("+3", "3"),
            ("--3", "3"),
            ("- 3", "-3"),
            ("1_000", "1000"),
            ("1e3", "1000.0"),
            ("1E+2", "100.0"),
            ("2.5e-1", "0.25"),
            ("00", "0"),
            ("-0", "0"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
        ] {
            assert_eq!(value(python).as_deref(), Some(json), "{python}");
        }
        for python in
            ["012", "1__0", "_1", "1_", "0x", "0xg", "1e", "1e999", "1j", ".", "-", "1.2.3", "0b2", "1a"]
        {
            assert_eq!(value(python), None, "{python}");
        }
    }

    #[test]
    fn strings_are_read_as_python_reads_them() {
        for (python, text) in [
            ("'it\\'s'", "it's"),
            ("\"a\\n\\u00e9\"", "a\né"),
            (r#""\101""#, "A"),
            (r#""\0""#, "\0"),
            (r#""\18""#, "\u{1}8"),
            (r#""\x41\U0001F600""#, "A😀"),
            (r#""\ud83d\ude00""#, "😀"),
            (r#""\a\b\f\v\\""#, "\x07\x08\x0c\x0b\\"),
            (r#""\d+""#, "\\d+"),
            ("'a\\\nb'", "ab"),
            (r#"r"\d\"""#, "\\d\\\""),
            (r#"u"x""#, "x"),
            (r#""a" 'b'"#, "ab"),
            (r#""""say "x" (now)""""#, "say \"x\" (now)"),
            ("''", ""),
        ] {
            assert_eq!(value(python), Some(quoted(text)), "{python}");
        }
        for python in [r#""\x4""#, r#""\u12""#, r#""\ud83d""#, r#""\N{DASH}""#, "'a", "b'x'", "f'x'", "'a\\"]
        {
            assert_eq!(value(python), None, "{python}");
        }
    }

    #[test]
    fn what_is_no_literal_is_none() {
        for python in
            ["datetime.now()", "celsius", "1 + 2", "[1", "[1 2]", "[1,,2]", "{1}", "{[1]: 2}", "*x", ""]
        {
            assert_eq!(value(python), None, "{python}");
        }
        assert_eq!(value(&"[".repeat(10_000)), None);
    }

    #[test]
    fn keywords_are_an_object_and_nothing_else_is() {
        assert_eq!(keywords("").as_deref(), Some("{}"));
        assert_eq!(keywords(" a = 1,\n b='x', ").as_deref(), Some("{\"a\": 1, \"b\": \"x\"}"));
        for text in [
            "5", "\"x\"", "**x", "*x", ",", "a", "a=", "a=1 b=2", "a=1, 5", "a=1, a=2", "1a=1", "a==1",
            "a=1)",
        ] {
            assert_eq!(keywords(text), None, "{text}");
        }
    }
}
