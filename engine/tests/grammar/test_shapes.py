"""Schemas as applications write them: whole documents that must come out, and near misses that must not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from branchline.engine.types import GrammarKind
from grammars import accepts, constraint

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "left": {"$ref": "#/$defs/node"},
                "right": {"$ref": "#/$defs/node"},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SHAPE: dict[str, Any] = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "r": {"type": "number", "exclusiveMinimum": 0}},
            "required": ["kind", "r"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"kind": {"const": "box"}, "w": {"type": "integer"}, "h": {"type": "integer"}},
            "required": ["kind", "w", "h"],
            "additionalProperties": False,
        },
    ]
}
OLD: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": {"positive": {"type": "integer", "exclusiveMinimum": 0}},
    "type": "array",
    "items": [{"$ref": "#/definitions/positive"}, {"type": "boolean"}],
    "additionalItems": False,
    "minItems": 1,
}
DOCUMENTS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "person": (
        PERSON,
        [
            {"name": "Ann", "age": 3},
            {"name": "日本", "age": 150, "mail": None, "tags": []},
            {"name": "B", "age": 0, "mail": "b@c", "tags": ["a", "b"]},
        ],
        [
            {"name": "", "age": 3},
            {"name": "Ann", "age": 151},
            {"name": "Ann"},
            {"name": "Ann", "age": 3, "mail": 4},
            {"name": "Ann", "age": 3, "tags": ["c"]},
            {"name": "Ann", "age": 3, "more": 1},
        ],
    ),
    "tree": (
        TREE,
        [{"value": 1}, {"value": -2.5, "left": {"value": 3, "right": {"value": 4}}}],
        [{}, {"left": {"value": 1}}, {"value": 1, "left": {}}, {"value": 1, "left": 2}],
    ),
    "shape": (
        SHAPE,
        [{"kind": "circle", "r": 0.5}, {"kind": "box", "w": 1, "h": -2}],
        [{"kind": "circle", "r": 0}, {"kind": "box", "r": 1}, {"kind": "circle", "w": 1, "h": 1}, {"kind": "line"}],
    ),
    "draft 7": (
        OLD,
        [[1], [7, True]],
        [[], [0], [1, 2], [1, True, 3], ["1"]],
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_documents_are_told_apart(name: str, separators: tuple[str, str]) -> None:
    schema, good, bad = DOCUMENTS[name]
    grammar = constraint(GrammarKind.JSON, json.dumps(schema))

    def is_accepted(value: Any) -> bool:
        return accepts(grammar, json.dumps(value, separators=separators, ensure_ascii=False))

    assert [value for value in good if not is_accepted(value)] == []
    assert [value for value in bad if is_accepted(value)] == []
