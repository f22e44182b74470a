//! Calls written as a Python list: `[get_weather(city="Oslo"), get_time(tz='UTC')]`, the whole answer of it.
//!
//! An argument is told of when its value is whole, since Python's literals have to be spelt anew as JSON.

use super::finder::Finder;
use super::prose::Prose;
use super::{Machine, ToolEvents, ToolParser};

const MARKS: &[&str] = &["<|python_start|>", "<|python_end|>"];
const MAX_DEPTH: usize = 64;

/// A parser for these tools.
pub(super) fn make(tools: &[String]) -> Box<dyn ToolParser> {
    Box::new(Pythonic {
        tools: tools.to_vec(),
        state: State::Open(String::new()),
        prose: Prose::default(),
        mark: Finder::new(MARKS),
        any: false,
    })
}

enum State {
    /// Where the list may begin.
    Open(String),
    /// In the list, before or in a name; the name and the text that is not told of.
    Name(String, String),
    /// In a call's brackets, before or in a key.
    Key(String),
    /// In a value.
    Value(Value),
    /// After a call.
    After,
    Text,
}

/// A value of a keyword so far.
struct Value {
    key: String,
    text: String,
    open: usize,
    quote: Option<char>,
    escaped: bool,
}

struct Pythonic {
    tools: Vec<String>,
    state: State,
    prose: Prose,
    mark: Finder,
    any: bool,
}

impl Pythonic {
    fn plain(&mut self, character: char, out: &mut ToolEvents) {
        self.state = match std::mem::replace(&mut self.state, State::Text) {
            State::Open(raw) => self.open(raw, character, out),
            State::Name(name, raw) => self.name(name, raw, character, out),
            State::Key(key) => self.key(key, character, out),
            State::Value(value) => self.value(value, character, out),
            State::After => match character {
                ',' => State::Name(String::new(), String::new()),
                ']' => State::Text,
                _ if character.is_whitespace() => State::After,
                _ => self.text(character.encode_utf8(&mut [0; 4]), out),
            },
            State::Text => self.text(character.encode_utf8(&mut [0; 4]), out),
        };
    }

    fn open(&mut self, mut raw: String, character: char, out: &mut ToolEvents) -> State {
        raw.push(character);
        match character {
            '[' => State::Name(String::new(), raw),
            _ if character.is_whitespace() => State::Open(raw),
            _ => self.text(&raw, out),
        }
    }

    fn name(&mut self, mut name: String, mut raw: String, character: char, out: &mut ToolEvents) -> State {
        raw.push(character);
        match character {
            '(' if self.tools.contains(&name) => {
                self.any = true;
                self.prose.call(&name, out);
                State::Key(String::new())
            }
            // A comma before the closing bracket is Python, too.
            ']' if self.any && name.is_empty() => State::Text,
            _ if character.is_whitespace() && name.is_empty() => State::Name(name, raw),
            _ if character.is_alphanumeric() || matches!(character, '_' | '.' | '-') => {
                name.push(character);
                State::Name(name, raw)
            }
            _ => self.text(&raw, out),
        }
    }

    fn key(&mut self, mut key: String, character: char, out: &mut ToolEvents) -> State {
        let first = key.starts_with('{');
        match character {
            '=' => {
                let text = String::new();
                State::Value(Value { key, text, open: 0, quote: None, escaped: false })
            }
            ')' if key.is_empty() => {
                out.arguments("{}");
                State::After
            }
            ')' => {
                out.arguments("}");
                State::After
            }
            _ if character.is_whitespace() || (character == ',' && first) => State::Key(key),
            _ => {
                key.push(character);
                State::Key(key)
            }
        }
    }

    /// A key that begins with a brace says that others came before it.
    fn value(&mut self, mut value: Value, character: char, out: &mut ToolEvents) -> State {
        if value.reads(character) {
            value.text.push(character);
            return State::Value(value);
        }
        let (name, first) = match value.key.strip_prefix('{') {
            Some(name) => (name, false),
            None => (value.key.as_str(), true),
        };
        let spelt = literal(value.text.trim());
        out.arguments(if first { "{" } else { ", " });
        out.arguments(&serde_json::Value::from(name).to_string());
        out.arguments(": ");
        out.arguments(&spelt);
        if character == ')' {
            out.arguments("}");
            return State::After;
        }
        State::Key("{".to_owned())
    }

    fn text(&mut self, text: &str, out: &mut ToolEvents) -> State {
        self.prose.text(text, out);
        State::Text
    }
}

