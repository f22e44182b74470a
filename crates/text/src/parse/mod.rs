//! What a model's text says besides prose: tool calls and reasoning. One parser a sequence, made anew for each.
//!
//! Every built-in parser is a machine of single characters, so that any cutting of a text gives the same events by
//! construction. What turns out to be no call is released as text, at the latest when the text ends. A call that
//! breaks off after it has been told of keeps what was told, and the rest is text: nothing is lost. Pure.

mod arguments;
mod call;
mod deepseek;
mod detect;
mod finder;
mod json;
mod marked;
mod prose;
mod python;
mod pythonic;
mod reasoning;
mod scan;
#[cfg(test)]
mod tests;

use branchline_core::Result;

pub use detect::{detect_reasoning, detect_tools, opens_reasoning};
pub use reasoning::{ReasoningEvent, ReasoningEvents, ReasoningFormat, ReasoningParser};

/// News of a text with tool calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolEvent {
    /// Text for the reader.
    Text(String),
    /// A call begins; its name is whole and comes once.
    Call {
        /// The tool's name.
        name: String,
    },
    /// More of the JSON text of the last call's arguments; what has come is always the beginning of an object.
    Arguments(String),
}

/// Events of one push; neighbours of a kind are joined.
#[derive(Debug, Default)]
pub struct ToolEvents(Vec<ToolEvent>);

impl ToolEvents {
    /// Adds text.
    pub fn text(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(ToolEvent::Text(last)) => last.push_str(text),
            _ => self.0.push(ToolEvent::Text(text.to_owned())),
        }
    }

    /// Adds a call.
    pub fn call(&mut self, name: impl Into<String>) {
        self.0.push(ToolEvent::Call { name: name.into() });
    }

    /// Adds to the last call's arguments.
    pub fn arguments(&mut self, json: &str) {
        match self.0.last_mut() {
            _ if json.is_empty() => {}
            Some(ToolEvent::Arguments(last)) => last.push_str(json),
            _ => self.0.push(ToolEvent::Arguments(json.to_owned())),
        }
    }

    fn character(&mut self, character: char, add: fn(&mut Self, &str)) {
        add(self, character.encode_utf8(&mut [0; 4]));
    }

    /// The events in their order.
    pub fn into_vec(self) -> Vec<ToolEvent> {
        self.0
    }

    /// The events so far; none are left.
    pub fn drain(&mut self) -> std::vec::Drain<'_, ToolEvent> {
        self.0.drain(..)
    }
}

/// Finds tool calls in one sequence's text.
pub trait ToolParser: Send {
    /// Takes the next piece of text, of any length.
    ///
    /// # Errors
    /// Only parsers that are not built in can fail; the request ends with the error.
    fn push(&mut self, text: &str, out: &mut ToolEvents) -> Result<()>;

    /// The text has ended: releases what was held back.
    ///
    /// # Errors
    /// As for [`ToolParser::push`].
    fn finish(&mut self, out: &mut ToolEvents) -> Result<()>;
}

/// One built-in form of tool calls.
#[derive(Debug, Clone, Copy)]
pub struct ToolFormat {
    /// What options call it.
    pub name: &'static str,
    /// What it looks like.
    pub doc: &'static str,
    /// Its marks are special tokens, which the text must keep.
    pub special: bool,
    make: fn(&[String]) -> Box<dyn ToolParser>,
}

impl ToolFormat {
    /// Every built-in form.
    pub const ALL: &'static [Self] = &[
        format("deepseek_r1", "as deepseek_v3", true, deepseek::make),
        format(
            "deepseek_v3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and fenced JSON",
            true,
            deepseek::make,
        ),
        format("deepseek_v31", "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON", true, deepseek::make),
        format("hermes", "<tool_call>{\"name\": …, \"arguments\": …}</tool_call>", false, marked::hermes),
        format("json", "the whole answer is one call object or an array of them", false, json::plain),
        format(
            "llama3_json",
            "{\"name\": …, \"parameters\": …}, perhaps after <|python_tag|>",
            true,
            json::llama,
        ),
        format("mistral", "[TOOL_CALLS] and an array of calls, or NAME[ARGS]JSON", true, marked::mistral),
        format("pythonic", "[NAME(key=value, …), …]", false, pythonic::make),
        format("qwen", "as hermes", false, marked::hermes),
    ];

    /// The form of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|format| format.name == name)
    }

    /// A parser for one sequence; `tools` are the names that may be called.
    pub fn parser(&self, tools: &[String]) -> Box<dyn ToolParser> {
        (self.make)(tools)
    }
}

const fn format(
    name: &'static str,
    doc: &'static str,
    special: bool,
    make: fn(&[String]) -> Box<dyn ToolParser>,
) -> ToolFormat {
    ToolFormat { name, doc, special, make }
}

/// A parser that looks at one character at a time.
trait Machine: Send {
    fn step(&mut self, character: char, out: &mut ToolEvents);
    fn end(&mut self, out: &mut ToolEvents);
}

impl<M: Machine> ToolParser for M {
    fn push(&mut self, text: &str, out: &mut ToolEvents) -> Result<()> {
        text.chars().for_each(|character| self.step(character, out));
        Ok(())
    }

    fn finish(&mut self, out: &mut ToolEvents) -> Result<()> {
        self.end(out);
        Ok(())
    }
}
