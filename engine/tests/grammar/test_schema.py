"""Compiled schemas: the shared cases, refusals with pointers, and JSON Schema's own tests with their ratchet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from branchline.engine.grammar.closing import Closer
from branchline.engine.grammar.least import Ways
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.grammar.schema import SchemaOptions, compile_schema
from branchline.engine.types import GrammarAsk, GrammarKind
from grammars import accepts, constraint

from benchmarks.grammar.feed import Checker
from benchmarks.grammar.suite import run
from tests.cases.loader import area

ROOT = Path(__file__).resolve().parents[3]
RATCHET = json.loads((ROOT / "benchmarks/grammar/ratchet.json").read_text())
SUITE = next((one for one in (ROOT.parent / "shared", ROOT.parents[1] / "shared") if one.is_dir()), None)
TEXTS = sorted(
    name for name, one in area("grammar").items() if "json_schema" in one["given"] and "must_accept" in one["right"]
)


@pytest.mark.parametrize("name", TEXTS)
def test_a_shared_case_accepts_and_rejects_its_texts(name: str) -> None:
    one = area("grammar")[name]
    checker = Checker(one["given"]["json_schema"], SchemaOptions())
    wrong = [text for text in one["right"]["must_accept"] if not checker.accepts_text(text)]
    wrong += [text for text in one["right"]["must_reject"] if checker.accepts_text(text)]
    assert wrong == []


def test_schema_shaped_values_are_no_schemas_and_real_ones_are_enforced() -> None:
    """grammar-schema-shaped-values: `not` is enforced here, which is better than its refusal."""
    given = area("grammar")["grammar-schema-shaped-values"]["given"]
    checker = Checker(given["accept_schema"], SchemaOptions())
    assert checker.accepts({"op": {"if": 1, "not": {}}, "k": "a", "uniqueItems": 3})
    refused = Checker(given["refuse_schema"], SchemaOptions())
    assert refused.accepts({"list": [1, "a"]})
    assert not refused.accepts({"list": [1, None]})


@pytest.mark.parametrize("text", area("grammar")["grammar-invalid-schema-400"]["given"]["json_schema_each"][:5])
def test_a_wrong_schema_is_invalid(text: str) -> None:
    with pytest.raises(GrammarInvalid):
        compile_schema(text)


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "uniqueItems", "/properties/a/items/uniqueItems"),
        ({"properties": {"a": {"$ref": "https://example.com/x"}}}, "$ref", "/properties/a/$ref"),
        ({"properties": {"a": {"pattern": r"(a)\1"}}}, "pattern", "/properties/a/pattern"),
        ({"$schema": "https://example.com/own"}, "$schema", "/$schema"),
    ],
)  # fmt: skip
def test_what_is_not_enforced_is_refused_with_keyword_and_pointer(schema: Any, keyword: str, pointer: str) -> None:
    with pytest.raises(GrammarUnsupported) as caught:
        compile_schema(schema)
    assert caught.value.keyword == keyword
    assert pointer in caught.value.message


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "multipleOf": 1}, [1, 2], [2.5]),
        ({"type": "string", "not": {"pattern": "^a"}}, ["b", ""], ["a", "ab"]),
        ({"oneOf": [{"minimum": 2}, {"type": "integer"}]}, [1, 2.5, "a"], [3, 1.5]),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, [[1], [0, 1]], [[], [1, 1]]),
        ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, [[], ["b", "a"]], [["a", "a"]]),
        ({"not": {"required": ["a"]}, "type": "object"}, [{}, {"b": 1}], [{"a": 1}]),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}, "type": "object"}, [{}, {"a": 1, "b": 1}],
         [{"a": 1}]),
        ({"anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}}], "type": "object",
          "unevaluatedProperties": False}, [{"a": 1}, {"b": 1}, {}], [{"c": 1}, {"a": 1, "c": 1}]),
        ({"type": "object", "propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
        ({"type": "integer", "not": {"minimum": 1, "multipleOf": 1}}, [0, -3], [1, 5, 1.5]),
        ({"type": ["integer", "string"], "not": {"type": "integer"}}, ["a"], [1, 1.5]),
        ({"type": "string", "format": "ipv6"}, ["::", "::1", "1:2:3:4:5:6:7:8", "a::b:1.2.3.4"],
         ["", "1", ":::", "1::2::3", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7", "::12345", "::1.2.3.256", "fe80::1%eth0"]),
        ({"type": "string", "format": "hostname"}, ["a", "example.com", "a-b.c-1.org"],
         ["", ".", "-a", "a-", "a..b", "a_b", "a.b.", "a b", "x" * 64, "é.com"]),
        ({"enum": ["é", 'a"', 1.0, None, [True]]}, ["é", 'a"', 1, None, [True]], ["e", 2, [1], False]),
    ],
)  # fmt: skip
def test_a_keyword_is_enforced_both_ways(schema: Any, good: list[Any], bad: list[Any]) -> None:
    checker = Checker(schema, SchemaOptions())
    assert [value for value in good if not checker.accepts(value)] == []
    assert [value for value in bad if checker.accepts(value)] == []


@pytest.mark.parametrize("schema", ['{"type": "integer", "enum": [1, 20]}', '{"type": "integer", "const": 20}'])
def test_listed_integers_are_spelled_without_a_point(schema: str) -> None:
    grammar = constraint(GrammarKind.JSON, schema)
    assert accepts(grammar, "20")
    assert not accepts(grammar, "20.0")


PATTERNS = ("abc", "[0-9]{5}", r"\\d{3}", ".*a.{30}b", "^(?:x|yz)$", r"\\p{Lu}[^a-z]", '\\"q')


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_short_text_of_a_pattern_is_known_from_its_source(pattern: str) -> None:
    pieces = Pieces(Bytes(), 257)
    schema = (
        f'{{"type": "object", "properties": {{"a": {{"type": "string", "pattern": "{pattern}"}}}}, "required": ["a"]}}'
    )
    way, least = Ways(lambda: pieces).of(GrammarAsk(GrammarKind.JSON, schema), constraint(GrammarKind.JSON, schema))
    assert way is not None and least <= len(way)
    value = json.loads(pieces.text(way))
    jsonschema.validate(value, json.loads(schema.replace(r"\\p{Lu}", "[A-Z]")))


@pytest.mark.parametrize("pattern", ["[0-9]{3}", "x?[0-9]$"])
def test_a_text_that_still_wants_digits_is_led_to_its_end(pattern: str) -> None:
    grammar = constraint(GrammarKind.JSON, json.dumps({"type": "string", "pattern": pattern}))
    begun = b'"%%, ~'
    assert grammar.accept_tokens(list(begun)) == len(begun)
    run = Closer(Pieces(Bytes(), 257)).run(grammar, 24, 64)
    assert run is not None
    assert grammar.accept_tokens(run) == len(run) and grammar.is_complete()


class Bytes:
    """A vocabulary of the 256 bytes."""

    def __len__(self) -> int:
        return 256

    def token_bytes(self, token_id: int) -> bytes:
        """One byte."""
        return bytes([token_id])


def test_no_prefix_leads_into_a_dead_end() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x$", "minLength": 2}, "b": {}}}
    checker = Checker(schema, SchemaOptions())
    matcher = checker.matcher.deep_copy()
    data = list(b'{"a"')
    assert matcher.validate_tokens(data) < len(data), "nothing fits `a`, so its name may not begin"


@pytest.mark.skipif(SUITE is None, reason="NOT RUN: the shared data folder with JSON Schema's tests is absent")
@pytest.mark.parametrize(("folder", "dialect"), [("draft2020-12", "2020-12"), ("draft7", "draft7")])
def test_json_schemas_own_tests_hold_the_ratchet(folder: str, dialect: str) -> None:
    assert SUITE is not None
    score = run(SUITE / "data/jsonschema/suite" / folder, dialect, boxed=False)
    assert score.wrongly_accepted == []
    assert len(score.wrongly_refused) <= RATCHET[folder]["wrongly_refused"], score.wrongly_refused
    assert score.declined <= RATCHET[folder]["declined"]