impl Value {
    /// Whether the character belongs to the value: all but the comma or bracket that ends it.
    fn reads(&mut self, character: char) -> bool {
        match (self.quote, character) {
            _ if self.escaped => self.escaped = false,
            (Some(_), '\\') => self.escaped = true,
            (Some(quote), _) if quote == character => self.quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => self.quote = Some(character),
            (None, '(' | '[' | '{') => self.open += 1,
            (None, ')' | ',') if self.open == 0 => return false,
            (None, ')' | ']' | '}') => self.open = self.open.saturating_sub(1),
            _ => {}
        }
        true
    }
}

impl Machine for Pythonic {
    fn step(&mut self, character: char, out: &mut ToolEvents) {
        if matches!(self.state, State::Value(_) | State::Key(_)) {
            return self.plain(character, out);
        }
        let mut released = String::new();
        self.mark.step(character, |free| released.push(free));
        released.chars().for_each(|free| self.plain(free, out));
    }

    fn end(&mut self, out: &mut ToolEvents) {
        let held = self.mark.take();
        held.chars().for_each(|free| self.plain(free, out));
        match std::mem::replace(&mut self.state, State::Text) {
            State::Open(raw) => self.prose.text(&raw, out),
            State::Name(_, raw) => self.prose.text(&raw, out),
            State::Key(_) | State::Value(_) | State::After | State::Text => {}
        }
        self.prose.end(out);
    }
}

/// A Python literal as JSON; what is none becomes a string of its text.
fn literal(text: &str) -> String {
    let mut reader = Reader { rest: text };
    match reader.value(0) {
        Some(value) if reader.rest.trim_start().is_empty() => value.to_string(),
        _ => serde_json::Value::from(text).to_string(),
    }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn value(&mut self, depth: usize) -> Option<serde_json::Value> {
        self.rest = self.rest.trim_start();
        if depth > MAX_DEPTH {
            return None;
        }
        match self.rest.chars().next()? {
            '[' => self.items(']', depth).map(Into::into),
            '(' => self.items(')', depth).map(Into::into),
            '{' => self.map(depth),
            quote @ ('"' | '\'') => self.string(quote).map(Into::into),
            _ => self.word(),
        }
    }

    fn take(&mut self, wanted: char) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(wanted) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn items(&mut self, close: char, depth: usize) -> Option<Vec<serde_json::Value>> {
        self.rest = self.rest.get(1..)?;
        let mut items = Vec::new();
        while !self.take(close) {
            items.push(self.value(depth + 1)?);
            if !self.take(',') && !self.rest.trim_start().starts_with(close) {
                return None;
            }
        }
        Some(items)
    }

    fn map(&mut self, depth: usize) -> Option<serde_json::Value> {
        self.rest = self.rest.get(1..)?;
        let mut map = serde_json::Map::new();
        while !self.take('}') {
            let key = match self.value(depth + 1)? {
                serde_json::Value::String(text) => text,
                other => other.to_string(),
            };
            if !self.take(':') {
                return None;
            }
            map.insert(key, self.value(depth + 1)?);
            if !self.take(',') && !self.rest.trim_start().starts_with('}') {
                return None;
            }
        }
        Some(map.into())
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let mut out = String::new();
        let mut characters = self.rest.char_indices().skip(1);
        while let Some((at, character)) = characters.next() {
            match character {
                _ if character == quote => {
                    self.rest = self.rest.get(at + character.len_utf8()..)?;
                    return Some(out);
                }
                '\\' => match characters.next()?.1 {
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    digits @ ('x' | 'u') => {
                        let count = if digits == 'x' { 2 } else { 4 };
                        let code: String = characters.by_ref().take(count).map(|(_, digit)| digit).collect();
                        out.push(u32::from_str_radix(&code, 16).ok().and_then(char::from_u32)?);
                    }
                    other => out.push(other),
                },
                _ => out.push(character),
            }
        }
        None
    }

    fn word(&mut self) -> Option<serde_json::Value> {
        let end = self.rest.find([',', ']', ')', '}', ':']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.trim() {
            "True" | "true" => Some(true.into()),
            "False" | "false" => Some(false.into()),
            "None" | "null" => Some(serde_json::Value::Null),
            number => serde_json::from_str::<serde_json::Number>(number).ok().map(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_literals_become_json() {
        for (python, json) in [
            ("'it\\'s'", "\"it's\""),
            ("\"a\\n\\u00e9\"", "\"a\\né\""),
            ("True", "true"),
            ("None", "null"),
            ("-1.5e3", "-1500.0"),
            ("[1, (2, 3,), {'a': [False]}]", "[1,[2,3],{\"a\":[false]}]"),
            ("{}", "{}"),
            ("datetime.now()", "\"datetime.now()\""),
            ("[1", "\"[1\""),
        ] {
            assert_eq!(literal(python), json, "{python}");
        }
        assert!(literal(&"[".repeat(10_000)).starts_with("\"[["));
    }
}
