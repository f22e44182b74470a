//! Calls written as a Python list: `[get_weather(city="Oslo"), get_time(tz='UTC')]`, at the answer's very beginning.
//!
//! A call is told of when it is whole, since Python's literals have to be spelt anew as JSON. From the first that is
//! none, or names no tool, all is text.

use super::finder::Finder;
use super::prose::Prose;
use super::python::keywords;
use super::{Machine, ToolEvents, ToolParser};

const MARKS: &[&str] = &["<|python_start|>", "<|python_end|>"];

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
    /// In a call's brackets.
    Call(Call),
    /// After a call; the text since.
    After(String),
    Text,
}

/// A call so far.
struct Call {
    name: String,
    /// The text that is not told of, and where in it the arguments begin.
    raw: String,
    arguments: usize,
    open: usize,
    quote: Quote,
    escaped: bool,
}

/// Where the text stands to Python's strings.
#[derive(Clone, Copy)]
enum Quote {
    Outside,
    /// After one or two quotes, which may begin a string, be an empty one, or become three.
    Opening(char, u8),
    One(char),
    /// In a string of three quotes, after some that may end it.
    Three(char, u8),
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
            State::Call(call) => self.call(call, character, out),
            State::After(raw) => self.after(raw, character, out),
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
            '(' if self.tools.contains(&name) => State::Call(Call {
                name,
                arguments: raw.len(),
                raw,
                open: 0,
                quote: Quote::Outside,
                escaped: false,
            }),
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

    fn call(&mut self, mut call: Call, character: char, out: &mut ToolEvents) -> State {
        let closes = call.closes(character);
        if !closes {
            call.raw.push(character);
            return State::Call(call);
        }
        match call.raw.get(call.arguments..).and_then(keywords) {
            Some(json) => {
                self.any = true;
                self.prose.call(&call.name, out);
                out.arguments(&json);
                State::After(String::new())
            }
            None => {
                call.raw.push(character);
                self.text(&call.raw, out)
            }
        }
    }

    fn after(&mut self, mut raw: String, character: char, out: &mut ToolEvents) -> State {
        raw.push(character);
        match character {
            ',' => State::Name(String::new(), raw),
            ']' => State::Text,
            _ if character.is_whitespace() => State::After(raw),
            _ => self.text(&raw, out),
        }
    }

    fn text(&mut self, text: &str, out: &mut ToolEvents) -> State {
        self.prose.text(text, out);
        State::Text
    }
}

impl Call {
    /// Whether the character is the bracket that ends the call.
    fn closes(&mut self, character: char) -> bool {
        if std::mem::take(&mut self.escaped) {
            return false;
        }
        self.quote = match (self.quote, character) {
            (Quote::Opening(quote, 1), _) if character == quote => Quote::Opening(quote, 2),
            (Quote::Opening(quote, 2), _) if character == quote => Quote::Three(quote, 0),
            (Quote::Opening(quote, seen), _) => {
                self.quote = if seen == 1 { Quote::One(quote) } else { Quote::Outside };
                return self.closes(character);
            }
            (Quote::One(quote) | Quote::Three(quote, _), '\\') => {
                self.escaped = true;
                if matches!(self.quote, Quote::One(_)) { Quote::One(quote) } else { Quote::Three(quote, 0) }
            }
            (Quote::One(quote) | Quote::Three(quote, 2), _) if character == quote => Quote::Outside,
            (Quote::Three(quote, seen), _) => {
                Quote::Three(quote, if character == quote { seen + 1 } else { 0 })
            }
            (Quote::One(quote), _) => Quote::One(quote),
            (Quote::Outside, '"' | '\'') => Quote::Opening(character, 1),
            (Quote::Outside, ')') if self.open == 0 => return true,
            (Quote::Outside, _) => {
                match character {
                    '(' | '[' | '{' => self.open += 1,
                    ')' | ']' | '}' => self.open = self.open.saturating_sub(1),
                    _ => {}
                }
                Quote::Outside
            }
        };
        false
    }
}

impl Machine for Pythonic {
    fn step(&mut self, character: char, out: &mut ToolEvents) {
        if matches!(self.state, State::Call(_)) {
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
            State::Name(name, _) if self.any && name.is_empty() => {}
            State::Open(raw) | State::Name(_, raw) | State::Call(Call { raw, .. }) => {
                self.prose.text(&raw, out);
            }
            State::After(_) | State::Text => {}
        }
        self.prose.end(out);
    }
}
