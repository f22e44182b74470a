"""Structural tags: free text with constrained parts, in both shapes that clients send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.types import GrammarKind
from grammars import accepts, constraint

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
LEGACY = {
    "structures": [
        {"begin": "<fn=weather>", "schema": CITY, "end": "</fn>"},
        {"begin": "<fn=time>", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "end": "</fn>"},
    ],
    "triggers": ["<fn="],
}
CALL = '<fn=weather>{"city":"Oslo"}</fn>'


def tag(value: Any) -> Any:
    return constraint(GrammarKind.STRUCTURAL_TAG, json.dumps(value))


def of(form: dict[str, Any]) -> Any:
    return tag({"type": "structural_tag", "format": form})


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def call(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def test_the_older_shape_constrains_what_follows_a_trigger() -> None:
    grammar = tag(LEGACY)
    for text in ("", "plain words", CALL, f"so {CALL} and <fn=time>7</fn> done", "a < b", "<f", "{}"):
        assert accepts(grammar, text), text
    for text in (
        "<fn=other>{}</fn>",
        "<fn=",
        '<fn=weather>{"city":"Bonn"}</fn>',
        CALL[:-1],
        "<fn=time>12</fn>",
        "x <fn=y",
    ):
        assert not accepts(grammar, text), text


def test_triggered_tags_may_be_needed_and_may_end_the_text() -> None:
    tags = [call("<a>", {"type": "regex", "pattern": "[0-9]+"}, "</a>")]
    form = {"type": "triggered_tags", "triggers": ["<a"], "tags": tags}
    table = {
        (False, False): [True, True, True, True],
        (True, False): [False, True, True, True],
        (False, True): [True, True, False, False],
        (True, True): [False, True, False, False],
    }
    texts = ["no call", "x<a>1</a>", "<a>1</a>y", "<a>1</a><a>2</a>"]
    for (need, first), wanted in table.items():
        grammar = of({**form, "at_least_one": need, "stop_after_first": first})
        assert [accepts(grammar, text) for text in texts] == wanted, (need, first)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (const("hi"), ["hi"], ["h", "hi!"]),
        ({"type": "json_schema", "json_schema": CITY}, ['{"city":"Rome"}'], ["{}", "x"]),
        ({"type": "regex", "pattern": "[ab]{2}"}, ["ab"], ["a", "abc"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root? ")"'}, ["()", "(())"], ["(", ""]),
        ({"type": "any_text"}, ["", "whatever\nit says"], []),
        ({"type": "any_text", "excludes": ["bad", "<"]}, ["good", "ba d"], ["so bad", "a<b"]),
        ({"type": "sequence", "elements": [const("a"), const("b")]}, ["ab"], ["a", "ba"]),
        ({"type": "or", "elements": [const("a"), const("b")]}, ["a", "b"], ["ab", ""]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
        ({"type": "star", "content": const("ab")}, ["", "abab"], ["aba"]),
        (call("<t>", {"type": "any_text"}, "</t>"), ["<t></t>", "<t>a < b</t>"], ["<t>a", "<t>a</t>b"]),
        (call("<t>", {"type": "any_text"}, ["</t>", "!"]), ["<t>x</t>", "<t>x!"], ["<t>x!y!"]),
        (call("[", {"type": "regex", "pattern": "[0-9]"}, ["]", ")"]), ["[1]", "[1)"], ["[1", "[12]"]),
        (
            {"type": "tags_with_separator", "tags": [call("<", const("x"), ">")], "separator": ","},
            ["", "<x>", "<x>,<x>"],
            ["<x>,", "<x><x>"],
        ),
        (
            {
                "type": "tags_with_separator", "tags": [call("<", const("x"), ">")], "separator": ",",
                "at_least_one": True, "stop_after_first": True,
            },
            ["<x>"],
            ["", "<x>,<x>"],
        ),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else None,
)  # fmt: skip
def test_each_format_means_what_it_says(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = of(form)
    assert [one for one in good if not accepts(grammar, one)] == []
    assert [one for one in bad if accepts(grammar, one)] == []


def test_tools_no_parallel_calls_is_one_format_each() -> None:
    begin, end = '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"
    one = begin + "{}" + end
    tags = [call(begin, {"type": "json_schema", "json_schema": {"type": "object", "maxProperties": 0}}, end)]
    triggered = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags}
    separated = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    table = {
        ("auto", True): (triggered, [True, True, True, True]),
        ("auto", False): ({**triggered, "stop_after_first": True}, [True, True, False, True]),
        ("required", True): (separated, [False, True, True, False]),
        ("required", False): ({**separated, "stop_after_first": True}, [False, True, False, False]),
    }
    for key, (form, wanted) in table.items():
        grammar = of(form)
        assert [accepts(grammar, text) for text in ("", one, f"{one}\n{one}", "hello")] == wanted, key


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("not json", GrammarInvalid, "no JSON"),
        ([], GrammarInvalid, "no JSON object"),
        ({}, GrammarInvalid, "neither format nor structures"),
        ({"type": "structural_tag"}, GrammarInvalid, "neither format nor structures"),
        ({"structures": [], "triggers": ["<"]}, GrammarInvalid, "/structures"),
        ({**LEGACY, "triggers": []}, GrammarInvalid, "/structures/triggers"),
        ({**LEGACY, "triggers": ["<x"]}, GrammarInvalid, "0 triggers"),
        ({**LEGACY, "triggers": ["<fn=", "<f"]}, GrammarInvalid, "2 triggers"),
        ({"type": "structural_tag", "format": {"type": "dance"}}, GrammarUnsupported, "/format/type"),
        ({"type": "structural_tag", "format": {"type": "regex"}}, GrammarInvalid, "/format/pattern"),
        ({"type": "structural_tag", "format": {"type": "regex", "pattern": "("}}, GrammarInvalid, "/format/pattern"),
        (
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "objekt"}}},
            GrammarInvalid,
            "/format/json_schema",
        ),
        (
            {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": True, "style": "qwen_xml"}},
            GrammarUnsupported,
            "/format/style",
        ),
        (
            {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "any_text"}, const("a")]}},
            GrammarUnsupported,
            "free text must come last",
        ),
        ({"type": "structural_tag", "format": {"type": "tag", "begin": "<"}}, GrammarInvalid, "/format/content"),
        (
            {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": const("a"), "end": 3}},
            GrammarInvalid,
            "/format/end",
        ),
        ({"type": "structural_tag", "format": {"type": "any_text", "excludes": [""]}}, GrammarInvalid, "/excludes"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(value: Any, error: type[Exception], words: str) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(error) as caught:
        constraint(GrammarKind.STRUCTURAL_TAG, text)
    assert words in str(caught.value)


def test_depth_and_size_are_bounded() -> None:
    form: dict[str, Any] = const("a")
    for _ in range(40):
        form = {"type": "optional", "content": form}
    with pytest.raises(GrammarInvalid, match="32 deep"):
        of(form)
    with pytest.raises(GrammarInvalid, match="1024 parts"):
        of({"type": "or", "elements": [{"type": "any_text"}] * 1100})
