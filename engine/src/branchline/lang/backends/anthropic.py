"""Anthropic's Messages API through the package `anthropic`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from branchline.lang.backends.base import GenCall, Message, Piece
from branchline.lang.backends.conversation import Vendor, history, needed, picture
from branchline.lang.backends.openai import refused
from branchline.lang.errors import BackendError

DEFAULT_MAX_TOKENS = 1024  # the API demands a limit
OPTIONS = ("temperature", "top_p", "top_k")


class Anthropic(Vendor[Any]):
    """A Claude model. Further arguments go to `anthropic.AsyncAnthropic` (`api_key`, `base_url`, `timeout`, …).

    `prefill=True` is for models that go on with a begun assistant message; newer ones refuse that.
    """

    images = True
    options = frozenset(OPTIONS)
    constraints = frozenset({"json_schema"})

    def __init__(self, model_name: str, *, prefill: bool = False, **client: Any) -> None:
        try:
            import anthropic
        except ImportError:
            needed("anthropic", "anthropic")
        client.setdefault("max_retries", 0)  # retries are the language's
        super().__init__(
            f"Anthropic({model_name})", lambda: anthropic.AsyncAnthropic(**client), lambda made: made.close()
        )
        self._errors = anthropic
        self.model, self.prefill = model_name, prefill

    async def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
        """`POST /v1/messages`, streamed; the answer's text is that of its text blocks."""
        create = self._clients.here().messages.create
        seen: dict[str, Any] = {}
        whole = False
        try:
            async with await create(**self._body(call), stream=True) as stream:
                async for event in stream:
                    if event.type == "message_start":
                        seen |= {"id": event.message.id, "model": event.message.model, "usage": event.message.usage}
                    elif event.type == "content_block_delta" and event.delta.type == "text_delta":
                        yield Piece(event.delta.text)
                    elif event.type == "message_delta":
                        seen |= {"reason": event.delta.stop_reason, "out": event.usage.output_tokens}
                    elif event.type == "message_stop":
                        whole = True
        except self._errors.AnthropicError as error:
            raise refused(self.name, error) from error
        if not whole:
            raise BackendError(f"{self.name}: the stream ended before the answer did")
        yield Piece("", 0, _meta(seen))

    def _body(self, call: GenCall) -> dict[str, Any]:
        messages = history(call.prompt, self.name, prefill=self.prefill)
        given = call.sampling.given()
        # A new list: the conversation itself keeps its system messages.
        system = "\n\n".join(item.content for item in messages if item.role == "system")
        # The package's own arguments no longer name the sampling options; models that take them still do.
        body: dict[str, Any] = {
            "extra_body": {name: given[name] for name in OPTIONS if name in given},
            "model": self.model,
            "max_tokens": call.sampling.max_tokens or DEFAULT_MAX_TOKENS,
            "messages": [_message(item) for item in messages if item.role != "system"],
        }
        if system:
            body["system"] = system
        if call.sampling.stop:
            body["stop_sequences"] = list(call.sampling.stop)
        if call.gen.json_schema is not None:
            schema = json.loads(call.gen.json_schema)
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        return body


def _message(item: Message) -> dict[str, Any]:
    if not item.images:
        return {"role": item.role, "content": item.content}
    parts: list[dict[str, Any]] = []
    for source in item.images:
        shown = picture(source)
        where = (
            {"type": "url", "url": shown.url}
            if shown.url
            else {"type": "base64", "media_type": shown.media_type, "data": shown.base64}
        )
        parts.append({"type": "image", "source": where})
    if item.content:
        parts.append({"type": "text", "text": item.content})
    return {"role": item.role, "content": parts}


def _meta(seen: dict[str, Any]) -> dict[str, Any]:
    usage = seen.get("usage")
    cached = getattr(usage, "cache_read_input_tokens", None) or 0
    written = getattr(usage, "cache_creation_input_tokens", None) or 0
    reason = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}.get(seen["reason"], seen["reason"])
    return {
        "id": seen.get("id"),
        "model": seen.get("model"),
        "finish_reason": {"type": reason},
        "prompt_tokens": getattr(usage, "input_tokens", 0) + cached + written,
        "completion_tokens": seen.get("out"),
        "cached_tokens": cached,
    }
