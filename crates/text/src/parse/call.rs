//! One call written as a JSON object with `name` and `arguments` or `parameters`, in any order, read as it comes.

use super::ToolEvents;
use super::prose::Prose;
use super::scan::{At, Scan, literal};

/// When an object is a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Proof {
    /// A marker stood before it: a name is enough.
    Marked,
    /// Nothing marks it: it must name a tool that exists and have no foreign key.
    Bare,
}

/// What became of the object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Now {
    /// It goes on.
    More,
    /// It is closed, and was a call.
    Done,
    /// The character belongs to no call: all before it is text, unless the call has begun.
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
    /// In arguments that stream as they are.
    InArguments(Scan),
    /// In arguments written as a literal or a scalar.
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

    /// Takes the next character. A call is told of through `prose`, which knows what white space it swallows.
    pub(super) fn step(
        &mut self,
        character: char,
        tools: &[String],
        prose: &mut Prose,
        out: &mut ToolEvents,
    ) -> Now {
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
            State::Value => self.value(character, tools, prose, out),
            State::InName(text) => self.in_name(text, character, tools, prose, out),
            State::InArguments(scan) => self.in_arguments(scan, character, out),
            State::InText(scan, text) => match self.in_text(scan, text, character, out) {
                Ok(next) => next,
                Err(()) => return self.step(character, tools, prose, out),
            },
            State::InOther(mut scan) => match scan.step(character) {
                At::Inside => Some(State::InOther(scan)),
                At::Last => Some(State::Comma),
                At::Past => return self.step(character, tools, prose, out),
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

    fn value(
        &mut self,
        character: char,
        tools: &[String],
        prose: &mut Prose,
        out: &mut ToolEvents,
    ) -> Option<State> {
        let scan = Scan::begin(character)?;
        match self.key.as_str() {
            "name" if self.name.is_none() => (character == '"').then(|| State::InName("\"".to_owned())),
            "arguments" | "parameters" if !self.told => {
                if !matches!(character, '{' | '[') {
                    return Some(State::InText(scan, character.to_string()));
                }
                if self.name.is_some() && !self.start(tools, prose, out) {
                    return None;
                }
                self.tell(character.encode_utf8(&mut [0; 4]), out);
                Some(State::InArguments(scan))
            }
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
        if self.proof == Proof::Marked || self.told {
            self.start(tools, prose, out);
        }
        Some(State::Comma)
    }

    fn in_arguments(&mut self, mut scan: Scan, character: char, out: &mut ToolEvents) -> Option<State> {
        let at = scan.step(character);
        if matches!(at, At::Inside | At::Last) {
            self.tell(character.encode_utf8(&mut [0; 4]), out);
        }
        match at {
            At::Inside => Some(State::InArguments(scan)),
            At::Last => Some(State::Comma),
            At::Past | At::Broken => None,
        }
    }

    /// `Err` if the character stands after the value.
    fn in_text(
        &mut self,
        mut scan: Scan,
        mut text: String,
        character: char,
        out: &mut ToolEvents,
    ) -> Result<Option<State>, ()> {
        match scan.step(character) {
            At::Inside => {
                text.push(character);
                Ok(Some(State::InText(scan, text)))
            }
            At::Last => {
                text.push(character);
                let Some(spelt) = literal(&text) else { return Ok(None) };
                self.tell(spelt.trim(), out);
                Ok(Some(State::Comma))
            }
            At::Past => {
                if text != "null" {
                    self.tell(&text, out);
                }
                Err(())
            }
            At::Broken => Ok(None),
        }
    }

    fn tell(&mut self, json: &str, out: &mut ToolEvents) {
        self.told |= !json.is_empty();
        if self.started { out.arguments(json) } else { self.early.push_str(json) }
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
