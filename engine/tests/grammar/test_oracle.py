"""Random schemas of numbers and strings whose keywords get in each other's way, against a validator on small values."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest
from branchline.engine.errors import EngineError
from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.grammar.schema import SchemaOptions

from benchmarks.grammar.feed import Checker

SCHEMAS = 25  # a seed
VALUES: list[Any] = [
    *range(-3, 6), 10, 11, 0.5, 1.5, 2.5, -0.5, 9.99, "", "a", "b", "ab", "ba", "aa", "aba", None, True, [], {},
]  # fmt: skip
PATTERNS = ("^a", "b$", "^a*$", "a", "^(a|ab)$", "^$", "[^a]", "^.b", "^(?!a)", "^(?=a).{2}$")


def made(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema; its parts are such schemas too."""
    kind = chance.choice(("number", "number", "string", "type", "enum", "not", "allOf", "anyOf", "oneOf", "if"))
    if depth == 3 or kind in ("number", "string", "type", "enum"):
        return plain(chance, kind)
    parts = [made(chance, depth + 1) for _ in range(chance.randrange(1, 4))]
    if kind == "not":
        return {**plain(chance, "type"), "not": parts[0]}
    if kind == "if":
        return {"if": parts[0], "then": parts[-1], "else": made(chance, depth + 1)}
    return {kind: parts}


def plain(chance: random.Random, kind: str) -> dict[str, Any]:
    """A schema without parts."""
    found: dict[str, Any] = {}
    if kind == "enum":
        return {"enum": chance.sample(VALUES[:24], chance.randrange(1, 5))}
    if kind == "string":
        for name in chance.sample(("minLength", "maxLength", "pattern"), 2):
            found[name] = chance.choice(PATTERNS) if name == "pattern" else chance.randrange(4)
        return found
    if kind == "number":
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        for name in chance.sample(names, chance.randrange(1, 4)):
            found[name] = chance.choice((1, 2, 0.5)) if name == "multipleOf" else chance.choice((-1, 0, 1, 2, 2.5, 10))
    if chance.random() < 0.6:
        found["type"] = chance.choice(("integer", "number", ["integer", "string"], ["number", "null"], "string"))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_no_value_is_taken_that_a_validator_refuses_nor_refused_without_a_reason(seed: int) -> None:
    chance, enforced = random.Random(seed), 0
    for _ in range(SCHEMAS):
        schema = made(chance)
        validator = jsonschema.Draft202012Validator(schema)
        valid = [value for value in VALUES if validator.is_valid(value)]
        try:
            checker = Checker(schema, SchemaOptions())
        except GrammarUnsupported:
            continue
        except EngineError as error:
            assert valid == [] and "no value fits" in error.message, (schema, error.message)
            continue
        enforced += 1
        assert [value for value in VALUES if checker.accepts(value)] == valid, schema
    assert enforced > SCHEMAS / 2
