//! The schema of a tool's arguments: always of an object, and whole wherever it is put into another schema.
//!
//! Nothing a client asks of the arguments is dropped here; what cannot be enforced is the engine's to refuse.

use branchline_core::{Error, Result};
use serde_json::{Map, Value, json};

use crate::fields::wrong;
use crate::refused::unimplemented;

/// Keywords that say nothing of which values fit.
const NOTES: [&str; 10] = [
    "type", // checked to allow objects
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "$comment",
    "$id",
    "$defs",
    "definitions",
];

const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// Refuses a schema that no object fits, as far as its own keywords show that; `path` is the schema's.
///
/// # Errors
/// `InvalidArgument` naming the keyword.
pub(super) fn check(schema: &Map<String, Value>, path: &str) -> Result<()> {
    let allows = match schema.get("type") {
        None | Some(Value::Null) => true,
        Some(Value::String(name)) => name == "object",
        Some(Value::Array(names)) => {
            names.iter().any(|name| name == "object")
                && names.iter().all(|name| name.as_str().is_some_and(|name| TYPES.contains(&name)))
        }
        Some(_) => false,
    };
    let refuse = |keyword: &str, expected: &str| {
        Err(wrong(&format!("{path}.{keyword}"), expected, schema.get(keyword).unwrap_or(&Value::Null)))
    };
    if !allows {
        return refuse("type", "\"object\", as the arguments of a call are an object");
    }
    if schema.get("const").is_some_and(|value| !value.is_object()) {
        return refuse("const", "an object, as the arguments of a call are one");
    }
    if let Some(Value::Array(values)) = schema.get("enum")
        && !values.iter().any(Value::is_object)
    {
        return refuse("enum", "a list with an object, as the arguments of a call are one");
    }
    Ok(())
}

/// The schema of the arguments for the JSON pointer `place` of another schema (empty for none around it): its
/// references are moved along and it takes only objects. Without one, or with one that asks for nothing, it is the
/// empty object, whose end is always near.
///
/// # Errors
/// `Unimplemented` naming `path` for names within the schema that would mean something else there.
pub(super) fn embedded(schema: Option<&Map<String, Value>>, place: &str, path: &str) -> Result<Value> {
    let Some(schema) = schema.filter(|schema| asks(schema)) else {
        return Ok(json!({"type": "object", "properties": {}, "additionalProperties": false}));
    };
    let mut schema = schema.clone();
    // Older drafts pass over whatever stands beside a reference.
    let apart = schema.contains_key("$ref") && dialect(&schema).is_some_and(is_old);
    let place = if apart { format!("{place}/allOf/0") } else { place.to_owned() };
    if !place.is_empty() {
        schema.shift_remove("$id");
        move_references(&mut schema, &place, path)?;
    }
    if !apart {
        schema.insert("type".to_owned(), "object".into());
        return Ok(Value::Object(schema));
    }
    let mut whole = json!({"type": "object"});
    if let Some(name) = schema.get("$schema") {
        whole["$schema"] = name.clone();
    }
    whole["allOf"] = json!([schema]);
    Ok(whole)
}

/// The `$schema` of a schema.
pub(super) fn dialect(schema: &Map<String, Value>) -> Option<&str> {
    schema.get("$schema")?.as_str()
}

fn is_old(dialect: &str) -> bool {
    ["draft-03", "draft-04", "draft-06", "draft-07"].iter().any(|name| dialect.contains(name))
}

fn asks(schema: &Map<String, Value>) -> bool {
    schema.iter().any(|(keyword, value)| match (keyword.as_str(), value) {
        (note, _) if NOTES.contains(&note) => false,
        ("properties", Value::Object(map)) => !map.is_empty(),
        ("required", Value::Array(names)) => !names.is_empty(),
        ("additionalProperties", Value::Bool(open)) => *open,
        _ => true,
    })
}

