"""OpenAI's API, or any server that speaks it, through the package `openai`: chat and text completions.

What the API cannot promise is refused by name: regex, ebnf, and select unless the server returns prompt logprobs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from branchline.lang.backends.base import ChoiceScore, GenCall, Message, Piece, Scores, SelectCall
from branchline.lang.backends.conversation import Vendor, history, most, needed, picture
from branchline.lang.errors import BackendError
from branchline.lang.ir import SELECT_METHODS, Gen, Sampling, Select

MOST_STOPS = 4
# gen's option: its name in the API.
SHARED = {
    "n": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
}


class OpenAI(Vendor[Any]):
    """A model behind OpenAI's chat API (or, with `is_chat_model=False`, its completions API).

    Further arguments go to `openai.AsyncOpenAI` (`api_key`, `base_url`, `timeout`, …), or with `is_azure` to
    `openai.AsyncAzureOpenAI`. `max_tokens_field` names the limit in chat bodies, for servers that know only
    `max_tokens`. `echo_logprobs` says that the completions server answers `echo` with prompt logprobs, which is what
    select needs; OpenAI's own no longer does.
    """

    images = True

    def __init__(
        self,
        model_name: str,
        *,
        is_chat_model: bool = True,
        is_azure: bool = False,
        echo_logprobs: bool = False,
        max_tokens_field: str = "max_completion_tokens",
        **client: Any,
    ) -> None:
        try:
            import openai
        except ImportError:
            needed("openai", "openai")
        kind = openai.AsyncAzureOpenAI if is_azure else openai.AsyncOpenAI
        client.setdefault("max_retries", 0)  # retries are the language's
        super().__init__(f"OpenAI({model_name})", lambda: kind(**client), lambda made: made.close())
        self._errors = openai
        self.model, self.chat = model_name, is_chat_model
        self.completes_text = not is_chat_model
        self._limit = max_tokens_field if is_chat_model else "max_tokens"
        self.options = frozenset(SHARED)
        if is_chat_model:
            self.constraints = frozenset({"json_schema"})
        else:
            self.images = False
            self.select_methods = frozenset(SELECT_METHODS) - (
                {"unconditional_likelihood_normalized"} if echo_logprobs else frozenset(SELECT_METHODS)
            )

    def check(self, block: Gen | Select, sampling: Sampling) -> None:
        """Also the number of stops, which the API bounds."""
        super().check(block, sampling)
        most(self.name, "stop", sampling.stop, MOST_STOPS)

    async def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
        """`POST /chat/completions` or `/completions`; streams when somebody may be reading."""
        client = self._clients.here()
        target = client.chat.completions if self.chat else client.completions
        body = self._body(call)
        count = call.sampling.n or 1
        try:
            if call.context.stream:
                async with aclosing(self._stream(await target.create(**body, stream=True), count)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            answer = await target.create(**body)
        except self._errors.OpenAIError as error:
            raise refused(self.name, error) from error
        if len(answer.choices) != count:
            raise BackendError(f"{self.name} answered {len(answer.choices)} of {count} sequences")
        for choice in answer.choices:
            text = choice.message.content if self.chat else choice.text
            yield Piece(text or "", choice.index, meta(answer, choice.finish_reason))

    async def _stream(self, stream: Any, count: int) -> AsyncGenerator[Piece]:
        """Pieces, then one meta a sequence: usage comes after the last of them."""
        ended: dict[int, str] = {}
        last = None
        async with stream:
            async for chunk in stream:
                last = chunk
                for choice in chunk.choices:
                    text = choice.delta.content if self.chat else choice.text
                    if text:
                        yield Piece(text, choice.index)
                    if choice.finish_reason:
                        ended[choice.index] = choice.finish_reason
        if len(ended) != count:
            raise BackendError(f"{self.name}: the stream ended before the answer did")
        for index, reason in ended.items():
            yield Piece("", index, meta(last, reason))

    def _body(self, call: GenCall) -> dict[str, Any]:
        given = call.sampling.given()
        body: dict[str, Any] = {SHARED[name]: value for name, value in given.items() if name in SHARED}
        body["model"] = self.model
        if call.sampling.max_tokens is not None:
            body[self._limit] = call.sampling.max_tokens
        if call.sampling.stop:
            body["stop"] = list(call.sampling.stop)
        if call.context.stream:
            body["stream_options"] = {"include_usage": True}
        if not self.chat:
            return {**body, "prompt": call.prompt.text}
        body["messages"] = [message(item) for item in history(call.prompt, self.name, prefill=False)]
        if call.gen.json_schema is not None:
            body["response_format"] = strict(call.gen.json_schema)
        return body

    async def score(self, call: SelectCall) -> Scores:
        """Prompt logprobs of the choices' own tokens, by `echo`; all choices at once."""
        rows = await asyncio.gather(*(self._echo(call.prompt.text, choice) for choice in call.select.choices))
        return Scores([ChoiceScore(row) for row in rows])

    async def _echo(self, prefix: str, choice: str) -> tuple[float, ...]:
        create = self._clients.here().completions.create
        try:
            answer = await create(model=self.model, prompt=prefix + choice, max_tokens=1, echo=True, logprobs=1)
        except self._errors.OpenAIError as error:
            raise refused(self.name, error) from error
        given = answer.choices[0].logprobs
        if given is None or given.text_offset is None or given.token_logprobs is None:
            raise BackendError(f"{self.name} returned no prompt logprobs: select is not possible there")
        end = len(prefix) + len(choice)
        entries = list(zip(given.text_offset, given.tokens, given.token_logprobs, strict=True))
        # A token that begins in the prefix and ends in the choice is the choice's; the one generated token is not.
        own = [value for at, token, value in entries if at < end and at + len(token) > len(prefix)]
        return tuple(0.0 if value is None else float(value) for value in own)


def message(item: Message) -> dict[str, Any]:
    """A message in OpenAI's shape; pictures stand before the text."""
    if not item.images:
        return {"role": item.role, "content": item.content}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": picture(source).any_url}} for source in item.images
    ]
    if item.content:
        parts.append({"type": "text", "text": item.content})
    return {"role": item.role, "content": parts}


def strict(schema: str) -> dict[str, Any]:
    """A schema as a response_format that must be kept."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": json.loads(schema)}}


def meta(answer: Any, reason: str | None) -> dict[str, Any]:
    """What every backend tells of an answer."""
    usage = getattr(answer, "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    return {
        "id": answer.id,
        "model": answer.model,
        "finish_reason": {"type": reason},
        "prompt_tokens": getattr(usage, "prompt_tokens", None),
        "completion_tokens": getattr(usage, "completion_tokens", None),
        "cached_tokens": getattr(details, "cached_tokens", None),
    }


def refused(name: str, error: Any) -> BackendError:
    """A vendor's exception as ours: its status, and when to come again."""
    status = getattr(error, "status_code", None)
    response = getattr(error, "response", None)
    after = response.headers.get("retry-after") if response is not None else None
    seconds = float(after) if after and after.replace(".", "", 1).isdigit() else None
    if status is None and "Connection" in type(error).__name__:
        status = 503
    if status is None and "Timeout" in type(error).__name__:
        status = 504
    text = getattr(error, "message", None) or str(error)
    return BackendError(f"{name} answered {status or 'no status'}: {text}", status=status, retry_after_s=seconds)
