//! Calls behind a mark: `<tool_call>` around each (Hermes, Qwen), or `[TOOL_CALLS]` before all (Mistral).

use super::arguments::NamedCall;
use super::call::{CallReader, Now, Proof};
use super::finder::Finder;
use super::prose::Prose;
use super::scan::At;
use super::{Machine, ToolEvents, ToolParser};

const HERMES: &[&str] = &["<tool_call>", "</tool_call>"];
const HERMES_END: &[&str] = &["</tool_call>"];
const MISTRAL: &[&str] = &["[TOOL_CALLS]"];
const ARGS: &[&str] = &["[ARGS]", "[CALL_ID]"];
/// Bytes from the mark to the arguments of `NAME[ARGS]`.
const MAX_NAME: usize = 512;

/// A parser of the Hermes form.
pub(super) fn hermes(tools: &[String]) -> Box<dyn ToolParser> {
    Box::new(Hermes {
        tools: tools.to_vec(),
        state: HermesState::Text,
        prose: Prose::default(),
        finder: Finder::new(HERMES),
        closing: false,
    })
}

enum HermesState {
    Text,
    /// After the opening mark; the text since, if no call has been told of.
    Call(CallReader, String),
    /// After a call, where its end mark is due; the white space since.
    Closing(Finder, String),
}

struct Hermes {
    tools: Vec<String>,
    state: HermesState,
    prose: Prose,
    finder: Finder,
    /// An end mark is still due after other text, and is not text.
    closing: bool,
}

impl Machine for Hermes {
    fn step(&mut self, character: char, out: &mut ToolEvents) {
        match std::mem::replace(&mut self.state, HermesState::Text) {
            HermesState::Text => {
                let prose = &mut self.prose;
                match self.finder.step(character, |free| prose.character(free, out)) {
                    Some(0) => {
                        self.closing = false;
                        self.state = HermesState::Call(CallReader::new(Proof::Marked), HERMES[0].to_owned());
                    }
                    Some(_) if !std::mem::take(&mut self.closing) => self.prose.text(HERMES[1], out),
                    _ => {}
                }
            }
            HermesState::Call(mut reader, mut raw) => {
                let now = reader.step(character, &self.tools, &mut self.prose, out);
                match now {
                    Now::Done => {
                        self.state = HermesState::Closing(Finder::new(HERMES_END), String::new());
                    }
                    Now::More => {
                        if !reader.has_started() {
                            raw.push(character);
                        }
                        self.state = HermesState::Call(reader, raw);
                    }
                    Now::Broken => {
                        // Of a call whose arguments are whole, only its own end is wrong.
                        self.closing = reader.has_started() && reader.is_whole();
                        let rest = if reader.has_started() { reader.take_rest() } else { raw };
                        self.prose.text(&rest, out);
                        self.step(character, out);
                    }
                }
            }
            HermesState::Closing(mut finder, mut gap) => {
                let mut free = String::new();
                if finder.step(character, |character| free.push(character)).is_some() {
                    return;
                }
                let other = free.contains(|character: char| !character.is_whitespace());
                gap.push_str(&free);
                if !other {
                    self.state = HermesState::Closing(finder, gap);
                    return;
                }
                self.closing = true;
                gap.push_str(&finder.take());
                gap.chars().for_each(|character| self.step(character, out));
            }
        }
    }

    fn end(&mut self, out: &mut ToolEvents) {
        let held = self.finder.take();
        self.prose.text(&held, out);
        if let HermesState::Call(reader, raw) = std::mem::replace(&mut self.state, HermesState::Text)
            && !reader.has_started()
        {
            self.prose.text(&raw, out);
        }
        self.prose.end(out);
    }
}

/// A parser of Mistral's two forms.
pub(super) fn mistral(tools: &[String]) -> Box<dyn ToolParser> {
    Box::new(Mistral {
        tools: tools.to_vec(),
        state: MistralState::Text,
        prose: Prose::default(),
        finder: Finder::new(MISTRAL),
        any: false,
    })
}

enum MistralState {
    Text,
    /// After the mark.
    Marked(String),
    /// Between the calls of an array; the text since the last.
    List(String),
    Call(CallReader, String),
    /// `NAME[ARGS]`: the name so far, what stands between it and the arguments, and all of the text.
    Name(String, Finder, bool, String),
    Arguments(NamedCall),
}

struct Mistral {
    tools: Vec<String>,
    state: MistralState,
    prose: Prose,
    finder: Finder,
    /// A call has followed the last mark.
    any: bool,
}

impl Mistral {
    fn text(&mut self, raw: &str, out: &mut ToolEvents) {
        self.prose.text(raw, out);
    }

