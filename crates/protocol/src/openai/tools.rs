//! Tools, which of them may or must be called, and what that demands of the output.

use branchline_core::{Error, Result};
use serde_json::{Value, json};

use crate::Constraint;
use crate::fields::{Fields, show, wrong};
use crate::refused::unimplemented;

/// Which tools may or must be called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// None; what looks like a call is text.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// The tools of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Tools {
    /// Definitions in OpenAI's chat form, as templates expect them.
    pub list: Vec<Value>,
    /// Which may or must be called.
    pub choice: ToolChoice,
    /// One call at most.
    pub single: bool,
    /// The client's name of the choice, for refusals.
    pub field: &'static str,
}

impl Tools {
    /// Reads OpenAI's chat form.
    ///
    /// # Errors
    /// `InvalidArgument` naming the path for wrong shapes, a choice without tools or of an unknown tool.
    pub fn read(fields: &Fields<'_>) -> Result<Self> {
        let items = fields.array("tools")?.unwrap_or_default();
        for (position, item) in items.iter().enumerate() {
            let tool = Fields::of(item, format!("{}[{position}]", fields.path("tools")))?;
            let function = tool.object("function")?.ok_or_else(|| {
                let path = tool.path("function");
                Error::invalid(path.as_str(), format!("`{path}` is missing; describe a function"))
            })?;
            check(&function, "parameters")?;
        }
        let choice = match fields.get("tool_choice") {
            None => ToolChoice::Auto,
            Some(Value::String(word)) => word_choice(word, &fields.path("tool_choice"))?,
            Some(object @ Value::Object(_)) => {
                let name = object.pointer("/function/name").and_then(Value::as_str);
                named(name, &fields.path("tool_choice.function.name"))?
            }
            Some(other) => return Err(wrong(&fields.path("tool_choice"), "a string or an object", other)),
        };
        let single = !fields.bool("parallel_tool_calls")?.unwrap_or(true);
        Self { list: items.to_vec(), choice, single, field: "tool_choice" }.checked()
    }

    /// Reads the Responses API's flat form.
    ///
    /// # Errors
    /// As [`Tools::read`]; `Unimplemented` for tools that are no functions.
    pub fn read_flat(fields: &Fields<'_>) -> Result<Self> {
        let items = fields.array("tools")?.unwrap_or_default();
        let mut list = Vec::with_capacity(items.len());
        for (position, item) in items.iter().enumerate() {
            let tool = Fields::of(item, format!("{}[{position}]", fields.path("tools")))?;
            match tool.string("type")? {
                Some("function") => {}
                other => {
                    let shown = other.unwrap_or("no type");
                    return Err(unimplemented(
                        &tool.path("type"),
                        &format!("{shown:?} tools are not served; send \"function\" tools"),
                    ));
                }
            }
            check(&tool, "parameters")?;
            list.push(chat_form(&tool, "parameters"));
        }
        let choice = match fields.get("tool_choice") {
            None => ToolChoice::Auto,
            Some(Value::String(word)) => word_choice(word, &fields.path("tool_choice"))?,
            Some(object @ Value::Object(_)) => {
                let name = object.get("name").and_then(Value::as_str);
                named(name, &fields.path("tool_choice.name"))?
            }
            Some(other) => return Err(wrong(&fields.path("tool_choice"), "a string or an object", other)),
        };
        let single = !fields.bool("parallel_tool_calls")?.unwrap_or(true);
        Self { list, choice, single, field: "tool_choice" }.checked()
    }

    /// Reads Anthropic's form.
    ///
    /// # Errors
    /// As [`Tools::read_flat`].
    pub fn read_anthropic(fields: &Fields<'_>) -> Result<Self> {
        let items = fields.array("tools")?.unwrap_or_default();
        let mut list = Vec::with_capacity(items.len());
        for (position, item) in items.iter().enumerate() {
            let tool = Fields::of(item, format!("{}[{position}]", fields.path("tools")))?;
            if let Some(kind) = tool.string("type")?.filter(|kind| *kind != "custom") {
                let remedy = format!("{kind:?} tools are not served; send tools with an `input_schema`");
                return Err(unimplemented(&tool.path("type"), &remedy));
            }
            check(&tool, "input_schema")?;
            list.push(chat_form(&tool, "input_schema"));
        }
        let (mut choice, mut single) = (ToolChoice::Auto, false);
        if let Some(asked) = fields.object("tool_choice")? {
            single = asked.bool("disable_parallel_tool_use")?.unwrap_or(false);
            choice = match asked.string("type")? {
                Some("auto") => ToolChoice::Auto,
                Some("none") => ToolChoice::None,
                Some("any") => ToolChoice::Required,
                Some("tool") => named(asked.string("name")?, &asked.path("name"))?,
                other => {
                    let path = asked.path("type");
                    let shown = other.map_or(Value::Null, Value::from);
                    return Err(wrong(&path, "\"auto\", \"any\", \"tool\" or \"none\"", &shown));
                }
            };
        }
        Self { list, choice, single, field: "tool_choice" }.checked()
    }

