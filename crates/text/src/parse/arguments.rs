//! A call's arguments: a JSON object that is told of as it comes, as far as it is JSON, from its first key or end on.

use super::ToolEvents;
use super::prose::Prose;
use super::scan::{At, Scan, spell};

/// An object whose brace has been read.
#[derive(Debug)]
pub(super) struct Object {
    scan: Option<Scan>,
    /// What the last character set free, or all so far while nothing shows that an object of JSON follows.
    text: String,
    shown: bool,
}

impl Object {
    /// After the brace.
    pub(super) fn begin() -> Self {
        Self { scan: Scan::begin('{'), text: "{".to_owned(), shown: false }
    }

    pub(super) fn step(&mut self, character: char) -> At {
        let Some(scan) = &mut self.scan else { return At::Broken };
        let in_string = scan.in_string();
        let at = scan.step(character);
        if self.shown {
            self.text.clear();
        }
        if matches!(at, At::Inside | At::Last) {
            spell(character, in_string, &mut self.text);
            self.shown |= !character.is_whitespace();
        }
        at
    }

    /// What may be told of since the last character.
    pub(super) fn told(&self) -> &str {
        if self.shown { &self.text } else { "" }
    }
}

/// The object that a text is, as JSON; `None` if it is none.
pub(super) fn object(text: &str) -> Option<String> {
    let mut object = Object::begin();
    let (mut out, mut at) = (String::with_capacity(text.len()), At::Inside);
    for character in text.strip_prefix('{')?.chars() {
        if at != At::Inside {
            return None;
        }
        at = object.step(character);
        out.push_str(object.told());
    }
    (at == At::Last).then_some(out)
}

/// A call whose name stands before its arguments.
#[derive(Debug)]
pub(super) struct NamedCall {
    /// The name, until the call has been told of.
    name: Option<String>,
    /// The text of the call up to there.
    raw: String,
    object: Object,
}

impl NamedCall {
    /// After the brace; `raw` is the text up to and with it.
    pub(super) fn new(name: String, raw: String) -> Self {
        Self { name: Some(name), raw, object: Object::begin() }
    }

    /// Takes the next character. If the arguments break off, what has not been told of is text, but not the character.
    pub(super) fn step(&mut self, character: char, prose: &mut Prose, out: &mut ToolEvents) -> At {
        let at = self.object.step(character);
        if matches!(at, At::Past | At::Broken) {
            self.end(prose, out);
            return at;
        }
        if self.object.told().is_empty() {
            self.raw.push(character);
        } else {
            if let Some(name) = self.name.take() {
                prose.call(&name, out);
            }
            out.arguments(self.object.told());
        }
        at
    }

    /// No more comes.
    pub(super) fn end(&mut self, prose: &mut Prose, out: &mut ToolEvents) {
        if self.name.take().is_some() {
            prose.text(&self.raw, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_json_and_nothing_else() {
        assert_eq!(object("{\"a\": [1]}").as_deref(), Some("{\"a\": [1]}"));
        assert_eq!(object("{ }").as_deref(), Some("{ }"));
        assert_eq!(object("{\"a\": \"x\ny\"}").as_deref(), Some("{\"a\": \"x\\ny\"}"));
        for text in ["", "{", "[]", "5", "foo", "{\"a\": }", "{} {}", "{} "] {
            assert_eq!(object(text), None, "{text}");
        }
    }
}
