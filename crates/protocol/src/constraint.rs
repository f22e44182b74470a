//! What the output must look like, in every spelling clients use. Whether it can be met is the engine's to say.

use branchline_core::{Error, Result};
use serde::Serialize;
use serde_json::{Value, json};

use crate::fields::{Fields, wrong};
use crate::refused::unimplemented;

/// One form of constraint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// JSON text of a schema.
    JsonSchema(String),
    /// A regular expression.
    Regex(String),
    /// An EBNF grammar.
    Ebnf(String),
    /// JSON text of a structural tag.
    StructuralTag(String),
    /// One of these strings.
    Choice(Vec<String>),
}

/// A constraint and the field that asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    /// What it is.
    pub form: Form,
    /// The client's own path, for refusals.
    pub field: String,
}

/// How a constraint is to be met.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Terms {
    /// What no backend enforces exactly is checked afterwards instead of being refused.
    pub best_effort: bool,
    /// The answer tells how it was enforced.
    pub report: bool,
    /// Most tokens of reasoning before the constrained text.
    pub budget: Option<u32>,
    /// The same as a wish: kept where a constrained text follows reasoning, and no fault elsewhere.
    pub allowance: Option<u32>,
    /// The output begins with reasoning, whatever the prompt's end says.
    pub reasons: bool,
    /// The marks of that reasoning, as the model has it.
    pub marks: Option<ReasoningMarks>,
}

/// How a constraint was met, as answers tell it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GrammarInfo {
    /// The backend that enforced it.
    pub backend: String,
    /// Why this one.
    pub reason: String,
    /// What the request waited for it; 0 if it was known.
    pub compile_ms: f64,
    /// 99th percentile of the time of one mask.
    pub mask_p99_ms: f64,
    /// Share of the constrained tokens that the constraint left no choice about.
    pub forced_share: f64,
    /// Whether the text is a whole one of the constraint.
    pub complete: bool,
    /// Whether every token was held to the constraint.
    pub enforced: bool,
    /// For best effort: whether the finished text keeps the constraint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid: Option<bool>,
}

/// What stands around reasoning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningMarks {
    /// Opens it.
    pub begin: String,
    /// Closes it.
    pub end: String,
    /// The output begins inside it unless the prompt has closed it.
    pub implicit: bool,
}

impl Terms {
    /// Reads them from the object that holds the constraint.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field for a wrong type or value.
    pub fn read(fields: &Fields<'_>) -> Result<Self> {
        let best_effort = match fields.string("enforcement")? {
            None | Some("strict") => false,
            Some("best_effort") => true,
            Some(other) => {
                let path = fields.path("enforcement");
                return Err(wrong(&path, "\"strict\" or \"best_effort\"", &other.into()));
            }
        };
        Ok(Self {
            best_effort,
            report: fields.bool("return_grammar_info")?.unwrap_or(false),
            budget: fields.unsigned("thinking_budget", 0..=u32::MAX)?,
            allowance: None,
            reasons: fields.bool("require_reasoning")?.unwrap_or(false),
            marks: None,
        })
    }

    /// Refuses what means nothing without a constraint, or without reasoning.
    ///
    /// # Errors
    /// `InvalidArgument` naming the field.
    pub fn check(&self, constrained: bool) -> Result<()> {
        for (asked, name) in [(self.budget.is_some(), "thinking_budget"), (self.reasons, "require_reasoning")]
        {
            if asked && !constrained {
                let text = format!("`{name}` is given without a constraint on the output; leave it out");
                return Err(Error::invalid(name, text));
            }
            if asked && self.marks.is_none() {
                let text = format!(
                    "`{name}` is given and no reasoning is told apart for this model; leave it out, or start the \
                     router with a --reasoning-parser"
                );
                return Err(Error::invalid(name, text));
            }
        }
        Ok(())
    }
}

type Read = fn(&Value, &str) -> Result<Form>;

/// Names at the top level of a request, or in `sampling_params`: SGLang's first, then vLLM's.
const FLAT: [(&str, Read); 8] = [
    ("json_schema", schema),
    ("regex", regex),
    ("ebnf", ebnf),
    ("structural_tag", structural_tag),
    ("guided_json", schema),
    ("guided_regex", regex),
    ("guided_grammar", ebnf),
    ("guided_choice", choice),
];

/// Names in vLLM's `structured_outputs`.
const NESTED: [(&str, Read); 5] = [
    ("json", schema),
    ("regex", regex),
    ("grammar", ebnf),
    ("structural_tag", structural_tag),
    ("choice", choice),
];

