//! Reasoning before the answer, between `<think>` and `</think>`.
//!
//! Line breaks at the borders belong to the marks, as the models' own templates have it, and are not told.

use branchline_core::Result;

use super::finder::Finder;

/// News of a text with reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReasoningEvent {
    /// What the model thought.
    Reasoning(String),
    /// What it answers.
    Text(String),
}

/// Events of one push; neighbours of a kind are joined.
#[derive(Debug, Default)]
pub struct ReasoningEvents(Vec<ReasoningEvent>);

impl ReasoningEvents {
    /// Adds to the reasoning.
    pub fn reasoning(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(ReasoningEvent::Reasoning(last)) => last.push_str(text),
            _ => self.0.push(ReasoningEvent::Reasoning(text.to_owned())),
        }
    }

    /// Adds to the answer.
    pub fn text(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(ReasoningEvent::Text(last)) => last.push_str(text),
            _ => self.0.push(ReasoningEvent::Text(text.to_owned())),
        }
    }

    /// The events in their order.
    pub fn into_vec(self) -> Vec<ReasoningEvent> {
        self.0
    }

    /// The events so far; none are left.
    pub fn drain(&mut self) -> std::vec::Drain<'_, ReasoningEvent> {
        self.0.drain(..)
    }
}

/// Tells reasoning and answer of one sequence apart.
pub trait ReasoningParser: Send {
    /// Takes the next piece of text, of any length.
    ///
    /// # Errors
    /// Only parsers that are not built in can fail; the request ends with the error.
    fn push(&mut self, text: &str, out: &mut ReasoningEvents) -> Result<()>;

    /// The text has ended: releases what was held back.
    ///
    /// # Errors
    /// As for [`ReasoningParser::push`].
    fn finish(&mut self, out: &mut ReasoningEvents) -> Result<()>;
}

/// One built-in form of reasoning.
#[derive(Debug, Clone, Copy)]
pub struct ReasoningFormat {
    /// What options call it.
    pub name: &'static str,
    /// When reasoning begins.
    pub doc: &'static str,
    /// The text begins in the reasoning even if the prompt does not open it.
    implicit: bool,
}

impl ReasoningFormat {
    /// Every built-in form.
    pub const ALL: &'static [Self] = &[
        Self {
            name: "deepseek_r1",
            doc: "reasoning from the first character to </think>; a leading <think> is optional",
            implicit: true,
        },
        Self {
            name: "qwen3",
            doc: "reasoning if the answer begins with <think>, or the prompt ends with it",
            implicit: false,
        },
    ];

    /// The form of a name.
    pub fn named(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|format| format.name == name)
    }

    /// The marks around it, and whether a text begins inside.
    pub fn marks(&self) -> (&'static str, &'static str, bool) {
        (OPEN[0], CLOSE[0], self.implicit)
    }

    /// A parser for one sequence; `opened` says that the prompt ends within the reasoning, `closed` that it has
    /// closed it.
    pub fn parser(&self, opened: bool, closed: bool) -> Box<dyn ReasoningParser> {
        let inside = opened || (self.implicit && !closed);
        Box::new(Think { state: State::Lead(inside), finder: Finder::new(OPEN), held: String::new() })
    }
}

const OPEN: &[&str] = &["<think>"];
const CLOSE: &[&str] = &["</think>"];

enum State {
    /// Nothing but white space so far; whether the reasoning has begun without a mark.
    Lead(bool),
    /// In the reasoning; whether anything of it was told.
    Reasoning(bool),
    /// After the reasoning, before the answer's first character.
    Closed,
    Answer,
}

struct Think {
    state: State,
    finder: Finder,
    /// White space whose owner is not known yet.
    held: String,
}

impl Think {
    fn step(&mut self, character: char, out: &mut ReasoningEvents) {
        match self.state {
            State::Lead(inside) => self.lead(inside, character, out),
            State::Reasoning(told) => {
                let (mut told, held) = (told, &mut self.held);
                let found = self.finder.step(character, |free| reason(free, &mut told, held, out));
                self.state = State::Reasoning(told);
                if found.is_some() {
                    self.held.clear();
                    self.state = State::Closed;
                }
            }
            State::Closed if character == '\n' => {}
            State::Closed | State::Answer => {
                self.state = State::Answer;
                out.text(character.encode_utf8(&mut [0; 4]));
            }
        }
    }

    fn lead(&mut self, inside: bool, character: char, out: &mut ReasoningEvents) {
        if character.is_whitespace() && self.finder.is_empty() {
            return self.held.push(character);
        }
        let mut free = String::new();
        let found = self.finder.step(character, |one| free.push(one));
        if found.is_some() {
            self.held.clear();
            self.reason();
        } else if !free.is_empty() {
            // No mark: what was held, what is free now and what the finder still has.
            let text = std::mem::take(&mut self.held) + &free + &self.finder.take();
            match inside {
                true => self.reason(),
                false => self.state = State::Answer,
            }
            text.chars().for_each(|one| self.step(one, out));
        }
    }

    fn reason(&mut self) {
        self.state = State::Reasoning(false);
        self.finder = Finder::new(CLOSE);
    }
}

fn reason(character: char, told: &mut bool, held: &mut String, out: &mut ReasoningEvents) {
    if character == '\n' {
        if *told {
            held.push(character);
        }
        return;
    }
    *told = true;
    out.reasoning(&std::mem::take(held));
    out.reasoning(character.encode_utf8(&mut [0; 4]));
}

impl ReasoningParser for Think {
    fn push(&mut self, text: &str, out: &mut ReasoningEvents) -> Result<()> {
        text.chars().for_each(|character| self.step(character, out));
        Ok(())
    }

    fn finish(&mut self, out: &mut ReasoningEvents) -> Result<()> {
        let held = std::mem::take(&mut self.held) + &self.finder.take();
        match self.state {
            State::Lead(false) | State::Answer | State::Closed => out.text(&held),
            State::Lead(true) | State::Reasoning(_) => out.reasoning(&held),
        }
        Ok(())
    }
}
