"""The keywords of JSON Schema: which hold schemas, which values they take, what they mean in older drafts.

Older spellings become today's here (items as a list, boolean exclusive bounds, dependencies, $recursiveRef is
refused), so that the rest knows one dialect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported

ORIGINAL = "\0original"
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
OLD = ("draft4", "draft6", "draft7")
HOLDS = {
    "not": "schema", "if": "schema", "then": "schema", "else": "schema", "items": "schema", "contains": "schema",
    "additionalProperties": "schema", "propertyNames": "schema", "unevaluatedItems": "schema",
    "unevaluatedProperties": "schema", "allOf": "list", "anyOf": "list", "oneOf": "list", "prefixItems": "list",
    "properties": "map", "patternProperties": "map", "dependentSchemas": "map", "$defs": "map", "definitions": "map",
}  # fmt: skip
_DIALECTS = {
    "json-schema.org/draft/2020-12/schema": "2020-12",
    "json-schema.org/draft/2019-09/schema": "2019-09",
    "json-schema.org/draft-07/schema": "draft7",
    "json-schema.org/draft-06/schema": "draft6",
    "json-schema.org/draft-04/schema": "draft4",
    "json-schema.org/draft-03/schema": "draft4",
    "json-schema.org/schema": "2020-12",
}


def dialect_of(uri: str) -> str:
    """The dialect that `$schema` names. Raises GrammarUnsupported for one that is not known."""
    name = uri.removeprefix("https://").removeprefix("http://").rstrip("#").rstrip("/")
    if name not in _DIALECTS:
        raise GrammarUnsupported("$schema", f"the dialect {uri!r} is not known", pointer="/$schema")
    return _DIALECTS[name]


def shown(value: Any) -> str:
    """A value, cut for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def checked(value: dict[str, Any], pointer: str, dialect: str) -> dict[str, Any]:
    """The keywords of one schema with today's spelling. Raises GrammarInvalid for values of the wrong kind."""
    if "$ref" in value and dialect in OLD:  # siblings of $ref have no meaning there
        kept: dict[str, Any] = {name: value[name] for name in ("$ref", "definitions", "$defs") if name in value}
        return _validated({**kept, ORIGINAL: value}, pointer)
    made = {name: one for name, one in value.items() if name != ORIGINAL}
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made.pop("additionalItems")
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(exclusive), bool) and dialect in ("draft4", "2020-12"):
            if made.pop(exclusive) and bound in made:
                made[exclusive] = made.pop(bound)
    dependencies = made.pop("dependencies", None)
    if dependencies is not None:
        _dependencies(made, dependencies, pointer)
    made[ORIGINAL] = value
    return _validated(made, pointer)


def _dependencies(made: dict[str, Any], given: Any, pointer: str) -> None:
    if not isinstance(given, dict):
        raise GrammarInvalid(
            f"'dependencies' is {shown(given)}: it must be an object", pointer=f"{pointer}/dependencies"
        )
    lists = {name: one for name, one in given.items() if isinstance(one, list)}
    schemas = {name: one for name, one in given.items() if not isinstance(one, list)}
    if lists:
        made["dependentRequired"] = {**made.get("dependentRequired", {}), **lists}
    if schemas:
        made["dependentSchemas"] = {**made.get("dependentSchemas", {}), **schemas}


def _validated(value: dict[str, Any], pointer: str) -> dict[str, Any]:
    for name, one in value.items():
        rule = _RULES.get(name)
        if rule is None:
            continue
        words, fits = rule
        if not fits(one):
            raise GrammarInvalid(f"{name!r} is {shown(one)}: it must be {words}", pointer=f"{pointer}/{name}")
    if "$recursiveRef" in value and value["$recursiveRef"] != "#":
        raise GrammarInvalid("'$recursiveRef' must be '#'", pointer=f"{pointer}/$recursiveRef")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _number(value) and value >= 0 and value == int(value)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _type(value: Any) -> bool:
    if isinstance(value, str):
        return value in TYPES
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one in TYPES for one in value)


def _map(value: Any) -> bool:
    return isinstance(value, dict)


Rule = tuple[str, Callable[[Any], bool]]
_COUNT: Rule = ("a whole number that is not negative", _count)
_NUMBER: Rule = ("a number", _number)
_LIST: Rule = ("a list of at least one schema", lambda value: isinstance(value, list) and bool(value))
_MAP: Rule = ("an object", _map)
_STRING: Rule = ("a string", lambda value: isinstance(value, str))
_RULES: dict[str, Rule] = {
    "type": (f"one of {', '.join(TYPES)}, or a list of them", _type),
    "enum": ("a list of at least one value", lambda value: isinstance(value, list) and bool(value)),
    "multipleOf": ("a number above 0", lambda value: _number(value) and value > 0),
    "minimum": _NUMBER, "maximum": _NUMBER, "exclusiveMinimum": _NUMBER, "exclusiveMaximum": _NUMBER,
    "minLength": _COUNT, "maxLength": _COUNT, "minItems": _COUNT, "maxItems": _COUNT, "minProperties": _COUNT,
    "maxProperties": _COUNT, "minContains": _COUNT, "maxContains": _COUNT,
    "pattern": _STRING, "$ref": _STRING, "$dynamicRef": _STRING, "$anchor": _STRING, "format": _STRING,
    "uniqueItems": ("a boolean", lambda value: isinstance(value, bool)),
    "required": ("a list of strings", _strings),
    "dependentRequired": (
        "an object of lists of strings", lambda value: _map(value) and all(_strings(one) for one in value.values())
    ),
    "allOf": _LIST, "anyOf": _LIST, "oneOf": _LIST, "prefixItems": _LIST,
    "properties": _MAP, "patternProperties": _MAP, "dependentSchemas": _MAP, "$defs": _MAP, "definitions": _MAP,
}  # fmt: skip