    fn marked(&mut self, mut raw: String, character: char, out: &mut ToolEvents) {
        raw.push(character);
        self.state = match character {
            '[' => MistralState::List(raw),
            '{' => {
                raw.pop();
                return self.call(CallReader::new(Proof::Marked), raw, character, out);
            }
            _ if is_name(character) => {
                MistralState::Name(character.to_string(), Finder::new(ARGS), false, raw)
            }
            _ if character.is_whitespace() => MistralState::Marked(raw),
            _ => return self.text(&raw, out),
        };
    }

    fn list(&mut self, mut raw: String, character: char, out: &mut ToolEvents) {
        match character {
            '{' => self.call(CallReader::new(Proof::Marked), raw, character, out),
            // An array of no calls was no array of calls.
            ']' if self.any => {}
            _ if character.is_whitespace() || (character == ',' && self.any) => {
                raw.push(character);
                self.state = MistralState::List(raw);
            }
            _ => {
                raw.push(character);
                self.text(&raw, out);
            }
        }
    }

    fn call(&mut self, mut reader: CallReader, mut raw: String, character: char, out: &mut ToolEvents) {
        match reader.step(character, &self.tools, &mut self.prose, out) {
            Now::Done => {
                self.any = true;
                self.state = MistralState::List(String::new());
            }
            Now::More => {
                if !reader.has_started() {
                    raw.push(character);
                }
                self.state = MistralState::Call(reader, raw);
            }
            Now::Broken => {
                let rest = if reader.has_started() { reader.take_rest() } else { raw };
                self.text(&rest, out);
                self.step(character, out);
            }
        }
    }

    /// After the name come perhaps an id and a mark, then the arguments' brace.
    fn name(&mut self, mut name: Named, character: char, out: &mut ToolEvents) {
        let Named { text, finder, ended, raw } = &mut name;
        raw.push(character);
        if character == '{' && finder.is_empty() {
            let call = NamedCall::new(text.trim_end().to_owned(), std::mem::take(raw));
            self.state = MistralState::Arguments(call);
            return;
        }
        let mut fits = true;
        let found = finder.step(character, |free| match free {
            _ if *ended => fits &= is_name(free) || free.is_whitespace(),
            _ if is_name(free) => {
                fits &= !text.ends_with(char::is_whitespace);
                text.push(free);
            }
            _ if free.is_whitespace() => text.push(free),
            _ => fits = false,
        });
        *ended |= found.is_some();
        if !fits || raw.len() > MAX_NAME {
            return self.text(&name.raw, out);
        }
        self.state = MistralState::Name(name.text, name.finder, name.ended, name.raw);
    }

    fn arguments(&mut self, mut call: NamedCall, character: char, out: &mut ToolEvents) {
        match call.step(character, &mut self.prose, out) {
            At::Inside => self.state = MistralState::Arguments(call),
            At::Last => {}
            At::Past | At::Broken => self.step(character, out),
        }
    }
}

/// A call of the form `NAME[ARGS]` so far.
struct Named {
    text: String,
    finder: Finder,
    ended: bool,
    raw: String,
}

fn is_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.')
}

impl Machine for Mistral {
    fn step(&mut self, character: char, out: &mut ToolEvents) {
        match std::mem::replace(&mut self.state, MistralState::Text) {
            MistralState::Text => {
                let prose = &mut self.prose;
                if self.finder.step(character, |free| prose.character(free, out)).is_some() {
                    self.any = false;
                    self.state = MistralState::Marked(MISTRAL[0].to_owned());
                }
            }
            MistralState::Marked(raw) => self.marked(raw, character, out),
            MistralState::List(raw) => self.list(raw, character, out),
            MistralState::Call(reader, raw) => self.call(reader, raw, character, out),
            MistralState::Name(text, finder, ended, raw) => {
                self.name(Named { text, finder, ended, raw }, character, out);
            }
            MistralState::Arguments(call) => self.arguments(call, character, out),
        }
    }

    fn end(&mut self, out: &mut ToolEvents) {
        let held = self.finder.take();
        self.prose.text(&held, out);
        match std::mem::replace(&mut self.state, MistralState::Text) {
            MistralState::List(_) if self.any => {}
            MistralState::Marked(raw) | MistralState::List(raw) | MistralState::Name(_, _, _, raw) => {
                self.prose.text(&raw, out);
            }
            MistralState::Call(reader, raw) if !reader.has_started() => self.prose.text(&raw, out),
            MistralState::Arguments(mut call) => call.end(&mut self.prose, out),
            MistralState::Call(..) | MistralState::Text => {}
        }
        self.prose.end(out);
    }
}
