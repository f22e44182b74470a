//! Text between calls. White space is held until it is known whether a call follows it, which swallows it.

use super::ToolEvents;

/// The text outside of calls.
#[derive(Debug, Default)]
pub(super) struct Prose {
    held: String,
    called: bool,
}

impl Prose {
    pub(super) fn character(&mut self, character: char, out: &mut ToolEvents) {
        if character.is_whitespace() {
            self.held.push(character);
            return;
        }
        out.text(&std::mem::take(&mut self.held));
        out.character(character, ToolEvents::text);
    }

    pub(super) fn text(&mut self, text: &str, out: &mut ToolEvents) {
        text.chars().for_each(|character| self.character(character, out));
    }

    /// A call begins: white space before it is not for the reader.
    pub(super) fn call(&mut self, name: &str, out: &mut ToolEvents) {
        self.held.clear();
        self.called = true;
        out.call(name);
    }

    /// The text has ended.
    pub(super) fn end(&mut self, out: &mut ToolEvents) {
        let held = std::mem::take(&mut self.held);
        if !self.called {
            out.text(&held);
        }
    }
}