    fn checked(self) -> Result<Self> {
        match &self.choice {
            ToolChoice::Required | ToolChoice::Named(_) if self.list.is_empty() => {
                let message = format!("`{}` forces a call and `tools` is empty; send tools", self.field);
                Err(Error::invalid(self.field, message))
            }
            ToolChoice::Named(name) if !self.names().any(|known| known == name) => {
                let known = self.names().collect::<Vec<_>>().join(", ");
                let message =
                    format!("`{}` names {name:?}, which is not among the tools: {known}", self.field);
                Err(Error::invalid(self.field, message))
            }
            _ => Ok(self),
        }
    }

    /// Names of the tools.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.list.iter().filter_map(|tool| tool.pointer("/function/name")?.as_str())
    }

    /// What a template gets.
    pub fn for_template(&self) -> Option<Value> {
        (!self.list.is_empty()).then(|| Value::Array(self.list.clone()))
    }

    /// What a forced call demands of the output: an array of calls, or the one tool's arguments.
    pub fn constraint(&self) -> Option<Constraint> {
        let schema = match &self.choice {
            ToolChoice::Auto | ToolChoice::None => return None,
            ToolChoice::Named(name) => {
                let tool =
                    self.list.iter().find(|tool| tool.pointer("/function/name") == Some(&json!(name)))?;
                parameters(tool)
            }
            ToolChoice::Required => {
                let calls: Vec<Value> = self
                    .list
                    .iter()
                    .map(|tool| {
                        json!({
                            "type": "object",
                            "properties": {
                                "name": {"const": tool.pointer("/function/name")},
                                "parameters": parameters(tool),
                            },
                            "required": ["name", "parameters"],
                            "additionalProperties": false,
                        })
                    })
                    .collect();
                let mut schema = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}});
                if self.single {
                    schema["maxItems"] = 1.into();
                }
                schema
            }
        };
        Some(Constraint::schema(&schema, self.field))
    }
}

