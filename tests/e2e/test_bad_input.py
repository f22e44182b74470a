"""Bad input answers quickly with an OpenAI-shaped error that names field, value and remedy, and harms nobody else."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from .stack import Stack

pytestmark = pytest.mark.model
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NATIVE = "/generate"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def native(**params: Any) -> dict[str, Any]:
    return {"text": "Hi", "sampling_params": {"max_new_tokens": 1, **params}}


# path, body, status, words that the message or param must hold
TABLE: list[tuple[str, Any, int, tuple[str, ...]]] = [
    # wrong types
    (CHAT, {**HI, "temperature": "hot"}, 400, ("temperature", "hot")),
    (CHAT, {**HI, "max_tokens": 2.5}, 400, ("max_tokens", "2.5")),
    (CHAT, {**HI, "max_tokens": True}, 400, ("max_tokens",)),
    (CHAT, {**HI, "stream": "yes"}, 400, ("stream",)),
    (CHAT, {"messages": "Hi"}, 400, ("messages",)),
    (CHAT, {"messages": []}, 400, ("messages",)),
    (CHAT, {"messages": [{"content": "Hi"}]}, 400, ("role",)),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        ("image_url",),
    ),
    (CHAT, {}, 400, ("messages",)),
    (CHAT, [1, 2], 400, ("object",)),
    (TEXT, {"prompt": {"a": 1}}, 400, ("prompt",)),
    (TEXT, {}, 400, ("prompt",)),
    (NATIVE, {"sampling_params": {}}, 400, ("text", "input_ids")),
    (NATIVE, {"text": "a", "input_ids": [1], "sampling_params": {}}, 400, ("text", "input_ids")),
    (NATIVE, {"text": "a", "sampling_params": []}, 400, ("sampling_params",)),
    # unknown model
    (CHAT, {**HI, "model": "gpt-zero"}, 404, ("gpt-zero",)),
    (TEXT, {"model": "gpt-zero", "prompt": "x"}, 404, ("gpt-zero",)),
    # empty prompts
    (TEXT, {"prompt": ""}, 400, ("prompt", "empty")),
    (TEXT, {"prompt": []}, 400, ("prompt", "empty")),
    (NATIVE, {"text": "", "sampling_params": {}}, 400, ("text", "empty")),
    (NATIVE, {"input_ids": [], "sampling_params": {}}, 400, ("input_ids", "empty")),
    # sampling values out of range
    (CHAT, {**HI, "temperature": -0.1}, 400, ("temperature", "-0.1")),
    (CHAT, {**HI, "top_p": 0}, 400, ("top_p",)),
    (CHAT, {**HI, "top_p": 1.5}, 400, ("top_p", "1.5")),
    (CHAT, {**HI, "n": 0}, 400, ("n",)),
    (CHAT, {**HI, "n": 100000}, 400, ("n", "100000")),
    (CHAT, {**HI, "presence_penalty": 3}, 400, ("presence_penalty", "3")),
    (CHAT, {**HI, "frequency_penalty": -2.5}, 400, ("frequency_penalty", "-2.5")),
    (CHAT, {**HI, "top_logprobs": 5}, 400, ("top_logprobs", "logprobs")),
    (CHAT, {**HI, "logprobs": True, "top_logprobs": 10000}, 400, ("top_logprobs", "10000")),
    (CHAT, {**HI, "seed": "abc"}, 400, ("seed", "abc")),
    (CHAT, {**HI, "stop": [""]}, 400, ("stop", "empty")),
    (CHAT, {**HI, "stop": ["x"] * 100}, 400, ("stop", "100")),
    (CHAT, {**HI, "stop": 5}, 400, ("stop",)),
    (CHAT, {**HI, "logit_bias": {"5": 1000}}, 400, ("logit_bias", "1000")),
    (NATIVE, native(top_k=0.5), 400, ("top_k",)),
    (NATIVE, native(top_k=-7), 400, ("top_k", "-7")),
    (NATIVE, native(min_p=2), 400, ("min_p", "2")),
    (NATIVE, native(repetition_penalty=0), 400, ("repetition_penalty", "0")),
    (NATIVE, native(max_new_tokens=-1), 400, ("max_new_tokens", "-1")),
    # contradictions
    (NATIVE, native(min_new_tokens=9), 400, ("min_new_tokens", "9")),
    (NATIVE, {"text": ["a", "b"], "rid": ["same", "same"], "sampling_params": {}}, 400, ("rid", "same")),
    (CHAT, {**HI, "max_tokens": 5, "max_completion_tokens": 6}, 400, ("max_tokens", "max_completion_tokens")),
    (CHAT, {**HI, "stream_options": {"include_usage": True}}, 400, ("stream_options", "stream")),
    # constraints that are none, in the client's own words
    (CHAT, {**HI, "response_format": {"type": "xml"}}, 400, ("response_format",)),
    (CHAT, {**HI, "tool_choice": "required"}, 400, ("tool_choice", "tools")),
    (NATIVE, native(regex="(a"), 400, ("regex",)),
    (NATIVE, native(json_schema="{"), 400, ("json_schema",)),
    (NATIVE, native(json_schema=""), 400, ("json_schema",)),
    (CHAT, {**HI, "structural_tag": ""}, 400, ("structural_tag",)),
    (NATIVE, native(ebnf="root ::= ("), 400, ("ebnf",)),
    (NATIVE, native(regex="a", ebnf="root ::= 'a'"), 400, ("regex", "ebnf")),
    # not implemented, named
    (NATIVE, {**native(), "lora_path": "x"}, 404, ("lora_path", "does not exist")),
    (NATIVE, {**native(), "lora_path": {}}, 400, ("lora_path", "name of a loaded adapter")),
    (TEXT, {"prompt": "x", "suffix": "y"}, 400, ("suffix",)),
    (TEXT, {"prompt": "x", "best_of": 3}, 400, ("best_of",)),
]


def check(answer: Any, status: int, words: tuple[str, ...]) -> None:
    """Status, shape and words of an error."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["type"] and error["code"]
    told = f"{error['message']} {error['param']}"
    for word in words:
        assert word in told, f"{word!r} is missing in {told!r}"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"), TABLE, ids=[f"{row[0]} {json.dumps(row[1])[:60]}" for row in TABLE]
)
def test_wrong_field_is_named(stack: Stack, path: str, body: Any, status: int, words: tuple[str, ...]) -> None:
    check(stack.post(path, body, timeout=10), status, words)


