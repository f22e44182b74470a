//! One call written as a JSON object with `name` and `arguments` or `parameters`, in any order, read as it comes.

use super::ToolEvents;
use super::arguments::{Object, object};
use super::prose::Prose;
use super::scan::{At, Scan, literal};

/// When an object is a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    /// A marker stood before it: any name is enough.
    Marked,
    /// Nothing marks it: it must name a tool that exists and have no foreign key before its arguments.
    Bare,
}

/// What became of the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Now {
    /// It goes on.
    More,
    /// It is closed, and was a call.
    Done,
    /// The character belongs to no call: it and all before it that no call has told of is text.
    Broken,
}

#[derive(Debug)]
enum State {
    /// Before the brace.
    Outside,
    /// Before a key or the closing brace.
    Key,
    InKey(String),
    Colon,
    Value,
    /// In the name's literal.
    InName(String),
    /// In arguments that stream as they come.
    InArguments(Object),
    /// In arguments written as a literal, which holds an object, or as null.
    InText(Scan, String),
    /// In a value of no interest.
    InOther(Scan),
    /// After a value.
    Comma,
}

/// Reads one call.
#[derive(Debug)]
pub(super) struct CallReader {
    proof: Proof,
    state: State,
    key: String,
    name: Option<String>,
    /// Arguments that came before the name.
    early: String,
    /// Whether arguments were found.
    told: bool,
    started: bool,
    foreign: bool,
    /// Whether its arguments have come to their end.
    whole: bool,
    /// Whether the last character was told of.
    spoke: bool,
    /// What was read since the arguments, which is a part of the call only if its end comes.
    rest: String,
}

impl CallReader {
    pub(super) fn new(proof: Proof) -> Self {
        Self {
            proof,
            state: State::Outside,
            key: String::new(),
            name: None,
            early: String::new(),
            told: false,
            started: false,
            foreign: false,
            whole: false,
            spoke: false,
            rest: String::new(),
        }
    }

    /// Whether the call has been told of.
    pub(super) fn has_started(&self) -> bool {
        self.started
    }

    /// Whether its brace has been read.
    pub(super) fn has_begun(&self) -> bool {
        !matches!(self.state, State::Outside)
    }

    /// Whether its arguments have come to their end.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// After a call that has been told of broke: what stands between its arguments and the character that broke it.
    pub(super) fn take_rest(&mut self) -> String {
        std::mem::take(&mut self.rest)
    }

    /// Takes the next character. A call is told of through `prose`, which knows what white space it swallows.
    pub(super) fn step(
        &mut self,
        character: char,
        tools: &[String],
        prose: &mut Prose,
        out: &mut ToolEvents,
    ) -> Now {
        self.spoke = false;
        let now = self.advance(character, tools, prose, out);
        if now == Now::More && self.started && !self.spoke {
            self.rest.push(character);
        }
        now
    }

    fn advance(&mut self, character: char, tools: &[String], prose: &mut Prose, out: &mut ToolEvents) -> Now {
        let state = std::mem::replace(&mut self.state, State::Comma);
        let next = match state {
            State::Outside | State::Key | State::Colon | State::Value | State::Comma
                if character.is_whitespace() =>
            {
                Some(state)
            }
            State::Outside => (character == '{').then_some(State::Key),
            State::Key => match character {
                '"' => Some(State::InKey("\"".to_owned())),
                '}' => return self.close(tools, prose, out),
                _ => None,
            },
            State::InKey(text) => self.in_key(text, character),
            State::Colon => (character == ':').then_some(State::Value),
            State::Value => self.value(character),
            State::InName(text) => self.in_name(text, character, tools, prose, out),
            State::InArguments(object) => self.in_arguments(object, character, tools, prose, out),
            State::InText(mut scan, mut text) => {
                text.push(character);
                match scan.step(character) {
                    At::Inside => Some(State::InText(scan, text)),
                    At::Last => self.in_text(&text, tools, prose, out),
                    At::Past | At::Broken => None,
                }
            }
            State::InOther(mut scan) => match scan.step(character) {
                At::Inside => Some(State::InOther(scan)),
                At::Last => Some(State::Comma),
                At::Past => return self.advance(character, tools, prose, out),
                At::Broken => None,
            },
            State::Comma => match character {
                ',' => Some(State::Key),
                '}' => return self.close(tools, prose, out),
                _ => None,
            },
        };
        match next {
            Some(state) => {
                self.state = state;
                Now::More
            }
            None => Now::Broken,
        }
    }

