"""Built-in parsers as Python sees them: each form, cut in every way, tells the same through the router's registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from branchline_router import registry

from tests.cases.loader import area

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "get_time")]
ARGUMENTS = '{"city": "Oslo", "days": 2}'
FENCED = f"function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```"
FORMS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen": f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "json": f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    "llama3_json": f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]',
    "pythonic": "[get_weather(city='Oslo', days=2)]",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{FENCED}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_r1": f"<｜tool▁call▁begin｜>{FENCED}<｜tool▁call▁end｜>",
    "deepseek_v31": f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
}


def cuttings(text: str) -> Iterator[list[str]]:
    """Whole, a character a piece, and every cut into two."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


def joined(parser: Any, pieces: list[str]) -> list[tuple[str, str]]:
    """All events, neighbours of a kind joined; calls stay apart."""
    told: list[tuple[str, str]] = []
    for events in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        for kind, value in events:
            if told and told[-1][0] == kind and kind != "call":
                told[-1] = (kind, told[-1][1] + value)
            else:
                told.append((kind, value))
    return told


def test_every_built_in_form_is_tried_here() -> None:
    built_in = {entry.name for entry in registry.tool_parsers.entries() if entry.origin.builtin}
    assert built_in == set(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_told_the_same_however_it_is_cut(form: str) -> None:
    make = registry.tool_parsers.get(form)
    for pieces in cuttings(FORMS[form]):
        (call, arguments) = joined(make(TOOLS), pieces)
        assert call == ("call", "get_weather"), pieces
        assert arguments[0] == "arguments" and json.loads(arguments[1]) == json.loads(ARGUMENTS), pieces


@pytest.mark.parametrize("form", FORMS)
def test_a_text_that_only_begins_like_a_call_is_text(form: str) -> None:
    make = registry.tool_parsers.get(form)
    for text in (FORMS[form][:4], "plain words", "< [ { not a call", "a [TOOL_CAL"):
        for pieces in cuttings(text):
            assert joined(make(TOOLS), pieces) == [("text", text)], (form, pieces)


@pytest.mark.parametrize("text", area("tools")["tools-reasoning-tail-kept"]["given"]["texts"])
def test_a_reasonings_tail_is_kept(text: str) -> None:
    make = registry.reasoning_parsers.get("qwen3")
    first = joined(make(False, False), [text])
    assert all(joined(make(False, False), pieces) == first for pieces in cuttings(text))
    assert "".join(value for _, value in first) == text.replace("<think>", "").replace("</think>", "")


def test_parsers_of_one_form_share_nothing() -> None:
    make: Any = registry.tool_parsers.get("hermes")
    left = make(TOOLS)
    left.push('<tool_call>\n{"name": "get_we')
    assert joined(make(TOOLS), ["plain words"]) == [("text", "plain words")]
    assert joined(left, ['ather"}']) == [("call", "get_weather"), ("arguments", "{}")]
