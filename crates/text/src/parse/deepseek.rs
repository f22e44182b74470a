//! The calls of DeepSeek V3 and R1 (a type, the name and fenced JSON) and of V3.1 (the name and plain JSON).
//!
//! Both are told apart by what follows the separator, so one parser reads them.

use super::arguments::NamedCall;
use super::finder::Finder;
use super::prose::Prose;
use super::scan::At;
use super::{Machine, ToolEvents, ToolParser};

const MARKS: &[&str] =
    &["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"];
const BEGIN: usize = 0;
const CALL_END: usize = 1;
const INNER: &[&str] = &["<｜tool▁sep｜>", "<｜tool▁call▁end｜>"];
const END: &[&str] = &["<｜tool▁call▁end｜>"];
const MAX_NAME: usize = 256;

/// A parser of both forms.
pub(super) fn make(_tools: &[String]) -> Box<dyn ToolParser> {
    Box::new(Deepseek {
        state: State::Text,
        prose: Prose::default(),
        finder: Finder::new(MARKS),
        broken: false,
    })
}

enum State {
    Text,
    /// Up to the separator: a type, or V3.1's name.
    Head(String, Finder, String),
    /// After the separator: V3's name and fence, or the arguments at once.
    Name(String, String, String),
    Arguments(NamedCall),
    /// After the arguments, up to the end mark: the fence.
    Tail(Finder, String),
}

struct Deepseek {
    state: State,
    prose: Prose,
    finder: Finder,
    /// A call broke off before its end mark, which is then text, too.
    broken: bool,
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
            end => {
                self.broken = end.is_none();
                self.prose.text(&raw, out);
            }
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
                self.broken = true;
                return self.prose.text(&raw, out);
            }
            self.state = State::Name(head, rest, raw);
            return;
        }
        match name_of(&head, &rest) {
            Some(name) => self.state = State::Arguments(NamedCall::new(name.to_owned(), raw)),
            None => {
                self.broken = true;
                self.prose.text(&raw, out);
            }
        }
    }

    fn arguments(&mut self, mut call: NamedCall, character: char, out: &mut ToolEvents) {
        match call.step(character, &mut self.prose, out) {
            At::Inside => self.state = State::Arguments(call),
            At::Last => self.state = State::Tail(Finder::new(END), String::new()),
            At::Past | At::Broken => {
                self.broken = true;
                self.step(character, out);
            }
        }
    }

    fn tail(&mut self, mut finder: Finder, mut fence: String, character: char, out: &mut ToolEvents) {
        let mut free = String::new();
        if finder.step(character, |character| free.push(character)).is_some() {
            return;
        }
        let other = free.contains(|character: char| !character.is_whitespace() && character != '`');
        fence.push_str(&free);
        if !other {
            self.state = State::Tail(finder, fence);
            return;
        }
        fence.push_str(&finder.take());
        fence.chars().for_each(|character| self.step(character, out));
    }
}

/// The name by what stands before the separator and between it and the arguments; `None` if it is no form of a call.
fn name_of<'a>(head: &'a str, rest: &'a str) -> Option<&'a str> {
    let (after, fence) = rest.split_once("```").unwrap_or((rest, ""));
    let (head, after) = (head.trim(), after.trim());
    let name = match after {
        "" => head,
        _ if head == "function" => after,
        _ => return None,
    };
    let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
    (is_name && matches!(fence.trim(), "" | "json")).then_some(name)
}

impl Machine for Deepseek {
    fn step(&mut self, character: char, out: &mut ToolEvents) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => {
                let prose = &mut self.prose;
                match self.finder.step(character, |free| prose.character(free, out)) {
                    Some(BEGIN) => {
                        self.broken = false;
                        self.state = State::Head(String::new(), Finder::new(INNER), MARKS[BEGIN].to_owned());
                    }
                    Some(CALL_END) if std::mem::take(&mut self.broken) => {
                        self.prose.text(MARKS[CALL_END], out);
                    }
                    _ => {}
                }
            }
            State::Head(head, finder, raw) => self.head(head, finder, raw, character, out),
            State::Name(head, rest, raw) => self.name(head, rest, raw, character, out),
            State::Arguments(call) => self.arguments(call, character, out),
            State::Tail(finder, fence) => self.tail(finder, fence, character, out),
        }
    }

    fn end(&mut self, out: &mut ToolEvents) {
        let held = self.finder.take();
        self.prose.text(&held, out);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Head(_, _, raw) | State::Name(_, _, raw) => self.prose.text(&raw, out),
            State::Arguments(mut call) => call.end(&mut self.prose, out),
            State::Text | State::Tail(..) => {}
        }
        self.prose.end(out);
    }
}