fn move_references(schema: &mut Map<String, Value>, place: &str, path: &str) -> Result<()> {
    for (keyword, value) in schema {
        match (keyword.as_str(), value) {
            ("$ref", Value::String(reference)) => match reference.strip_prefix('#') {
                Some(rest) if rest.is_empty() || rest.starts_with('/') => {
                    *reference = format!("#{place}{rest}");
                }
                None if reference.is_empty() => *reference = format!("#{place}"),
                Some(_) => return Err(named(path, "$ref", reference)),
                None => {}
            },
            (name @ ("$id" | "$anchor" | "$dynamicAnchor" | "$dynamicRef" | "$recursiveRef"), value) => {
                if let Value::String(text) = value {
                    return Err(named(path, name, text));
                }
            }
            // Values, not schemas.
            ("const" | "enum" | "default" | "examples" | "example", _) => {}
            (
                "properties" | "patternProperties" | "dependentSchemas" | "dependencies" | "$defs"
                | "definitions",
                Value::Object(map),
            ) => map.values_mut().try_for_each(|one| move_within(one, place, path))?,
            (_, value) => move_within(value, place, path)?,
        }
    }
    Ok(())
}

fn move_within(value: &mut Value, place: &str, path: &str) -> Result<()> {
    match value {
        Value::Object(map) => move_references(map, place, path),
        Value::Array(items) => items.iter_mut().try_for_each(|one| move_within(one, place, path)),
        _ => Ok(()),
    }
}