RAW: list[tuple[str, bytes, int, tuple[str, ...]]] = [
    ("cut json", b'{"messages": [', 400, ("json", "line 1")),
    ("bad json has its position", b'{\n "messages": nope}', 400, ("json", "line 2")),
    ("NaN", b'{"prompt": "x", "temperature": NaN}', 400, ("json",)),
    ("empty body", b"", 400, ("json",)),
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}', 400, ("UTF-8",)),
    ("lone surrogate", b'{"prompt": "\\ud800"}', 400, ()),
    ("nesting bomb", b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ("nest",)),
    ("huge number", b'{"prompt": "x", "max_tokens": 1e999}', 400, ("json", "column 35")),
]


@pytest.mark.parametrize(("name", "body", "status", "words"), RAW, ids=[row[0] for row in RAW])
@pytest.mark.parametrize("path", [TEXT, NATIVE, CHAT])
def test_broken_body_is_refused(
    stack: Stack, path: str, name: str, body: bytes, status: int, words: tuple[str, ...]
) -> None:
    if name == "lone surrogate" and path == CHAT:
        body = b"{"
        words = ("json",)
    if name == "lone surrogate" and path == NATIVE:
        body = body.replace(b"prompt", b"text")
    answer = stack.client.post(path, content=body, headers={"content-type": "application/json"}, timeout=10)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    for word in words:
        assert word.lower() in message.lower(), message


def test_body_over_the_limit(stack: Stack) -> None:
    body = b'{"prompt": "' + b"x" * (65 << 20) + b'"}'
    answer = stack.client.post(TEXT, content=body, headers={"content-type": "application/json"}, timeout=30)
    check(answer, 413, ("67108864",))


def test_chunked_body_over_the_limit(stack: Stack) -> None:
    def pieces() -> Any:
        yield b'{"prompt": "'
        for _ in range(80):
            yield b"x" * (1 << 20)

    try:
        answer = stack.client.post(TEXT, content=pieces(), headers={"content-type": "application/json"}, timeout=30)
    except Exception as fault:  # the gateway may close while the client still writes
        assert "write" in repr(fault).lower() or "broken" in repr(fault).lower() or "reset" in repr(fault).lower()
    else:
        check(answer, 413, ())


def test_over_long_text_prompt_says_both_numbers(stack: Stack) -> None:
    prompt = "word " * 9000
    count = stack.post("/v1/tokenize", {"prompt": prompt}).json()["count"]
    assert count > 8192
    check(stack.post(TEXT, {"prompt": prompt, "max_tokens": 1}), 400, ("8192", str(count)))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", NATIVE, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
    ],
)
def test_wrong_method_or_path(stack: Stack, method: str, path: str, status: int) -> None:
    answer = stack.client.request(method, path)
    check(answer, status, (path,))
    if status == 405:
        assert answer.headers["allow"]


def test_foreign_host_and_origin_are_refused_on_admin_routes(stack: Stack) -> None:
    assert stack.client.post("/flush_cache", headers={"host": "evil.example"}).status_code == 403
    assert stack.client.post("/flush_cache", headers={"origin": "http://evil.example"}).status_code == 403
    assert stack.client.post("/flush_cache").status_code == 200


def test_garbage_on_the_socket(stack: Stack) -> None:
    assert stack.gateway is not None
    for garbage in (b"\x00\x01\x02\x03\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", stack.gateway.port), timeout=5) as raw:
            raw.sendall(garbage)
            raw.settimeout(5)
            answer = raw.recv(4096)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer
    assert stack.client.get("/health").status_code == 200


def test_neighbour_is_untouched(stack: Stack) -> None:
    """After all of the above a greedy answer is what it always was."""
    assert (
        "Paris"
        in stack.post(
            CHAT,
            {
                **HI,
                "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
                "max_tokens": 24,
                "temperature": 0,
            },
        ).json()["choices"][0]["message"]["content"]
    )