impl Constraint {
    /// A JSON schema that `field` asks for.
    pub fn schema(schema: &Value, field: impl Into<String>) -> Self {
        Self { form: Form::JsonSchema(schema.to_string()), field: field.into() }
    }

    /// The one constraint of a request, if any.
    ///
    /// # Errors
    /// `InvalidArgument` for wrong types and for two constraints, `Unimplemented` for an unknown response format.
    pub fn read(fields: &Fields<'_>) -> Result<Option<Self>> {
        let mut found: Option<Self> = None;
        let mut put = |one: Self| match &found {
            None => {
                found = Some(one);
                Ok(())
            }
            Some(first) => {
                let message = format!(
                    "`{}` and `{}` both constrain the output; send one of them",
                    first.field, one.field
                );
                Err(Error::invalid(one.field.as_str(), message))
            }
        };
        each(fields, &FLAT, &mut put)?;
        if let Some(nested) = fields.object("structured_outputs")? {
            each(&nested, &NESTED, &mut put)?;
            if nested.bool("json_object")?.unwrap_or(false) {
                put(Self::schema(&json!({"type": "object"}), nested.path("json_object")))?;
            }
        }
        if let Some(format) = fields.object("response_format")?
            && let Some(one) = response_format(&format)?
        {
            put(Self { form: one, field: fields.path("response_format") })?;
        }
        Ok(found)
    }
}

fn each(
    fields: &Fields<'_>,
    names: &[(&str, Read)],
    put: &mut impl FnMut(Constraint) -> Result<()>,
) -> Result<()> {
    for (name, read) in names {
        if let Some(value) = fields.get(name) {
            let field = fields.path(name);
            put(Constraint { form: read(value, &field)?, field })?;
        }
    }
    Ok(())
}

/// `response_format` of OpenAI's chat API, or `text.format` of its Responses API, where the schema stands flat.
pub(crate) fn response_format(format: &Fields<'_>) -> Result<Option<Form>> {
    let path = format.path("type");
    match format.string("type")? {
        Some("text") => Ok(None),
        None if format.names().next().is_none() => Ok(None),
        None => {
            let place = path.trim_end_matches(".type");
            let message = format!("`{place}` has no `type`; leave it out or send {{\"type\": \"text\"}}");
            Err(Error::invalid(place, message))
        }
        Some("json_object") => Ok(Some(Form::JsonSchema(json!({"type": "object"}).to_string()))),
        Some("json_schema") => {
            let nested = format.object("json_schema")?;
            let holder = nested.as_ref().unwrap_or(format);
            let path = holder.path("schema");
            let value = holder.get("schema").ok_or_else(|| {
                Error::invalid(path.as_str(), format!("`{path}` is missing; send a JSON schema"))
            })?;
            schema(value, &path).map(Some)
        }
        Some("structural_tag") => {
            let whole = format.names().filter_map(|name| Some((name.to_owned(), format.get(name)?.clone())));
            Ok(Some(Form::StructuralTag(Value::Object(whole.collect()).to_string())))
        }
        Some(other) => Err(unimplemented(
            path.trim_end_matches(".type"),
            &format!("{other:?} was asked for; use \"text\", \"json_object\" or \"json_schema\""),
        )),
    }
}

/// An object, a boolean, or JSON text of one.
fn schema(value: &Value, path: &str) -> Result<Form> {
    match value {
        Value::Object(_) | Value::Bool(_) => Ok(Form::JsonSchema(value.to_string())),
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(Value::Object(_) | Value::Bool(_)) => Ok(Form::JsonSchema(text.clone())),
            _ => Err(Error::invalid(path, format!("`{path}` is no JSON text of a schema; send an object"))),
        },
        other => Err(wrong(path, "a JSON schema", other)),
    }
}

fn text(value: &Value, path: &str) -> Result<String> {
    value.as_str().map(str::to_owned).ok_or_else(|| wrong(path, "a string", value))
}

fn regex(value: &Value, path: &str) -> Result<Form> {
    text(value, path).map(Form::Regex)
}

fn ebnf(value: &Value, path: &str) -> Result<Form> {
    text(value, path).map(Form::Ebnf)
}

fn structural_tag(value: &Value, path: &str) -> Result<Form> {
    match value {
        Value::Object(_) => Ok(Form::StructuralTag(value.to_string())),
        Value::String(text) if serde_json::from_str::<Value>(text).is_ok_and(|tag| tag.is_object()) => {
            Ok(Form::StructuralTag(text.clone()))
        }
        other => Err(wrong(path, "a structural tag as an object or its JSON text", other)),
    }
}

