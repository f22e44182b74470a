"""Constraints over the wire: what is asked for is given or refused before the first token, in every family and mode."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases.loader import case

from .conftest import Starter
from .stack import Stack, collect

pytestmark = pytest.mark.model
HI: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 24}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture
def stack(stacks: Starter) -> Iterator[Stack]:
    """A stack whose compiler has time on a busy machine."""
    running = stacks("--grammar-timeout", "60")
    yield running
    running.assert_idle(30)


def test_grammar_empty_regex_through_the_gateway(stack: Stack) -> None:
    given = case("grammar-empty-regex")["given"]
    for constraint in given["constraints"]:
        params = {**given["sampling_params"], **constraint}
        answer = stack.post("/generate", {"text": "x", "sampling_params": params})
        if "regex" in constraint:
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert re.fullmatch(constraint["regex"], body["text"]), body
            assert body["meta_info"]["finish_reason"]["type"] == "stop"
        else:
            assert answer.status_code == 400, (constraint, answer.text)
            assert answer.json()["error"]["param"].endswith(next(iter(constraint)))
    empty = stack.post("/v1/completions", {"model": "default", "prompt": "x", "max_tokens": 4, "guided_choice": []})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "guided_choice")


@pytest.mark.parametrize("stream", [False, True])
def test_grammar_invalid_schema_400_through_the_gateway(stack: Stack, stream: bool) -> None:
    given, right = (case("grammar-invalid-schema-400")[key] for key in ("given", "right"))
    for schema, status in zip(given["json_schema_each"], right["status_each"], strict=True):
        params = {"json_schema": schema, "max_new_tokens": 8}
        answer = stack.post("/generate", {"text": "x", "sampling_params": params, "stream": stream})
        assert answer.status_code == status, (schema, answer.text)
    assert stack.generate("x", sampling_params={"max_new_tokens": 2})["text"] is not None


@pytest.mark.parametrize("stream", [False, True])
def test_grammar_fails_closed_through_the_gateway(stack: Stack, stream: bool) -> None:
    given = case("grammar-fails-closed")["given"]
    for constraint in ({"response_format": given["response_format"]}, *given["also"]):
        answer = stack.post("/v1/chat/completions", {**HI, **constraint, "stream": stream})
        assert answer.status_code == 400, (constraint, answer.text)
        assert "event-stream" not in answer.headers["content-type"]


def test_every_family_gives_a_value_of_the_schema_streamed_or_not(stack: Stack) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}
    flat = {"type": "json_schema", "name": "p", "schema": PERSON}
    texts: dict[str, str] = {}
    chat = {**HI, "response_format": named, "temperature": 0, "max_tokens": 48}
    texts["chat"] = stack.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
    with stack.stream("/v1/chat/completions", chat) as data:
        parts = [one["choices"][0] for one in collect(data) if one["choices"]]
    texts["streamed"] = "".join(part["delta"].get("content") or "" for part in parts)
    assert parts[-1]["finish_reason"] == "stop"
    body = {"model": "default", "input": "x", "max_output_tokens": 48, "temperature": 0, "text": {"format": flat}}
    answer = stack.post("/v1/responses", body).json()
    texts["responses"] = answer["output"][-1]["content"][0]["text"]
    body = {**HI, "max_tokens": 48, "temperature": 0, "output_config": {"format": flat}}
    texts["messages"] = stack.post("/v1/messages", body).json()["content"][0]["text"]
    native = stack.generate("x", sampling_params={"json_schema": json.dumps(PERSON), "max_new_tokens": 48})
    texts["generate"] = native["text"]
    for family, text in texts.items():
        value = json.loads(text)
        assert set(value) == {"name", "kind"} and len(value["name"]) <= 12 and value["kind"] in "ab", (family, text)
    assert texts["chat"] == texts["streamed"]
