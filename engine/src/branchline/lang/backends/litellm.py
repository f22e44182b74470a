"""Any provider the package `litellm` knows, in OpenAI's shapes; what a provider cannot do is asked of `litellm`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from branchline.lang.backends.base import Backend, GenCall, Piece
from branchline.lang.backends.conversation import history, needed
from branchline.lang.backends.openai import message, meta, refused, strict
from branchline.lang.errors import BackendError

OPTIONS = ("n", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed", "stop", "max_tokens")


class LiteLLM(Backend):
    """A model by `litellm`'s name, e.g. `"openai/gpt-4o"`. Further arguments go to each `litellm.acompletion`.

    `options` and `constraints` are what `litellm` says of the model; `json_schema=True` overrules it for a server of
    one's own that it does not know.
    """

    completes_text = False
    images = True

    def __init__(self, model_name: str, *, json_schema: bool | None = None, **call: Any) -> None:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the internet
        try:
            import litellm
            import openai
        except ImportError:
            needed("litellm", "litellm")
        self._litellm, self._errors = litellm, openai  # its exceptions derive from those of `openai`
        self.model, self._call = model_name, {"num_retries": 0, "max_retries": 0, **call}
        self.name = f"LiteLLM({model_name})"
        try:
            known = litellm.get_supported_openai_params(model=model_name)
        except openai.BadRequestError:
            known = None
        if known is None:
            raise BackendError(f"litellm knows no provider of {model_name!r}: write provider/model", status=400)
        self.options = frozenset(OPTIONS) & frozenset(known)
        schema = litellm.supports_response_schema(model=model_name) if json_schema is None else json_schema
        self.constraints = frozenset({"json_schema"}) if schema else frozenset()

    async def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
        """`litellm.acompletion`; streams when somebody may be reading and there is one sequence."""
        count = call.sampling.n or 1
        body = self._body(call)
        try:
            if call.context.stream and count == 1:
                async with aclosing(self._stream(body)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            answer = await self._litellm.acompletion(**body)
        except self._errors.OpenAIError as error:
            raise refused(self.name, error) from error
        if len(answer.choices) != count:
            raise BackendError(f"{self.name} answered {len(answer.choices)} of {count} sequences")
        for index, choice in enumerate(answer.choices):
            yield Piece(choice.message.content or "", index, meta(answer, choice.finish_reason))

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[Piece]:
        reason, last = None, None
        stream = await self._litellm.acompletion(**body, stream=True, stream_options={"include_usage": True})
        async with aclosing(stream):
            async for chunk in stream:
                last = chunk
                for choice in chunk.choices:
                    if choice.delta.content:
                        yield Piece(choice.delta.content)
                    reason = choice.finish_reason or reason
        if reason is None:
            raise BackendError(f"{self.name}: the stream ended before the answer did")
        yield Piece("", 0, meta(last, reason))

    def _body(self, call: GenCall) -> dict[str, Any]:
        given = call.sampling.given()
        body: dict[str, Any] = {name: given[name] for name in OPTIONS if name in given}
        body |= {"model": self.model, **self._call}
        if call.sampling.stop:
            body["stop"] = list(call.sampling.stop)
        body["messages"] = [message(item) for item in history(call.prompt, self.name, prefill=False)]
        if call.gen.json_schema is not None:
            body["response_format"] = strict(call.gen.json_schema)
        return body