fn named(path: &str, keyword: &str, text: &str) -> Error {
    let remedy = format!(
        "the `{keyword}` {text:?} within it cannot be kept apart from other tools' names; refer by \"#/…\" to a \
         place of the schema"
    );
    unimplemented(path, &remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn embed(schema: &Value, place: &str) -> Result<Value> {
        embedded(schema.as_object(), place, "p")
    }

    #[test]
    fn references_are_moved_with_their_schema_and_nothing_else_is() {
        let schema = json!({
            "type": "object",
            "properties": {
                "a": {"$ref": "#/$defs/x~1y%20z"},
                "$ref": {"anyOf": [{"$ref": "#"}, {"$ref": ""}, {"$ref": "#/definitions/D"}]},
                "const": {"items": {"$ref": "#/properties/a"}},
                "l": {"const": {"$ref": "#/$defs/x"}, "enum": [{"$ref": "#"}], "default": {"$ref": "#"}},
                "far": {"$ref": "https://example.com/s#/a"},
            },
            "$defs": {"x/y z": {"type": "string"}},
            "definitions": {"D": {"prefixItems": [{"$ref": "#/components/C"}]}},
            "components": {"C": {"not": {"$ref": "#"}}},
        });
        let moved = embed(&schema, "/items/anyOf/0").unwrap();
        for (pointer, reference) in [
            ("/properties/a/$ref", "#/items/anyOf/0/$defs/x~1y%20z"),
            ("/properties/$ref/anyOf/0/$ref", "#/items/anyOf/0"),
            ("/properties/$ref/anyOf/1/$ref", "#/items/anyOf/0"),
            ("/properties/$ref/anyOf/2/$ref", "#/items/anyOf/0/definitions/D"),
            ("/properties/const/items/$ref", "#/items/anyOf/0/properties/a"),
            ("/properties/l/const/$ref", "#/$defs/x"),
            ("/properties/l/enum/0/$ref", "#"),
            ("/properties/l/default/$ref", "#"),
            ("/properties/far/$ref", "https://example.com/s#/a"),
            ("/definitions/D/prefixItems/0/$ref", "#/items/anyOf/0/components/C"),
            ("/components/C/not/$ref", "#/items/anyOf/0"),
        ] {
            assert_eq!(moved.pointer(pointer).and_then(Value::as_str), Some(reference), "{pointer}");
        }
        assert_eq!(embed(&schema, "").unwrap(), schema);
    }

    #[test]
    fn names_that_would_mean_something_else_elsewhere_are_refused() {
        for schema in [
            json!({"properties": {"a": {"$ref": "#name"}}}),
            json!({"properties": {"a": {"$anchor": "name"}}}),
            json!({"properties": {"a": {"$dynamicRef": "#name"}}}),
            json!({"properties": {"a": {"$recursiveRef": "#"}}}),
            json!({"$defs": {"a": {"$id": "https://example.com/a"}}, "minProperties": 1}),
        ] {
            let error = embed(&schema, "/items").unwrap_err();
            assert_eq!(error.field.as_deref(), Some("p"), "{schema}");
            assert!(embed(&schema, "").is_ok(), "{schema}");
        }
        let whole = json!({"$id": "https://example.com/a", "properties": {"$id": {"$ref": "#"}}});
        let moved = embed(&whole, "/items").unwrap();
        assert_eq!((moved.get("$id"), &moved["properties"]["$id"]["$ref"]), (None, &json!("#/items")));
    }

    #[test]
    fn every_constraint_is_passed_on_and_only_objects_fit() {
        for schema in [
            json!({"required": ["a"]}),
            json!({"minProperties": 1}),
            json!({"not": {}}),
            json!({"dependentRequired": {"a": ["b"]}}),
            json!({"propertyNames": {"pattern": "^a"}}),
            json!({"if": {}, "then": {}}),
            json!({"$ref": "#/$defs/A", "$defs": {"A": {}}}),
            json!({"additionalProperties": true}),
            json!({"additionalProperties": {"type": "string"}}),
            json!({"enum": [{}, {"a": 1}]}),
            json!({"properties": null}),
            json!({"unknown": 1}),
        ] {
            for kind in [None, Some(json!("object")), Some(json!(["null", "object"]))] {
                let mut given = schema.clone();
                let mut expected = schema.clone();
                expected["type"] = "object".into();
                if let Some(kind) = kind {
                    given["type"] = kind;
                }
                assert_eq!(embed(&given, "").unwrap(), expected);
            }
        }
    }

    #[test]
    fn a_schema_that_asks_for_nothing_takes_an_empty_object() {
        for schema in [
            json!(null),
            json!({}),
            json!({"type": "object", "properties": {}}),
            json!({"title": "T", "type": "object", "properties": {}, "required": [], "$defs": {"a": {}}}),
            json!({"type": "object", "properties": {}, "additionalProperties": false}),
        ] {
            assert_eq!(embed(&schema, "").unwrap()["additionalProperties"], false, "{schema}");
        }
    }

    #[test]
    fn a_reference_of_an_older_draft_stands_apart_from_what_is_asked_beside_it() {
        let name = "http://json-schema.org/draft-07/schema#";
        let schema =
            json!({"$ref": "#/definitions/A", "definitions": {"A": {"minProperties": 1}}, "$schema": name});
        let moved = embed(&schema, "").unwrap();
        assert_eq!((&moved["type"], &moved["$schema"]), (&json!("object"), &json!(name)));
        assert_eq!(moved["allOf"][0]["$ref"], "#/allOf/0/definitions/A");
        assert_eq!(embed(&schema, "/items").unwrap()["allOf"][0]["$ref"], "#/items/allOf/0/definitions/A");
    }

    #[test]
    fn a_schema_that_no_object_fits_is_refused_by_its_keyword() {
        for (schema, keyword) in [
            (json!({"type": "string"}), "type"),
            (json!({"type": "integer", "properties": {"a": {}}}), "type"),
            (json!({"type": ["string", "null"]}), "type"),
            (json!({"type": []}), "type"),
            (json!({"type": 5}), "type"),
            (json!({"type": ["object", "dict"]}), "type"),
            (json!({"const": 5}), "const"),
            (json!({"const": null}), "const"),
            (json!({"enum": ["a", 1]}), "enum"),
        ] {
            let error = check(schema.as_object().unwrap(), "p").unwrap_err();
            assert_eq!(error.field, Some(format!("p.{keyword}")), "{schema}");
        }
        for schema in [
            json!({}),
            json!({"type": "object"}),
            json!({"type": ["object", "null"]}),
            json!({"const": {"a": 1}}),
            json!({"enum": [1, {}]}),
            json!({"properties": {"type": {"const": 5}}}),
        ] {
            assert!(check(schema.as_object().unwrap(), "p").is_ok(), "{schema}");
        }
    }
}
