//! The calls of DeepSeek V3 and R1 (a type, the name and fenced JSON) and of V3.1 (the name and plain JSON).
//!
//! Both are told apart by what follows the separator, so one parser reads them.

use super::finder::Finder;
use super::prose::Prose;
use super::scan::{At, Scan};
use super::{Machine, ToolEvents, ToolParser};

const MARKS: &[&str] =
    &["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"];
const BEGIN: usize = 0;
const INNER: &[&str] = &["<｜tool▁sep｜>", "<｜tool▁call▁end｜>"];
const END: &[&str] = &["<｜tool▁call▁end｜>"];
const MAX_NAME: usize = 256;

/// A parser of both forms.
pub(super) fn make(_tools: &[String]) -> Box<dyn ToolParser> {
    Box::new(Deepseek { state: State::Text, prose: Prose::default(), finder: Finder::new(MARKS) })
}

enum State {
    Text,
    /// Up to the separator: a type, or V3.1's name.
    Head(String, Finder, String),
    /// After the separator: V3's name and fence, or the arguments at once.
    Name(String, String, String),
    Arguments(Scan),
    /// After the arguments, up to the end mark.
    Tail(Finder),
}

struct Deepseek {
    state: State,
    prose: Prose,
    finder: Finder,
}

impl Deepseek {
    fn head(
        &mut self,
        mut head: String,
        mut finder: Finder,
        mut raw: String,
        character: char,
        out: &mut ToolEvents,
    ) {
        raw.push(character);
        match finder.step(character, |free| head.push(free)) {
            Some(0) => self.state = State::Name(head, String::new(), raw),
            None if head.len() <= MAX_NAME => self.state = State::Head(head, finder, raw),
            _ => self.prose.text(&raw, out),
        }
    }

    fn name(
        &mut self,
        head: String,
        mut rest: String,
        mut raw: String,
        character: char,
        out: &mut ToolEvents,
    ) {
        raw.push(character);
        if character != '{' {
            rest.push(character);
            if rest.len() > MAX_NAME {
                return self.prose.text(&raw, out);
            }
            self.state = State::Name(head, rest, raw);
            return;
        }
        let after = rest.split("```").next().unwrap_or_default().trim();
        let name = if after.is_empty() { head.trim() } else { after };
        if name.is_empty() {
            return self.prose.text(&raw, out);
        }
        self.prose.call(name, out);
        out.arguments("{");
        // A brace always begins a value.
        self.state = Scan::begin('{').map_or(State::Text, State::Arguments);
    }

    fn arguments(&mut self, mut scan: Scan, character: char, out: &mut ToolEvents) {
        self.state = match scan.step(character) {
            At::Inside => {
                out.character(character, ToolEvents::arguments);
                State::Arguments(scan)
            }
            At::Last => {
                out.character(character, ToolEvents::arguments);
                State::Tail(Finder::new(END))
            }
            At::Past | At::Broken => {
                let mut finder = Finder::new(END);
                finder.step(character, |_| {});
                State::Tail(finder)
            }
        };
    }
}

impl Machine for Deepseek {
    fn step(&mut self, character: char, out: &mut ToolEvents) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => {
                let prose = &mut self.prose;
                if self.finder.step(character, |free| prose.character(free, out)) == Some(BEGIN) {
                    self.state = State::Head(String::new(), Finder::new(INNER), MARKS[BEGIN].to_owned());
                }
            }
            State::Head(head, finder, raw) => self.head(head, finder, raw, character, out),
            State::Name(head, rest, raw) => self.name(head, rest, raw, character, out),
            State::Arguments(scan) => self.arguments(scan, character, out),
            State::Tail(mut finder) => {
                if finder.step(character, |_| {}).is_none() {
                    self.state = State::Tail(finder);
                }
            }
        }
    }

    fn end(&mut self, out: &mut ToolEvents) {
        let held = self.finder.take();
        self.prose.text(&held, out);
        if let State::Head(_, _, raw) | State::Name(_, _, raw) =
            std::mem::replace(&mut self.state, State::Text)
        {
            self.prose.text(&raw, out);
        }
        self.prose.end(out);
    }
}
