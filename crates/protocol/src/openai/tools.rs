//! Tools, which of them may or must be called, and what that demands of the output.

use branchline_core::{Error, Result};
use serde_json::{Map, Value, json};

use super::arguments;
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
    /// Where the schema of the arguments stands within a tool, for refusals.
    pub schema: &'static str,
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
        Self { list: items.to_vec(), choice, single, field: "tool_choice", schema: "function.parameters" }
            .checked()
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
        Self { list, choice, single, field: "tool_choice", schema: "parameters" }.checked()
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
        Self { list, choice, single, field: "tool_choice", schema: "input_schema" }.checked()
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
    ///
    /// # Errors
    /// `Unimplemented` naming a tool's schema that cannot stand among others.
    pub fn constraint(&self) -> Result<Option<Constraint>> {
        let schema = match &self.choice {
            ToolChoice::Auto | ToolChoice::None => return Ok(None),
            ToolChoice::Named(name) => match self.names().position(|known| known == name) {
                Some(at) => self.arguments(at, "")?,
                None => return Ok(None),
            },
            ToolChoice::Required => self.calls()?,
        };
        Ok(Some(Constraint::schema(&schema, self.field)))
    }

    /// The schema of the arguments of a tool, for a place of the whole schema.
    fn arguments(&self, at: usize, place: &str) -> Result<Value> {
        arguments::embedded(parameters(&self.list[at]), place, &format!("tools[{at}].{}", self.schema))
    }

    fn calls(&self) -> Result<Value> {
        let mut calls = Vec::with_capacity(self.list.len());
        for (at, tool) in self.list.iter().enumerate() {
            let place = format!("/items/anyOf/{at}/properties/parameters");
            calls.push(json!({
                "type": "object",
                "properties": {
                    "name": {"const": tool.pointer("/function/name")},
                    "parameters": self.arguments(at, &place)?,
                },
                "required": ["name", "parameters"],
                "additionalProperties": false,
            }));
        }
        let mut schema = json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}});
        if self.single {
            schema["maxItems"] = 1.into();
        }
        // A dialect is of a whole document: it is kept where all tools have the same.
        let mut dialects = self.list.iter().map(|tool| parameters(tool).and_then(arguments::dialect));
        if let Some(Some(first)) = dialects.next()
            && dialects.all(|other| other == Some(first))
        {
            schema["$schema"] = first.into();
        }
        Ok(schema)
    }
}

fn parameters(tool: &Value) -> Option<&Map<String, Value>> {
    tool.pointer("/function/parameters")?.as_object()
}

fn check(function: &Fields<'_>, schema: &str) -> Result<()> {
    if function.string("name")?.is_none_or(str::is_empty) {
        let path = function.path("name");
        return Err(Error::invalid(path.as_str(), format!("`{path}` is missing; name the function")));
    }
    match function.map(schema)? {
        Some(map) => arguments::check(map, &function.path(schema)),
        None => Ok(()),
    }
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
            read(value).unwrap().constraint().unwrap().map(|one| match one.form {
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
    fn a_forced_call_keeps_what_each_tool_asks_and_where_it_refers_to() {
        let nested = json!({"properties": {"a": {"$ref": "#/$defs/Inner"}}, "$defs": {"Inner": {"type": "string"}},
            "required": ["a"], "$schema": "https://json-schema.org/draft/2020-12/schema"});
        let forced = |tools: &Tools| match tools.constraint().unwrap().unwrap().form {
            crate::Form::JsonSchema(text) => serde_json::from_str::<Value>(&text).unwrap(),
            other => panic!("{other:?}"),
        };
        let chat = json!({"tools": [{"function": {"name": "f", "parameters": nested}}, {"function": {"name": "g", "parameters": nested}}],
            "tool_choice": "required"});
        let flat = json!({"tools": [{"type": "function", "name": "f", "parameters": nested}, {"type": "function", "name": "g", "parameters": nested}],
            "tool_choice": "required"});
        let theirs = json!({"tools": [{"name": "f", "input_schema": nested}, {"name": "g", "input_schema": nested}],
            "tool_choice": {"type": "any"}});
        for tools in [
            read(chat),
            Tools::read_flat(&Fields::of(&flat, "").unwrap()),
            Tools::read_anthropic(&Fields::of(&theirs, "").unwrap()),
        ] {
            let schema = forced(&tools.unwrap());
            let parameters = &schema["items"]["anyOf"][1]["properties"]["parameters"];
            let place = "/items/anyOf/1/properties/parameters/$defs/Inner";
            assert_eq!(parameters["properties"]["a"]["$ref"], format!("#{place}"));
            assert_eq!(schema.pointer(place), Some(&json!({"type": "string"})));
            assert_eq!((&parameters["type"], &parameters["required"]), (&json!("object"), &json!(["a"])));
            assert_eq!(schema["$schema"], nested["$schema"]);
        }
    }

    #[test]
    fn arguments_that_are_no_object_are_refused_in_every_family() {
        let bad = json!({"type": "string"});
        let chat = json!({"tools": [{"function": {"name": "f", "parameters": bad}}]});
        assert_eq!(read(chat).unwrap_err().field.as_deref(), Some("tools[0].function.parameters.type"));
        let flat = json!({"tools": [{"type": "function", "name": "f", "parameters": bad}]});
        let error = Tools::read_flat(&Fields::of(&flat, "").unwrap()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("tools[0].parameters.type"));
        let theirs = json!({"tools": [{"name": "f", "input_schema": bad}]});
        let error = Tools::read_anthropic(&Fields::of(&theirs, "").unwrap()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("tools[0].input_schema.type"));
        let named = json!({"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"$anchor": "x"}}}}}],
            "tool_choice": "required"});
        let error = read(named).unwrap().constraint().unwrap_err();
        assert_eq!(error.field.as_deref(), Some("tools[0].function.parameters"));
    }
}