/// The schema of a tool's arguments. One without properties takes an empty object, whose end is always near.
fn parameters(tool: &Value) -> Value {
    let schema = tool.pointer("/function/parameters").and_then(Value::as_object);
    let free = |key: &str| {
        schema.is_some_and(|schema| {
            schema.get(key).is_some_and(|value| value.as_object().is_none_or(|map| !map.is_empty()))
        })
    };
    let open = [
        "properties",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "patternProperties",
        "additionalProperties",
        "enum",
        "const",
    ];
    match schema {
        Some(schema)
            if open.iter().any(|key| *key != "additionalProperties" && free(key))
                || schema.get("additionalProperties").is_some_and(Value::is_object) =>
        {
            Value::Object(schema.clone())
        }
        _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

fn check(function: &Fields<'_>, schema: &str) -> Result<()> {
    if function.string("name")?.is_none_or(str::is_empty) {
        let path = function.path("name");
        return Err(Error::invalid(path.as_str(), format!("`{path}` is missing; name the function")));
    }
    function.object(schema).map(drop)
}

fn chat_form(tool: &Fields<'_>, schema: &str) -> Value {
    let mut function = serde_json::Map::new();
    for (name, from) in
        [("name", "name"), ("description", "description"), ("parameters", schema), ("strict", "strict")]
    {
        if let Some(value) = tool.get(from) {
            function.insert(name.to_owned(), value.clone());
        }
    }
    json!({"type": "function", "function": function})
}

fn word_choice(word: &str, path: &str) -> Result<ToolChoice> {
    match word {
        "auto" => Ok(ToolChoice::Auto),
        "none" => Ok(ToolChoice::None),
        "required" => Ok(ToolChoice::Required),
        other => {
            let shown = show(&other.into());
            Err(Error::invalid(
                path,
                format!("`{path}` is {shown}; use \"auto\", \"none\", \"required\" or an object"),
            ))
        }
    }
}

fn named(name: Option<&str>, path: &str) -> Result<ToolChoice> {
    match name {
        Some(name) if !name.is_empty() => Ok(ToolChoice::Named(name.to_owned())),
        _ => Err(Error::invalid(path, format!("`{path}` is missing; name the function that must be called"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Tools> {
        Tools::read(&Fields::of(&value, "").unwrap())
    }

    fn tools() -> Value {
        json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}},
            {"type": "function", "function": {"name": "g"}}])
    }

    #[test]
    fn choices_are_read_in_every_family() {
        let choice = |value: Value| read(json!({"tools": tools(), "tool_choice": value})).unwrap().choice;
        assert_eq!(choice(json!(null)), ToolChoice::Auto);
        assert_eq!(choice(json!("required")), ToolChoice::Required);
        let named = json!({"type": "function", "function": {"name": "g"}});
        assert_eq!(choice(named), ToolChoice::Named("g".into()));
        let flat = json!({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "f"}});
        let flat = Tools::read_flat(&Fields::of(&flat, "").unwrap()).unwrap();
        assert_eq!(
            (flat.choice.clone(), flat.names().collect::<Vec<_>>()),
            (ToolChoice::Named("f".into()), vec!["f"])
        );
        let theirs = json!({"tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
        let theirs = Tools::read_anthropic(&Fields::of(&theirs, "").unwrap()).unwrap();
        assert_eq!((theirs.choice, theirs.single), (ToolChoice::Required, true));
    }

    #[test]
    fn wrong_choices_and_tools_are_refused_by_name() {
        for (value, field) in [
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tools": tools(), "tool_choice": "always"}), "tool_choice"),
            (
                json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "h"}}}),
                "tool_choice",
            ),
            (json!({"tools": tools(), "tool_choice": {}}), "tool_choice.function.name"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
            (json!({"tools": [{"function": {"name": ""}}]}), "tools[0].function.name"),
            (
                json!({"tools": [{"function": {"name": "f", "parameters": 3}}]}),
                "tools[0].function.parameters",
            ),
        ] {
            assert_eq!(read(value.clone()).unwrap_err().field.as_deref(), Some(field), "{value}");
        }
        let search = json!({"tools": [{"type": "web_search"}]});
        let error = Tools::read_flat(&Fields::of(&search, "").unwrap()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("tools[0].type"));
    }

    #[test]
    fn a_forced_call_is_a_schema_of_calls_or_of_arguments() {
        let forced = |choice: Value, single: bool| {
            let value = json!({"tools": tools(), "tool_choice": choice, "parallel_tool_calls": !single});
            read(value).unwrap().constraint().map(|one| match one.form {
                crate::Form::JsonSchema(text) => serde_json::from_str::<Value>(&text).unwrap(),
                other => panic!("{other:?}"),
            })
        };
        assert_eq!(forced(json!("auto"), false), None);
        let required = forced(json!("required"), false).unwrap();
        assert_eq!(required["items"]["anyOf"][0]["properties"]["name"]["const"], "f");
        assert_eq!(required["maxItems"], Value::Null);
        assert_eq!(forced(json!("required"), true).unwrap()["maxItems"], 1);
        let g = forced(json!({"function": {"name": "g"}}), false).unwrap();
        assert_eq!(g, json!({"type": "object", "properties": {}, "additionalProperties": false}));
    }

    #[test]
    fn a_tool_without_properties_takes_an_empty_object() {
        for schema in [
            json!(null),
            json!({}),
            json!({"type": "object", "properties": {}}),
            json!({"type": "object", "properties": {}, "additionalProperties": false}),
        ] {
            let tool = json!({"function": {"name": "f", "parameters": schema}});
            assert_eq!(parameters(&tool)["additionalProperties"], false, "{schema}");
        }
        let open =
            json!({"function": {"name": "f", "parameters": {"additionalProperties": {"type": "string"}}}});
        assert_ne!(parameters(&open)["additionalProperties"], false);
    }
}
