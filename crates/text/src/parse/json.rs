//! Calls as bare JSON: the whole answer is a call, an array of calls, or several one after the other.
//!
//! Only at the answer's very beginning, or after Llama's own mark; anything else is an answer that happens to be JSON.

use super::call::{CallReader, Now, Proof};
use super::finder::Finder;
use super::prose::Prose;
use super::{Machine, ToolEvents, ToolParser};

const PYTHON_TAG: &[&str] = &["<|python_tag|>"];
const NOTHING: &[&str] = &[];

/// A parser of JSON alone.
pub(super) fn plain(tools: &[String]) -> Box<dyn ToolParser> {
    Box::new(Json::new(NOTHING, tools))
}

/// A parser of Llama 3's form.
pub(super) fn llama(tools: &[String]) -> Box<dyn ToolParser> {
    Box::new(Json::new(PYTHON_TAG, tools))
}

enum State {
    /// Where a call may begin; what came since is kept.
    Open(String),
    /// In a call object; the text since calls were last possible.
    Call(CallReader, String),
    /// In an array of calls, between them.
    List(String),
    /// An answer.
    Text,
}

struct Json {
    tools: Vec<String>,
    state: State,
    prose: Prose,
    mark: Finder,
    in_list: bool,
    any: bool,
}

impl Json {
    fn new(mark: &'static [&'static str], tools: &[String]) -> Self {
        Self {
            tools: tools.to_vec(),
            state: State::Open(String::new()),
            prose: Prose::default(),
            mark: Finder::new(mark),
            in_list: false,
            any: false,
        }
    }

    /// What of the text is no part of the mark.
    fn plain(&mut self, character: char, out: &mut ToolEvents) {
        self.state = match std::mem::replace(&mut self.state, State::Text) {
            State::Open(raw) => self.open(raw, character, out),
            State::List(raw) => self.list(raw, character, out),
            State::Call(reader, raw) => self.call(reader, raw, character, out),
            State::Text => {
                self.prose.character(character, out);
                State::Text
            }
        };
    }

    fn open(&mut self, mut raw: String, character: char, out: &mut ToolEvents) -> State {
        raw.push(character);
        match character {
            '{' => self.call(CallReader::new(Proof::Bare), raw, '{', out),
            '[' if !self.any => {
                self.in_list = true;
                State::List(raw)
            }
            ';' | ',' if self.any => State::Open(raw),
            _ if character.is_whitespace() => State::Open(raw),
            _ => self.text(&raw, out),
        }
    }

    fn list(&mut self, mut raw: String, character: char, out: &mut ToolEvents) -> State {
        raw.push(character);
        match character {
            '{' => self.call(CallReader::new(Proof::Bare), raw, '{', out),
            ']' if self.any => State::Text,
            ',' if self.any => State::List(raw),
            _ if character.is_whitespace() => State::List(raw),
            _ => self.text(&raw, out),
        }
    }

    /// `raw` has the character already when it is the first.
    fn call(
        &mut self,
        mut reader: CallReader,
        mut raw: String,
        character: char,
        out: &mut ToolEvents,
    ) -> State {
        let first = raw.ends_with('{') && character == '{' && !reader.has_begun();
        let now = reader.step(character, &self.tools, &mut self.prose, out);
        if !first && !reader.has_started() {
            raw.push(character);
        }
        match now {
            Now::More => State::Call(reader, raw),
            Now::Done => {
                self.any = true;
                if self.in_list { State::List(String::new()) } else { State::Open(String::new()) }
            }
            Now::Broken if reader.has_started() => {
                self.any = true;
                self.prose.text(&reader.take_rest(), out);
                self.prose.character(character, out);
                State::Text
            }
            Now::Broken => self.text(&raw, out),
        }
    }

    fn text(&mut self, raw: &str, out: &mut ToolEvents) -> State {
        self.prose.text(raw, out);
        State::Text
    }
}

impl Machine for Json {
    fn step(&mut self, character: char, out: &mut ToolEvents) {
        if matches!(self.state, State::Call(..)) {
            return self.plain(character, out);
        }
        let mut released = String::new();
        let found = self.mark.step(character, |free| released.push(free));
        released.chars().for_each(|free| self.plain(free, out));
        if found.is_some() && !matches!(self.state, State::Call(..)) {
            if let State::Open(raw) | State::List(raw) = std::mem::replace(&mut self.state, State::Text) {
                self.prose.text(&raw, out);
            }
            self.in_list = false;
            self.state = State::Open(String::new());
        }
    }

    fn end(&mut self, out: &mut ToolEvents) {
        let held = self.mark.take();
        held.chars().for_each(|free| self.plain(free, out));
        let is_gap = |raw: &str| raw.chars().all(|c| c.is_whitespace() || matches!(c, ';' | ','));
        match std::mem::replace(&mut self.state, State::Text) {
            State::Open(raw) | State::List(raw) if self.any && is_gap(&raw) => {}
            State::Open(raw) | State::List(raw) => self.prose.text(&raw, out),
            State::Call(reader, raw) if !reader.has_started() => self.prose.text(&raw, out),
            State::Call(..) | State::Text => {}
        }
        self.prose.end(out);
    }
}
