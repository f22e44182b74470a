//! Messages, tools and template options, brought into the one form that chat templates expect.
//!
//! Text parts are joined with line breaks; a tool call's arguments become an object if they spell one.

use branchline_core::{Error, Result};
use serde_json::{Map, Value};

use crate::fields::{Fields, wrong};
use crate::openai::Tools;
use crate::refused::unimplemented;

/// What a chat template is rendered from.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatTemplateInput {
    /// An array of message objects with string content.
    pub messages: Value,
    /// An array of tool definitions.
    pub tools: Option<Value>,
    /// Open an answer of the assistant.
    pub add_generation_prompt: bool,
    /// Leave the last message open, to be continued.
    pub continue_final_message: bool,
    /// Further variables of the template.
    pub kwargs: Map<String, Value>,
}

/// Reads messages, tools and template options.
///
/// # Errors
/// `InvalidArgument` naming the path for wrong shapes and contradictions, `Unimplemented` for parts that are no
/// text.
pub fn read_template_input(fields: &Fields<'_>, tools: &Tools) -> Result<ChatTemplateInput> {
    let continue_final_message = fields.bool("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.bool("add_generation_prompt")?;
    if continue_final_message && add_generation_prompt == Some(true) {
        return Err(Error::invalid(
            "continue_final_message",
            "`continue_final_message` and `add_generation_prompt` are both true; set one of them",
        ));
    }
    Ok(ChatTemplateInput {
        messages: messages(fields)?,
        tools: tools.for_template(),
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
        kwargs: template_kwargs(fields)?,
    })
}

/// What a request gives the template besides its messages.
///
/// # Errors
/// `InvalidArgument` for a template of the client's own, or for what has a field of its own.
pub(crate) fn template_kwargs(fields: &Fields<'_>) -> Result<Map<String, Value>> {
    let Some(kwargs) = fields.object("chat_template_kwargs")? else { return Ok(Map::new()) };
    for name in ["chat_template", "messages", "tools"] {
        if kwargs.get(name).is_some() {
            let path = kwargs.path(name);
            let text =
                format!("`{path}` can't be given by a request: templates are the operator's; leave it out");
            return Err(Error::invalid(path, text));
        }
    }
    Ok(fields.map("chat_template_kwargs")?.cloned().unwrap_or_default())
}

impl ChatTemplateInput {
    /// The text of the last message, for a prompt that continues it.
    pub fn final_text(&self) -> Option<&str> {
        self.messages.as_array()?.last()?.get("content")?.as_str()
    }
}

fn messages(fields: &Fields<'_>) -> Result<Value> {
    let items = fields
        .array("messages")?
        .ok_or_else(|| Error::invalid("messages", "`messages` is missing; send an array of messages"))?;
    if items.is_empty() {
        return Err(Error::invalid("messages", "`messages` is empty; send at least one message"));
    }
    items
        .iter()
        .enumerate()
        .map(|(position, item)| message(item, &fields.path(&format!("messages[{position}]"))))
        .collect::<Result<Vec<_>>>()
        .map(Value::Array)
}

fn message(item: &Value, path: &str) -> Result<Value> {
    let fields = Fields::of(item, path)?;
    let role = fields.string("role")?.filter(|role| !role.is_empty()).ok_or_else(|| {
        let path = fields.path("role");
        Error::invalid(path.as_str(), format!("`{path}` is missing; name the speaker, for example \"user\""))
    })?;
    let calls = tool_calls(&fields)?;
    let content = match fields.get("content") {
        None if role == "assistant" && calls.is_some() => Value::String(String::new()),
        None => {
            let path = fields.path("content");
            return Err(Error::invalid(path.as_str(), format!("`{path}` is missing; send a string")));
        }
        Some(content) => Value::String(text(content, &fields.path("content"))?),
    };
    let Value::Object(mut out) = item.clone() else { return Err(wrong(path, "an object", item)) };
    out.insert("content".to_owned(), content);
    if let Some(calls) = calls {
        out.insert("tool_calls".to_owned(), calls);
    }
    Ok(Value::Object(out))
}

/// Text, or the text parts joined by line breaks.
pub(crate) fn text(content: &Value, path: &str) -> Result<String> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => return Err(wrong(path, "a string or an array of text parts", other)),
    };
    let mut out = String::new();
    for (position, part) in parts.iter().enumerate() {
        let part = Fields::of(part, format!("{path}[{position}]"))?;
        match part.string("type")? {
            Some("text" | "input_text" | "output_text") => {}
            Some(other) => {
                let path = part.path("type");
                return Err(unimplemented(
                    &path,
                    &format!("{other:?} parts are not served; send \"text\" parts"),
                ));
            }
            None => {
                let path = part.path("type");
                return Err(Error::invalid(path.as_str(), format!("`{path}` is missing; send \"text\"")));
            }
        }
        let path = part.path("text");
        let text = part
            .string("text")?
            .ok_or_else(|| Error::invalid(path.as_str(), format!("`{path}` is missing; send a string")))?;
        if position > 0 {
            out.push('\n');
        }
        out.push_str(text);
    }
    Ok(out)
}

