"""Each vendor's wire as a scripted server speaks it: whole answers, streams, refusals, broken streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from branchline import lang as bl

from .test_runtime import Server, event

Script = list[str] | int | None  # pieces of the answer; a status to refuse with; None: a stream that breaks


@dataclass(frozen=True)
class Wire:
    """One vendor: its backend at a server, and the server's answers."""

    name: str
    make: Callable[[str], bl.Backend]
    install: Callable[[Server, Script], None]
    sent_messages: Callable[[Any], list[tuple[str, str]]]
    sent_schema: Callable[[Any], Any]


def _refusal(status: int) -> web.Response:
    error = {"error": {"message": "too many cooks", "type": "kitchen", "code": status}, "type": "error"}
    return web.json_response(error, status=status, headers={"retry-after": "0"})


def chat_chunk(text: str | None, reason: str | None = None, usage: Any = None) -> bytes:
    choices = [] if usage else [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]
    return event({**_HEAD, "object": "chat.completion.chunk", "choices": choices, "usage": usage})


_HEAD = {"id": "chat-1", "created": 1, "model": "m-1"}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}


def _openai(server: Server, script: Script) -> None:
    def reply(body: Any) -> Any:
        if isinstance(script, int):
            return _refusal(script)
        pieces = script or ["cut"]
        if not body.get("stream"):
            choices = [
                {"index": index, "message": {"role": "assistant", "content": "".join(pieces)}, "finish_reason": "stop"}
                for index in range(body.get("n") or 1)
            ]
            return {**_HEAD, "object": "chat.completion", "choices": choices, "usage": USAGE}
        chunks = [chat_chunk(piece) for piece in pieces]
        if script is not None:
            chunks += [chat_chunk(None, "stop"), chat_chunk(None, usage=USAGE)]
        return [*chunks, event("[DONE]")]

    server.answers["/v1/chat/completions"] = reply


def _sse(kind: str, **values: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n".encode()


def _anthropic(server: Server, script: Script) -> None:
    def reply(body: Any) -> Any:
        if isinstance(script, int):
            return _refusal(script)
        usage = {"input_tokens": 2, "output_tokens": 1, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 0}
        head = {"id": "msg-1", "type": "message", "role": "assistant", "model": "m-1", "content": [], "usage": usage}
        events = [
            _sse("message_start", message={**head, "stop_reason": None, "stop_sequence": None}),
            _sse("content_block_start", index=0, content_block={"type": "text", "text": ""}),
        ]
        for piece in script or ["cut"]:
            events.append(_sse("content_block_delta", index=0, delta={"type": "text_delta", "text": piece}))
        if script is not None:
            events += [
                _sse("content_block_stop", index=0),
                _sse("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
                _sse("message_stop"),
            ]
        return events

    server.answers["/v1/messages"] = reply


def _gemini(server: Server, script: Script) -> None:
    def reply(body: Any) -> Any:
        if isinstance(script, int):
            return _refusal(script)
        usage = {"promptTokenCount": 5, "candidatesTokenCount": 2, "cachedContentTokenCount": 3}
        pieces = script or ["cut"]
        events = []
        for index, piece in enumerate(pieces):
            candidate: dict[str, Any] = {"content": {"role": "model", "parts": [{"text": piece}]}, "index": 0}
            if script is not None and index == len(pieces) - 1:
                candidate["finishReason"] = "STOP"
            events.append({"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m-1", "responseId": "1"})
        return [event(item) for item in events]

    server.answers["/v1/models/m:streamGenerateContent"] = reply


def _chat_messages(body: Any) -> list[tuple[str, str]]:
    return [(item["role"], item["content"]) for item in body["messages"]]


def _system_apart(body: Any) -> list[tuple[str, str]]:
    return [("system", body["system"]), *_chat_messages(body)]


def _gemini_messages(body: Any) -> list[tuple[str, str]]:
    system = body["systemInstruction"]["parts"][0]["text"]
    rest = [(item["role"], item["parts"][0]["text"]) for item in body["contents"]]
    return [("system", system), *((role.replace("model", "assistant"), text) for role, text in rest)]


def _chat_schema(body: Any) -> Any:
    given = body["response_format"]["json_schema"]
    assert given["strict"] is True
    return given["schema"]


WIRES = [
    Wire(
        "openai",
        lambda url: bl.OpenAI("m", api_key="k", base_url=f"{url}/v1"),
        _openai,
        _chat_messages,
        _chat_schema,
    ),
    Wire(
        "anthropic",
        lambda url: bl.Anthropic("m", api_key="k", base_url=url),
        _anthropic,
        _system_apart,
        lambda body: body["output_config"]["format"]["schema"],
    ),
    Wire(
        "gemini",
        lambda url: bl.Gemini("m", api_key="k", http_options={"base_url": url}),
        _gemini,
        _gemini_messages,
        lambda body: body["generationConfig"]["responseJsonSchema"],
    ),
    Wire(
        "litellm",
        lambda url: bl.LiteLLM("openai/m", json_schema=True, api_key="k", api_base=f"{url}/v1"),
        _openai,
        _chat_messages,
        _chat_schema,
    ),
]
