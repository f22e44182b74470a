"""Each keyword of JSON Schema on its own and beside others: texts that must be accepted and refused, exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.types import GrammarKind
from grammars import accepts, constraint

CLOSED = {"additionalProperties": False}

TABLE: dict[str, tuple[Any, list[str], list[str]]] = {
    "anything": (
        True,
        ["1", '"x"', "null", "[]", '{"a":[1,{"b":false}]}', "-0.5e-3"],
        ["", "tru", "01", "[1,]", "{a:1}", "'x'"],
    ),
    "type list": (
        {"type": ["integer", "null"]},
        ["1", "-7", "null"],
        ["1.5", '"1"', "true", "[]"],
    ),
    "boolean": (
        {"type": "boolean"},
        ["true", "false"],
        ["True", "1", "null", '"true"'],
    ),
    "const of a string that needs escapes": (
        {"const": 'a"\\\n'},
        ['"a\\"\\\\\\n"'],
        ['"a"', '"a\\"\\\\"'],
    ),
    "enum filtered by type": (
        {"enum": [1, "a", None, True], "type": "string"},
        ['"a"'],
        ["1", "null", "true"],
    ),
    "minLength and maxLength count characters": (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"ab"', '"日本"', '"\\n\\n\\n"'],
        ['"a"', '"abcd"', '"\\n"'],
    ),
    "pattern searches": (
        {"type": "string", "pattern": "b+"},
        ['"abc"', '"b"', '"bb"'],
        ['"ac"', '""'],
    ),
    "pattern in a quoted string": (
        {"type": "string", "pattern": '^"\\\\$'},
        ['"\\"\\\\"'],
        ['"\\""', '"\\\\"'],
    ),
    "format date is asserted": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"1999-12-31"'],
        ['"2024-13-01"', '"x"', '"2024-1-1"'],
    ),
    "minimum and maximum": (
        {"type": "integer", "minimum": 8, "maximum": 12},
        ["8", "9", "10", "12"],
        ["7", "13", "80", "08", "-8"],
    ),
    "exclusive bounds of numbers": (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        ["0.5", "0.001", "0.99"],
        ["0", "1", "0.0", "1.0", "-0.5"],
    ),
    "bounds without a type bind numbers only": (
        {"minimum": 3},
        ["3", "40", '"x"', "null"],
        ["2", "-5", "2.9"],
    ),
    "multipleOf": (
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 20},
        ["0", "5", "10", "20"],
        ["1", "12", "25", "-5"],
    ),
    "items": (
        {"type": "array", "items": {"type": "integer"}},
        ["[]", "[1]", "[1,2]", "[1, 2]"],
        ['["a"]', "[1,]", "[,1]", "[1 2]"],
    ),
    "prefixItems and items": (
        {"type": "array", "prefixItems": [{"const": 1}, {"const": "a"}], "items": False},
        ["[]", "[1]", '[1,"a"]'],
        ['["a"]', '[1,"a",2]', "[1,1]"],
    ),
    "minItems and maxItems": (
        {"type": "array", "items": {"const": 0}, "minItems": 1, "maxItems": 2},
        ["[0]", "[0,0]"],
        ["[]", "[0,0,0]"],
    ),
    "contains": (
        {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}},
        ["[2]", "[1,2]", "[2,1,1]"],
        ["[]", "[1]", "[1,1]"],
    ),
    "uniqueItems over listed values": (
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
        ["[]", "[1]", "[2,1]"],
        ["[1,1]", "[1,2,1]"],
    ),
    "required names need no properties": (
        {"type": "object", "required": ["a"]},
        ['{"a":1}', '{"a":1,"b":2}'],
        ["{}", '{"b":1}'],
    ),
    "additionalProperties by schema": (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "string"}},
        ["{}", '{"a":1}', '{"a":1,"x":"y"}'],
        ['{"a":2}', '{"x":1}'],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, **CLOSED},
        ["{}", '{"n_a":1}'],
        ['{"n_a":"x"}', '{"m":1}'],
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}},
        ["{}", '{"a":1}', '{"a":1,"b":1}'],
        ['{"c":1}', '{"a":2}'],
    ),
    "minProperties of named ones": (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 1, **CLOSED},
        ['{"a":1}', '{"b":2}', '{"a":1,"b":2}'],
        ["{}"],
    ),
    "maxProperties": (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "maxProperties": 1, **CLOSED},
        ["{}", '{"a":1}', '{"b":2}'],
        ['{"a":1,"b":2}'],
    ),
    "dependentRequired": (
        {
            "type": "object",
            "properties": {"a": {"const": 1}, "b": {"const": 2}},
            "dependentRequired": {"a": ["b"]},
            **CLOSED,
        },
        ["{}", '{"b":2}', '{"a":1,"b":2}'],
        ['{"a":1}'],
    ),
    "allOf": (
        {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]},
        ["2", "3", "4"],
        ["1", "5", '"x"', "null"],
    ),
    "anyOf with a sibling": (
        {"type": "object", "required": ["t"], "anyOf": [{"properties": {"t": {"const": 1}}}, {"required": ["u"]}]},
        ['{"t":1}', '{"t":1,"u":0}'],
        ['{"t":2}', '{"u":0}'],
    ),
    "oneOf is exclusive": (
        {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]},
        ["1", "3"],
        ["2", "4"],
    ),
    "not": (
        {"type": "integer", "not": {"enum": [3, 4]}},
        ["2", "5", "33"],
        ["3", "4"],
    ),
    "if, then, else": (
        {"type": "integer", "if": {"minimum": 10}, "then": {"const": 12}, "else": {"const": 5}},
        ["12", "5"],
        ["11", "6", "10"],
    ),
    "unevaluatedProperties": (
        {
            "type": "object",
            "allOf": [{"properties": {"a": {"const": 1}}}],
            "properties": {"b": {"const": 2}},
            "unevaluatedProperties": False,
        },
        ["{}", '{"b":2}', '{"b":2,"a":1}'],
        ['{"c":1}', '{"a":2}'],
    ),
    "recursion by reference": (
        {"type": "array", "items": {"$ref": "#"}},
        ["[]", "[[]]", "[[],[[]]]"],
        ["[1]", "[", "[[]"],
    ),
    "definitions behind anchors": (
        {"$ref": "#num", "$defs": {"n": {"$anchor": "num", "type": "integer", "minimum": 1, "maximum": 3}}},
        ["1", "3"],
        ["0", "4", '"1"'],
    ),
    "names that need escapes": (
        {"type": "object", "properties": {'a"b': {"const": 1}, "c/~d": {"const": 2}}, **CLOSED},
        ['{"a\\"b":1}', '{"c/~d":2}'],
        ['{"a"b":1}', '{"c":2}'],
    ),
    "one blank is allowed after comma and colon, no more": (
        {"type": "object", "properties": {"a": {"const": [1, 2]}}, "required": ["a"], **CLOSED},
        ['{"a":[1,2]}', '{"a": [1, 2]}'],
        ['{"a":  [1,2]}', '{ "a":[1,2]}', '{"a":[1,2] }', '{"a":[1,2]}\n'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_keywords_mean_what_the_specification_says(name: str) -> None:
    schema, good, bad = TABLE[name]
    grammar = constraint(GrammarKind.JSON, json.dumps(schema))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


WRONG: dict[str, tuple[Any, str]] = {
    "an unknown type": (
        {"properties": {"a": {"type": "objekt"}}},
        "/properties/a/type",
    ),
    "properties that are a list": (
        {"type": "object", "properties": []},
        "/properties",
    ),
    "a reference into nothing": (
        {"items": {"$ref": "#/$defs/none"}},
        "/items",
    ),
    "a broken pattern": (
        {"properties": {"a": {"pattern": "("}}},
        "/properties/a/pattern",
    ),
    "a negative length": (
        {"minLength": -1},
        "/minLength",
    ),
    "a required that is no list": (
        {"required": "a"},
        "/required",
    ),
    "bounds that exclude each other": (
        {"type": "integer", "minimum": 5, "maximum": 1},
        "#",
    ),
    "false": (
        False,
        "#",
    ),
    "an empty enum": (
        {"enum": []},
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_schemas_are_invalid_and_say_where(name: str) -> None:
    schema, place = WRONG[name]
    with pytest.raises(GrammarInvalid) as caught:
        constraint(GrammarKind.JSON, json.dumps(schema))
    assert place in caught.value.message
    assert caught.value.message[0] in "'" or caught.value.message[0].islower()


REFUSED: dict[str, tuple[Any, str, str]] = {
    "unique open values": (
        {"properties": {"a": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}},
        "uniqueItems",
        "/properties/a",
    ),
    "a remote reference": (
        {"$ref": "https://example.com/schema.json"},
        "$ref",
        "/$ref",
    ),
    "a look-behind": (
        {"items": {"pattern": "(?<=a)b"}},
        "pattern",
        "/items/pattern",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_form_is_refused_with_keyword_and_pointer(name: str) -> None:
    schema, keyword, place = REFUSED[name]
    with pytest.raises(GrammarUnsupported) as caught:
        constraint(GrammarKind.JSON, json.dumps(schema))
    assert caught.value.keyword == keyword
    assert place in caught.value.message and keyword in caught.value.message