/// Templates iterate over arguments, so a JSON string that spells an object becomes that object.
fn tool_calls(fields: &Fields<'_>) -> Result<Option<Value>> {
    let Some(calls) = fields.array("tool_calls")? else { return Ok(None) };
    let mut out = Vec::with_capacity(calls.len());
    for (position, call) in calls.iter().enumerate() {
        let path = format!("{}[{position}]", fields.path("tool_calls"));
        Fields::of(call, path.as_str())?.object("function")?;
        let mut call = call.clone();
        if let Some(arguments) = call.pointer_mut("/function/arguments")
            && let Some(object) = arguments.as_str().and_then(parse_object)
        {
            *arguments = object;
        }
        out.push(call);
    }
    Ok(Some(Value::Array(out)))
}

fn parse_object(text: &str) -> Option<Value> {
    serde_json::from_str::<Value>(text).ok().filter(Value::is_object)
}

#[cfg(test)]
mod tests {
    use super::*;
    use branchline_core::ErrorCode;
    use serde_json::json;

    fn read(value: Value) -> Result<ChatTemplateInput> {
        let fields = Fields::of(&value, "").unwrap();
        read_template_input(&fields, &Tools::read(&fields)?)
    }

    fn refused(messages: Value) -> (String, ErrorCode) {
        let error = read(json!({"messages": messages})).expect_err(&messages.to_string());
        (error.field.unwrap_or_default(), error.code)
    }

    #[test]
    fn a_template_is_not_the_clients_to_give() {
        let with = |kwargs: Value| {
            read(json!({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs}))
        };
        for name in ["chat_template", "messages", "tools"] {
            let error = with(json!({name: "{{ 1 }}"})).expect_err(name);
            assert_eq!(error.field, Some(format!("chat_template_kwargs.{name}")));
            assert_eq!(error.code, ErrorCode::InvalidArgument);
        }
        assert_eq!(with(json!({"add_generation_prompt": false})).unwrap().kwargs.len(), 1);
    }

    #[test]
    fn text_parts_are_joined_by_line_breaks() {
        let input = read(json!({"messages": [{"role": "user", "name": "ann", "content":
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}))
        .unwrap();
        assert_eq!(input.messages, json!([{"role": "user", "name": "ann", "content": "a\nb"}]));
        assert!(input.add_generation_prompt);
    }

    #[test]
    fn bad_messages_are_refused_with_their_path() {
        use ErrorCode::{InvalidArgument, Unimplemented};
        let image =
            json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]);
        assert_eq!(refused(image), ("messages[0].content[1].type".into(), Unimplemented));
        for (messages, field) in [
            (json!("hi"), "messages"),
            (json!([]), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": 3, "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
        ] {
            assert_eq!(refused(messages), (field.into(), InvalidArgument));
        }
    }

    #[test]
    fn tool_call_arguments_become_an_object() {
        let input = read(json!({"messages": [{"role": "assistant", "content": null, "tool_calls":
            [{"type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}]}))
        .unwrap();
        assert_eq!(input.messages[0]["tool_calls"][0]["function"]["arguments"], json!({"a": 1}));
        assert_eq!(input.messages[0]["content"], "");
    }

    #[test]
    fn tools_are_rendered_whatever_may_be_called() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        for choice in [json!(null), json!("auto"), json!("none"), json!("required")] {
            let messages = json!([{"role": "user", "content": "x"}]);
            let input = read(json!({"messages": messages, "tools": tools, "tool_choice": choice})).unwrap();
            assert_eq!(input.tools, Some(tools.clone()));
        }
    }

    #[test]
    fn continuing_the_last_message_excludes_a_new_one() {
        let messages = json!([{"role": "assistant", "content": "Sure"}]);
        let input = read(json!({"messages": messages, "continue_final_message": true})).unwrap();
        assert!(!input.add_generation_prompt);
        assert_eq!(input.final_text(), Some("Sure"));
        let both =
            json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
        assert!(read(both).is_err());
    }
}
