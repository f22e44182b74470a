"""Google's Gemini models through the package `google-genai`: the Gemini API, or Vertex AI."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from branchline.lang.backends.base import GenCall, Message, Piece
from branchline.lang.backends.conversation import Vendor, history, most, needed, picture
from branchline.lang.errors import BackendError
from branchline.lang.ir import Gen, Sampling, Select

MOST_STOPS = 5
# gen's option: its name in GenerateContentConfig.
CONFIG = {
    "max_tokens": "max_output_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
}
REASONS = {"STOP": "stop", "MAX_TOKENS": "length"}


class Gemini(Vendor[Any]):
    """A Gemini model. Further arguments go to `google.genai.Client` (`api_key`, `http_options`, `project`, …)."""

    images = True
    options = frozenset(CONFIG)
    constraints = frozenset({"json_schema"})

    def __init__(self, model_name: str, **client: Any) -> None:
        try:
            from google import genai
            from google.genai import errors, types
        except ImportError:
            needed("google-genai", "gemini")
        kind = type(self).__name__
        super().__init__(f"{kind}({model_name})", lambda: genai.Client(**client).aio, lambda made: made.aclose())
        self._errors, self._types = errors, types
        self.model = model_name

    def check(self, block: Gen | Select, sampling: Sampling) -> None:
        """Also the number of stops, which the API bounds."""
        super().check(block, sampling)
        most(self.name, "stop", sampling.stop, MOST_STOPS)

    async def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
        """`models.generate_content_stream`; the answer's text is that of its parts that are no thoughts."""
        contents, config = self._request(call)
        reason, last = None, None
        try:
            stream = await self._clients.here().models.generate_content_stream(
                model=self.model, contents=contents, config=config
            )
            async with aclosing(stream):
                async for chunk in stream:
                    last = chunk
                    if chunk.prompt_feedback is not None and chunk.prompt_feedback.block_reason:
                        raise BackendError(
                            f"{self.name} blocked the prompt: {chunk.prompt_feedback.block_reason}", status=400
                        )
                    for candidate in chunk.candidates or []:
                        for part in (candidate.content.parts if candidate.content else None) or []:
                            if part.text and not part.thought:
                                yield Piece(part.text)
                        if candidate.finish_reason:
                            reason = str(candidate.finish_reason.value)
        except self._errors.APIError as error:
            raise BackendError(f"{self.name} answered {error.code}: {error.message}", status=error.code) from error
        except OSError as error:
            raise BackendError(f"{self.name} cannot be reached: {error}", status=503) from error
        if reason is None:
            raise BackendError(f"{self.name}: the stream ended before the answer did")
        usage = last.usage_metadata if last is not None else None
        yield Piece("", 0, _meta(last, usage, REASONS.get(reason, reason.lower())))

    def _request(self, call: GenCall) -> tuple[list[Any], Any]:
        messages = history(call.prompt, self.name, prefill=False)
        given = call.sampling.given()
        config: dict[str, Any] = {CONFIG[name]: value for name, value in given.items() if name in CONFIG}
        system = "\n\n".join(item.content for item in messages if item.role == "system")
        if system:
            config["system_instruction"] = system
        if call.sampling.stop:
            config["stop_sequences"] = list(call.sampling.stop)
        if call.gen.json_schema is not None:
            config |= {
                "response_mime_type": "application/json",
                "response_json_schema": json.loads(call.gen.json_schema),
            }
        contents = [self._content(item) for item in messages if item.role != "system"]
        return contents, self._types.GenerateContentConfig(**config)

    def _content(self, item: Message) -> Any:
        part = self._types.Part
        parts = []
        for source in item.images:
            shown = picture(source)
            if shown.url:
                parts.append(part.from_uri(file_uri=shown.url, mime_type=shown.media_type))
            else:
                parts.append(part.from_bytes(data=shown.data, mime_type=shown.media_type))
        if item.content:
            parts.append(part.from_text(text=item.content))
        role = "model" if item.role == "assistant" else item.role
        return self._types.Content(role=role, parts=parts)


class VertexAI(Gemini):
    """A Gemini model on Vertex AI: `project` and `location` as given, or from the environment."""

    def __init__(self, model_name: str, **client: Any) -> None:
        super().__init__(model_name, **{"vertexai": True, **client})


def _meta(last: Any, usage: Any, reason: str) -> dict[str, Any]:
    return {
        "id": getattr(last, "response_id", None),
        "model": getattr(last, "model_version", None),
        "finish_reason": {"type": reason},
        "prompt_tokens": getattr(usage, "prompt_token_count", None),
        "completion_tokens": getattr(usage, "candidates_token_count", None),
        "cached_tokens": getattr(usage, "cached_content_token_count", None),
    }
