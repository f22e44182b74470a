//! Which parsers of tool calls and of reasoning there are, and which one a model gets.
//!
//! Built-in forms come from `crates/text`; a process may add its own before options are read (the Python wheel does,
//! through `branchline_router.registry`, which owns the rules of registration). Names are all this part decides by.

use std::collections::BTreeMap;
use std::sync::Arc;

use branchline_core::Result;
use branchline_protocol::ReasoningMarks;
pub use branchline_text::parse::{
    ReasoningEvent, ReasoningEvents, ReasoningFormat, ReasoningParser, ToolEvent, ToolEvents, ToolFormat,
    ToolParser,
};
use branchline_text::parse::{detect_reasoning, detect_tools};
use branchline_worker::Model;
use parking_lot::RwLock;
use serde_json::Value;

/// Makes parsers of tool calls, one a sequence.
pub trait ToolFactory: Send + Sync {
    /// Whether the marks are special tokens, which the text must keep.
    fn special(&self) -> bool;

    /// A new parser; `tools` are the request's definitions in OpenAI's chat form.
    ///
    /// # Errors
    /// If it can't be made; the request ends with the error.
    fn parser(&self, tools: &[Value]) -> Result<Box<dyn ToolParser>>;
}

/// Makes parsers of reasoning, one a sequence.
pub trait ReasoningFactory: Send + Sync {
    /// A new parser; `opened` says that the prompt ends within the reasoning, `closed` that it has closed it.
    ///
    /// # Errors
    /// As for [`ToolFactory::parser`].
    fn parser(&self, opened: bool, closed: bool) -> Result<Box<dyn ReasoningParser>>;

    /// What stands around the reasoning, so that a constraint can begin behind it; none if it is not known, and
    /// constrained answers then hold no reasoning.
    fn marks(&self) -> Option<ReasoningMarks> {
        None
    }
}

impl ToolFactory for ToolFormat {
    fn special(&self) -> bool {
        self.special
    }

    fn parser(&self, tools: &[Value]) -> Result<Box<dyn ToolParser>> {
        let names = tools.iter().filter_map(|tool| tool.pointer("/function/name")?.as_str());
        Ok(Self::parser(self, &names.map(str::to_owned).collect::<Vec<_>>()))
    }
}

impl ReasoningFactory for ReasoningFormat {
    fn parser(&self, opened: bool, closed: bool) -> Result<Box<dyn ReasoningParser>> {
        Ok(Self::parser(self, opened, closed))
    }

    fn marks(&self) -> Option<ReasoningMarks> {
        let (begin, end, implicit) = Self::marks(self);
        Some(ReasoningMarks { begin: begin.to_owned(), end: end.to_owned(), implicit })
    }
}

/// The parsers of one kind by name: the built-in ones, and those that were added or put in their place.
pub struct Shelf<F: ?Sized + 'static> {
    /// As the registry calls the kind.
    pub kind: &'static str,
    /// As messages call one of it.
    pub noun: &'static str,
    built_in: fn(&str) -> Option<Arc<F>>,
    own: fn() -> Vec<&'static str>,
    added: RwLock<BTreeMap<String, Arc<F>>>,
}

/// Parsers of tool calls.
pub static TOOL_PARSERS: Shelf<dyn ToolFactory> = Shelf {
    kind: "tool_parsers",
    noun: "tool parser",
    built_in: |name| ToolFormat::named(name).map(|format| Arc::new(*format) as Arc<dyn ToolFactory>),
    own: || ToolFormat::ALL.iter().map(|format| format.name).collect(),
    added: RwLock::new(BTreeMap::new()),
};

/// Parsers of reasoning.
pub static REASONING_PARSERS: Shelf<dyn ReasoningFactory> = Shelf {
    kind: "reasoning_parsers",
    noun: "reasoning parser",
    built_in: |name| {
        ReasoningFormat::named(name).map(|format| Arc::new(*format) as Arc<dyn ReasoningFactory>)
    },
    own: || ReasoningFormat::ALL.iter().map(|format| format.name).collect(),
    added: RwLock::new(BTreeMap::new()),
};

impl<F: ?Sized> Shelf<F> {
    /// Adds a factory, in the place of any other of its name.
    pub fn add(&self, name: &str, factory: Arc<F>) {
        self.added.write().insert(name.to_owned(), factory);
    }

