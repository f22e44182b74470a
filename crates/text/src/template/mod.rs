//! Chat templates: messages to prompt text, as the field's Jinja environment renders them.
//!
//! Templates come with models and are not trusted: they can read nothing but their input, and each render
//! has a budget of work and memory (fuel) that grows with the input. Rendering is CPU work of at most
//! milliseconds for real templates; never called under a lock.

mod json;
mod tags;
mod time;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use branchline_core::{Error, Result};
use minijinja::value::{Kwargs, Rest, Serde};
use minijinja::{AutoEscape, Environment, ErrorKind, Value, syntax::SyntaxConfig};
use serde_json::{Map, Value as Json};

/// The one template of an environment.
const NAME: &str = "chat_template";

/// Instructions, or 64-byte pieces of data, that any render may use; real templates use a few thousand.
const BASE_FUEL: u64 = 100_000;

/// Further fuel for each string, number, list or object in the input.
const FUEL_PER_ITEM: u64 = 100;

/// Further fuel for each byte of text in the input, in quarters: pays for 16 copies.
const FUEL_PER_4_BYTES: u64 = 1;

/// Templates that can nest values without end render on a stack of this size (mapped, not used, until needed):
/// dropping or printing a value takes stack for each level, and fuel bounds the levels.
const DEEP_STACK: usize = 256 << 20;

/// A template without namespaces can only nest values as deep as its own source says.
const SHALLOW_SOURCE: usize = 32 << 10;

/// Texts of the special tokens that templates name; `None` is undefined in the template.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// `bos_token`
    pub bos: Option<String>,
    /// `eos_token`
    pub eos: Option<String>,
    /// `pad_token`
    pub pad: Option<String>,
}

/// A compiled chat template; shared by all threads.
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    can_nest: bool,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("special", &self.special).finish_non_exhaustive()
    }
}

/// A message that the template itself raised.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Compiles a template; `strftime_now` answers with the system's time in UTC.
    ///
    /// # Errors
    /// `InvalidArgument` for `chat_template` with the line and what is wrong there.
    pub fn new(source: &str, special: SpecialTokens) -> Result<Self> {
        Self::with_clock(source, special, SystemTime::now)
    }

    /// As [`Self::new`] with another source of time.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_clock(
        source: &str,
        special: SpecialTokens,
        now: impl Fn() -> SystemTime + Send + Sync + 'static,
    ) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| Error::internal(format!("template syntax: {error}")))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_recursion_limit(100);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise);
        environment.add_function("strftime_now", move |format: &str| {
            time::format(format, now())
                .map_err(|reason| minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        });
        environment.add_template_owned(NAME, tags::plain(source)).map_err(|error| {
            Error::invalid("chat_template", format!("chat template can't be compiled: {error}"))
        })?;
        let can_nest = source.contains("namespace") || source.len() > SHALLOW_SOURCE;
        Ok(Self { environment, special, can_nest })
    }

    /// The prompt of a conversation. `extra` is visible by name and may replace the special tokens.
    ///
    /// # Errors
    /// `InvalidArgument` for `messages`: what the template raised, what it could not do with the messages, or
    /// that it used up its budget.
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
    ) -> Result<String> {
        let mut context: BTreeMap<Arc<str>, Value> = BTreeMap::new();
        let special = [
            ("bos_token", &self.special.bos),
            ("eos_token", &self.special.eos),
            ("pad_token", &self.special.pad),
        ];
        for (name, text) in special {
            if let Some(text) = text {
                context.insert(name.into(), text.as_str().into());
            }
        }
        for (name, value) in extra {
            context.insert(name.as_str().into(), Value::from(Serde(value)));
        }
        context.insert("messages".into(), Value::from(Serde(messages)));
        context
            .insert("tools".into(), tools.map_or_else(|| Value::from(()), |tools| Value::from(Serde(tools))));
        context.insert("add_generation_prompt".into(), add_generation_prompt.into());

        let inputs = extra.values().chain([messages]).chain(tools);
        let fuel = BASE_FUEL + inputs.map(fuel_for).sum::<u64>();
        if !self.can_nest {
            return self.run(context, fuel);
        }
        std::thread::scope(|scope| {
            let deep = std::thread::Builder::new().name("chat-template".to_owned()).stack_size(DEEP_STACK);
            let thread = deep.spawn_scoped(scope, || self.run(context, fuel));
            let thread = thread.map_err(|error| Error::internal(format!("chat template thread: {error}")))?;
            thread.join().map_err(|_| Error::internal("the chat template's renderer failed"))?
        })
    }

    fn run(&self, context: BTreeMap<Arc<str>, Value>, fuel: u64) -> Result<String> {
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let template = environment.get_template(NAME).map_err(|error| refusal(&error))?;
        template.render(Value::from_pairs(context)).map_err(|error| refusal(&error))
    }
}

/// What working through a value may cost.
fn fuel_for(value: &Json) -> u64 {
    let text = |text: &str| text.len() as u64 / 4 * FUEL_PER_4_BYTES;
    FUEL_PER_ITEM
        + match value {
            Json::String(string) => text(string),
            Json::Array(values) => values.iter().map(fuel_for).sum(),
            Json::Object(fields) => fields.iter().map(|(name, value)| text(name) + fuel_for(value)).sum(),
            Json::Null | Json::Bool(_) | Json::Number(_) => 0,
        }
}

fn refusal(error: &minijinja::Error) -> Error {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(at) = cause {
        if let Some(raised) = at.downcast_ref::<Raised>() {
            return Error::invalid("messages", format!("the chat template refuses the messages: {raised}"));
        }
        cause = at.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        let message = "the chat template needs too much work for these messages: send fewer or shorter ones";
        return Error::invalid("messages", message);
    }
    Error::invalid("messages", format!("the chat template can't render the messages: {error}"))
}

fn raise(message: &str) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message.to_owned())))
}

/// `tojson(ensure_ascii, indent, separators, sort_keys)`, as Python's `json.dumps`; nothing is HTML-escaped.
fn to_json(
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> std::result::Result<Value, minijinja::Error> {
    let wrong =
        |reason: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {reason}"));
    let option = |index: usize, name: &str| -> std::result::Result<Option<Value>, minijinja::Error> {
        let given = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => named.get::<Option<Value>>(name)?,
        };
        Ok(given.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let mut style = json::Style::default();
    style.ascii = option(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    if let Some(indent) = option(1, "indent")? {
        style
            .set_indent(indent.as_usize().ok_or_else(|| wrong("indent must be a number from 0".into()))?)
            .map_err(wrong)?;
    }
    if let Some(separators) = option(2, "separators")? {
        let pair: Vec<String> = separators.try_iter()?.map(|value| value.to_string()).collect();
        match <[String; 2]>::try_from(pair) {
            Ok([item, key]) => style.set_separators(item, key),
            Err(_) => return Err(wrong("separators must be two texts".into())),
        }
    }
    style.sort_keys = option(3, "sort_keys")?.is_some_and(|value| value.is_true());
    named.assert_all_used()?;
    let json = serde_json::to_value(value).map_err(|error| wrong(error.to_string()))?;
    Ok(Value::from(style.dump(&json)))
}

#[cfg(test)]
mod tests;