    fn in_key(&mut self, mut text: String, character: char) -> Option<State> {
        text.push(character);
        if !closes(&text) {
            return Some(State::InKey(text));
        }
        self.key = literal(&text)?;
        let ours = matches!(self.key.as_str(), "name" | "arguments" | "parameters" | "type" | "id");
        self.foreign |= !ours;
        (self.started || ours || self.proof == Proof::Marked).then_some(State::Colon)
    }

    fn value(&self, character: char) -> Option<State> {
        let scan = Scan::begin(character)?;
        match self.key.as_str() {
            "name" if self.name.is_none() => (character == '"').then(|| State::InName("\"".to_owned())),
            "arguments" | "parameters" if !self.told => match character {
                '{' => Some(State::InArguments(Object::begin())),
                '"' | 'n' => Some(State::InText(scan, character.to_string())),
                _ => None,
            },
            _ => Some(State::InOther(scan)),
        }
    }

    fn in_name(
        &mut self,
        mut text: String,
        character: char,
        tools: &[String],
        prose: &mut Prose,
        out: &mut ToolEvents,
    ) -> Option<State> {
        text.push(character);
        if !closes(&text) {
            return Some(State::InName(text));
        }
        let name = literal(&text).filter(|name| !name.is_empty())?;
        if self.proof == Proof::Bare && !tools.contains(&name) {
            return None;
        }
        self.name = Some(name);
        (!self.told || self.start(tools, prose, out)).then_some(State::Comma)
    }

    fn in_arguments(
        &mut self,
        mut object: Object,
        character: char,
        tools: &[String],
        prose: &mut Prose,
        out: &mut ToolEvents,
    ) -> Option<State> {
        let at = object.step(character);
        if matches!(at, At::Past | At::Broken) || !self.tell(object.told(), tools, prose, out) {
            return None;
        }
        self.whole = at == At::Last;
        Some(if self.whole { State::Comma } else { State::InArguments(object) })
    }

    /// Arguments as a literal that is whole, or as null: an empty literal and null are no arguments.
    fn in_text(
        &mut self,
        text: &str,
        tools: &[String],
        prose: &mut Prose,
        out: &mut ToolEvents,
    ) -> Option<State> {
        let spelt = if text == "null" { String::new() } else { literal(text)? };
        let json = match spelt.trim() {
            "" => String::new(),
            spelt => object(spelt)?,
        };
        self.whole = !json.is_empty();
        self.tell(&json, tools, prose, out).then_some(State::Comma)
    }

    /// Tells of arguments, which wait for the name; `false` if they belong to no call.
    fn tell(&mut self, json: &str, tools: &[String], prose: &mut Prose, out: &mut ToolEvents) -> bool {
        if json.is_empty() {
            return true;
        }
        self.told = true;
        if self.name.is_none() {
            self.early.push_str(json);
            return true;
        }
        let started = self.start(tools, prose, out);
        if started {
            self.spoke = true;
            out.arguments(json);
        }
        started
    }

    /// Tells of the call, once; `false` if it is none.
    fn start(&mut self, tools: &[String], prose: &mut Prose, out: &mut ToolEvents) -> bool {
        if self.started {
            return true;
        }
        let Some(name) = &self.name else { return false };
        if self.proof == Proof::Bare && (self.foreign || !tools.contains(name)) {
            return false;
        }
        prose.call(name, out);
        self.started = true;
        self.spoke = true;
        out.arguments(&std::mem::take(&mut self.early));
        true
    }

    fn close(&mut self, tools: &[String], prose: &mut Prose, out: &mut ToolEvents) -> Now {
        if !self.start(tools, prose, out) {
            return Now::Broken;
        }
        if !self.told {
            out.arguments("{}");
        }
        Now::Done
    }
}

/// Whether a literal that began with a quote ends here.
fn closes(text: &str) -> bool {
    let Some(body) = text.strip_suffix('"').filter(|body| !body.is_empty()) else { return false };
    body.chars().rev().take_while(|character| *character == '\\').count() % 2 == 0
}