    /// Every name, sorted.
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = (self.own)().into_iter().map(str::to_owned).collect();
        names.extend(self.added.read().keys().cloned());
        names.sort();
        names.dedup();
        names
    }

    /// Names of the built-in ones.
    pub fn built_in(&self) -> Vec<&'static str> {
        (self.own)()
    }

    /// The factory of a name.
    pub fn get(&self, name: &str) -> Option<Arc<F>> {
        self.added.read().get(name).cloned().or_else(|| (self.built_in)(name))
    }

    /// The message for a name that is not registered, as `branchline_router.registry` writes it.
    pub fn unknown(&self, name: &str) -> String {
        let quoted: Vec<String> = self.names().iter().map(|known| format!("'{known}'")).collect();
        format!(
            "unknown {noun} '{name}'; registered: {}; to add it, call \
             @branchline_router.registry.{kind}.register('{name}', api_version=1) in a module named by --plugin or \
             BRANCHLINE_PLUGINS, or declare an entry point '{name}' in the group 'branchline.{kind}'; this must \
             happen before options are built",
            quoted.join(", "),
            noun = self.noun,
            kind = self.kind,
        )
    }
}

/// What an option says of a kind of parser.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Choice {
    /// By the model's chat template.
    Auto,
    /// None: text passes as it is.
    Off,
    /// This one.
    Named(String),
}

impl Choice {
    /// Reads an option's text.
    ///
    /// # Errors
    /// The words for a name that nobody registered.
    pub fn read<F: ?Sized>(text: &str, shelf: &Shelf<F>) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" | "off" => Ok(Self::Off),
            name if shelf.get(name).is_some() => Ok(Self::Named(name.to_owned())),
            name => Err(shelf.unknown(name)),
        }
    }

    fn find<F: ?Sized>(
        &self,
        model: &Model,
        shelf: &Shelf<F>,
        detect: fn(&str) -> Option<&'static str>,
    ) -> Option<Arc<F>> {
        match self {
            Self::Auto => shelf.get(detect(model.manifest.chat_template.as_deref()?)?),
            Self::Off => None,
            Self::Named(name) => shelf.get(name),
        }
    }

    /// The parsers of tool calls for a model.
    pub fn tools(&self, model: &Model) -> Option<Arc<dyn ToolFactory>> {
        self.find(model, &TOOL_PARSERS, detect_tools)
    }

    /// The parsers of reasoning for a model.
    pub fn reasoning(&self, model: &Model) -> Option<Arc<dyn ReasoningFactory>> {
        self.find(model, &REASONING_PARSERS, detect_reasoning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_nobody_registered_is_refused_with_those_that_are() {
        let message = Choice::read("nope", &TOOL_PARSERS).expect_err("nobody has it");
        for part in ["unknown tool parser 'nope'", "'hermes'", "'mistral'", "'branchline.tool_parsers'"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(Choice::read("auto", &TOOL_PARSERS), Ok(Choice::Auto));
        assert_eq!(Choice::read("none", &REASONING_PARSERS), Ok(Choice::Off));
        assert_eq!(Choice::read("qwen3", &REASONING_PARSERS), Ok(Choice::Named("qwen3".into())));
    }

    #[test]
    fn what_is_added_is_found_before_what_is_built_in() {
        struct Mine;
        impl ReasoningFactory for Mine {
            fn parser(&self, _: bool, _: bool) -> Result<Box<dyn ReasoningParser>> {
                Err(branchline_core::Error::internal("mine"))
            }
        }
        static SHELF: Shelf<dyn ReasoningFactory> = Shelf {
            kind: "reasoning_parsers",
            noun: "reasoning parser",
            built_in: REASONING_PARSERS.built_in,
            own: REASONING_PARSERS.own,
            added: RwLock::new(BTreeMap::new()),
        };
        SHELF.add("qwen3", Arc::new(Mine));
        SHELF.add("acme", Arc::new(Mine));
        assert!(SHELF.get("qwen3").unwrap().parser(false, false).is_err());
        assert_eq!(SHELF.names(), ["acme", "deepseek_r1", "qwen3"]);
    }
}