fn choice(value: &Value, path: &str) -> Result<Form> {
    let items = value.as_array().ok_or_else(|| wrong(path, "an array of strings", value))?;
    let strings = items.iter().enumerate().map(|(at, item)| text(item, &format!("{path}[{at}]")));
    strings.collect::<Result<Vec<_>>>().map(Form::Choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: &Value) -> Result<Option<Constraint>> {
        Constraint::read(&Fields::of(value, "").unwrap())
    }

    #[test]
    fn every_spelling_is_read() {
        let object = r#"{"type":"object"}"#.to_owned();
        for (value, form, field) in [
            (json!({"json_schema": {"type": "object"}}), Form::JsonSchema(object.clone()), "json_schema"),
            (json!({"json_schema": object}), Form::JsonSchema(object.clone()), "json_schema"),
            (json!({"regex": "a+"}), Form::Regex("a+".into()), "regex"),
            (json!({"ebnf": "root ::= \"a\""}), Form::Ebnf("root ::= \"a\"".into()), "ebnf"),
            (json!({"structural_tag": {"a": 1}}), Form::StructuralTag("{\"a\":1}".into()), "structural_tag"),
            (
                json!({"guided_choice": ["a", "b"]}),
                Form::Choice(vec!["a".into(), "b".into()]),
                "guided_choice",
            ),
            (
                json!({"structured_outputs": {"regex": "a"}}),
                Form::Regex("a".into()),
                "structured_outputs.regex",
            ),
            (
                json!({"response_format": {"type": "json_object"}}),
                Form::JsonSchema(object.clone()),
                "response_format",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}),
                Form::JsonSchema(object.clone()),
                "response_format",
            ),
        ] {
            assert_eq!(read(&value).unwrap(), Some(Constraint { form, field: field.into() }), "{value}");
        }
    }

    #[test]
    fn an_empty_constraint_is_one_too_and_null_is_none() {
        assert_eq!(read(&json!({"regex": ""})).unwrap().unwrap().form, Form::Regex(String::new()));
        assert_eq!(read(&json!({"ebnf": ""})).unwrap().unwrap().form, Form::Ebnf(String::new()));
        assert_eq!(read(&json!({"guided_choice": []})).unwrap().unwrap().form, Form::Choice(Vec::new()));
        for name in ["json_schema", "structural_tag", "guided_json"] {
            assert_eq!(read(&json!({name: ""})).unwrap_err().field.as_deref(), Some(name));
        }
        assert_eq!(read(&json!({"regex": null, "json_schema": null})).unwrap(), None);
    }

    #[test]
    fn terms_are_read_and_refused_by_name() {
        let read = |value: Value| Terms::read(&Fields::of(&value, "").unwrap());
        assert_eq!(read(json!({"enforcement": "strict"})).unwrap(), Terms::default());
        let terms = read(json!({"enforcement": "best_effort", "return_grammar_info": true})).unwrap();
        assert!(terms.best_effort && terms.report && terms.check(false).is_ok());
        assert_eq!(read(json!({"enforcement": "some"})).unwrap_err().field.as_deref(), Some("enforcement"));
        let mut budget = read(json!({"thinking_budget": 9})).unwrap();
        assert_eq!(budget.check(true).unwrap_err().field.as_deref(), Some("thinking_budget"));
        budget.marks = Some(ReasoningMarks { begin: "<t>".into(), end: "</t>".into(), implicit: false });
        assert!(budget.check(true).is_ok());
        assert_eq!(budget.check(false).unwrap_err().field.as_deref(), Some("thinking_budget"));
    }

    #[test]
    fn what_asks_for_nothing_is_none() {
        for value in [
            json!({}),
            json!({"response_format": {"type": "text"}}),
            json!({"response_format": {}}),
            json!({"regex": null, "structured_outputs": {}, "guided_choice": null}),
        ] {
            assert_eq!(read(&value).unwrap(), None, "{value}");
        }
    }

    #[test]
    fn wrong_and_double_constraints_are_refused_by_name() {
        for (value, field) in [
            (json!({"regex": 1}), "regex"),
            (json!({"json_schema": "{"}), "json_schema"),
            (json!({"json_schema": 3}), "json_schema"),
            (json!({"regex": "a", "ebnf": "b"}), "ebnf"),
            (json!({"guided_choice": ["a", 1]}), "guided_choice[1]"),
            (json!({"response_format": {"a": 1}}), "response_format"),
            (json!({"response_format": {"type": "xml"}}), "response_format"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {}}}),
                "response_format.json_schema.schema",
            ),
        ] {
            assert_eq!(read(&value).unwrap_err().field.as_deref(), Some(field), "{value}");
        }
    }
}
