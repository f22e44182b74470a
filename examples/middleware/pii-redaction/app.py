"""Replaces e-mail addresses and phone numbers in prompts and in what is streamed back.

A stream's events reach one instance, so what may be the beginning of an address is held back until the next event.
"""

import json
import re

from wit_world import exports
from wit_world.imports.types import (
    Event,
    EventAction,
    EventAction_Continue,
    EventAction_Replace,
    HeaderChanges,
    Needs,
    NewEvent,
    Request,
    RequestAction,
    RequestAction_Continue,
    RequestAction_Modify,
    RequestChanges,
    Response,
    ResponseAction,
    ResponseAction_Continue,
    ResponseAction_Modify,
    ResponseChanges,
)

PRIVATE = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]*\w|\+?\d[\d ()-]{7,}\d")
# What could still become private: a word with the signs of an address or number, up to the end.
OPEN = re.compile(r"[\w.+@() -]{1,64}$")
NOTHING = HeaderChanges(set=[], add=[], remove=[])
held: dict[int, str] = {}


def redact(text: str) -> str:
    return PRIVATE.sub("[redacted]", text)


def redact_strings(value: object) -> object:
    """The same JSON value with its strings redacted; numbers, such as times, are nobody's."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [redact_strings(item) for item in value]
    if isinstance(value, dict):
        return {key: redact_strings(item) for key, item in value.items()}
    return value


def redact_body(body: bytes | None) -> bytes | None:
    """The body with redacted text, None if there is nothing to redact."""
    text = (body or b"").decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except ValueError:
        clean = redact(text)
        return clean.encode() if clean != text else None
    clean_value = redact_strings(value)
    return json.dumps(clean_value).encode() if clean_value != value else None


class About(exports.About):
    def describe(self) -> Needs:
        return Needs(request_body=True, response_body=True)


class OnRequest(exports.OnRequest):
    def handle(self, request: Request) -> RequestAction:
        body = redact_body(request.body)
        if body is None:
            return RequestAction_Continue()
        changes = RequestChanges(method=None, path=None, query=None, headers=NOTHING, body=body)
        return RequestAction_Modify(changes)


class OnResponse(exports.OnResponse):
    def handle(self, request: Request, response: Response) -> ResponseAction:
        body = redact_body(response.body)
        if body is None:
            return ResponseAction_Continue()
        return ResponseAction_Modify(ResponseChanges(status=None, headers=NOTHING, body=body))


class OnStreamEvent(exports.OnStreamEvent):
    def handle(self, request: Request, event: Event) -> EventAction:
        if event.data == "[DONE]":
            return EventAction_Continue()
        try:
            chunk = json.loads(event.data)
        except ValueError:
            return EventAction_Continue()
        for choice in chunk.get("choices", []):
            delta = choice.get("delta") or {}
            index = choice.get("index", 0)
            text = held.pop(index, "") + (delta.get("content") or "")
            if not text:
                continue
            if not choice.get("finish_reason"):
                tail = OPEN.search(text)
                if tail and re.search(r"[@\d]", tail.group()):
                    held[index] = tail.group()
                    text = text[: tail.start()]
            delta["content"] = redact(text)
            choice["delta"] = delta
        return EventAction_Replace([NewEvent(name=event.name, data=json.dumps(chunk))])
