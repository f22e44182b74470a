"""Our own server over HTTP: `/generate`, `/v1/score`, `/v1/leases`, `/v1/tokenize`. A connection pool an event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp

from branchline.lang.backends import choosing
from branchline.lang.backends.base import (
    Backend,
    ChoiceScore,
    Context,
    GenCall,
    Lease,
    Markup,
    Piece,
    Prompt,
    Scores,
    SelectCall,
)
from branchline.lang.backends.http import Sessions
from branchline.lang.errors import BackendError, UnsupportedError
from branchline.lang.ir import SELECT_METHODS
from branchline.lang.templates import get_chat_template

# gen's option: its name in sampling_params.
PARAMS = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
}
TOP = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
SENTINEL = "\u2042"
NOT_OFFERED = frozenset({404, 405, 501})  # a server in front of workers that score otherwise


class Runtime(Backend):
    """A Branchline server at `base_url`.

    `api_key` is sent as a bearer token. `connect_timeout_s` bounds connecting, `read_timeout_s` the gap between two
    pieces; a whole call is bounded by its block's `timeout_s`. `chat_template` is a name of `get_chat_template`, or how
    to write roles, instead of the model's own template.
    """

    options = frozenset(PARAMS) | frozenset(TOP)
    constraints = frozenset({"regex", "json_schema", "ebnf"})
    select_methods = frozenset(SELECT_METHODS)
    leases = True

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8080",
        *,
        api_key: str | None = None,
        model: str | None = None,
        chat_template: str | Markup | None = None,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float | None = 600.0,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.name = f"Runtime({self.base_url})"
        self.model = model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s)
        self._sessions = Sessions(timeout, self._headers)
        self.chat_template = get_chat_template(chat_template) if isinstance(chat_template, str) else chat_template
        self._markup: Markup | None = None

    # ---- calls ---------------------------------------------------------------------------------

    async def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
        """`POST /generate`; streams when somebody may be reading and there is one sequence."""
        body = self._body(call)
        count = call.sampling.n or 1
        if not call.context.stream or count > 1:
            answers = await self._post("/generate", body, call.context)
            for index, item in enumerate(answers if isinstance(answers, list) else [answers]):
                yield Piece(item["text"], index, item["meta_info"])
            return
        sent, meta = "", None
        async with aclosing(self._events("/generate", {**body, "stream": True}, call.context)) as events:
            async for data in events:
                text = data["text"]
                yield Piece(text[len(sent) :])
                sent, meta = text, data["meta_info"]
        if meta is None:
            raise BackendError(f"{self.name} ended the stream without an answer")
        yield Piece("", 0, meta)

    def _body(self, call: GenCall) -> dict[str, Any]:
        given = call.sampling.given()
        params = {PARAMS[name]: value for name, value in given.items() if name in PARAMS}
        for name in ("regex", "json_schema", "ebnf"):
            if (value := getattr(call.gen, name)) is not None:
                params[name] = value
        body: dict[str, Any] = {"text": call.prompt.text, "sampling_params": params}
        body |= {name: given[name] for name in TOP if name in given}
        return self._with_lease(body, call.context)

    def _with_lease(self, body: dict[str, Any], context: Context) -> dict[str, Any]:
        if self.model is not None:
            body["model"] = self.model
        if context.lease is not None:
            body["lease"] = {"id": context.lease}
        return body

    async def score(self, call: SelectCall) -> Scores:
        """`POST /v1/score`: all choices in one request, over a prefix that is computed once."""
        text, choices = call.prompt.text, call.select.choices
        prefix, *rows = await asyncio.gather(*(self._ids(item) for item in (text, *(text + one for one in choices))))
        if not prefix or any(row[:1] != prefix[:1] for row in rows):  # nothing stands before them that gives a logprob
            head = await self._head()
            prefix, rows = head + prefix, [head + row for row in rows]
        plan = choosing.plan(prefix, rows)
        found = await self._scored(plan, call.context)
        if call.select.method != "unconditional_likelihood_normalized":
            return found
        bare = Context(call.context.program, call.context.branch)
        alone, _ = await self._logprobs(plan.tails, 0, bare)
        return Scores(choosing.without_prefix(found.choices, alone), found.meta)

    async def _scored(self, plan: choosing.Plan, context: Context) -> Scores:
        if plan.start > 0:
            body = {"prompt": list(plan.rows[0][: plan.start]), "choices": [list(tail) for tail in plan.tails]}
            try:
                answer = await self._post("/v1/score", self._with_lease(body, context), context)
            except BackendError as error:
                if error.status not in NOT_OFFERED:
                    raise
            else:
                return Scores(choosing.scored(answer, plan.tails), choosing.usage(answer))
        rows, meta = await self._logprobs(plan.rows, plan.start, context)
        return Scores([ChoiceScore(row) for row in rows], meta)

    async def _head(self) -> list[int]:
        """The id that a text of this model begins after: its beginning-of-text id, else its end-of-text one."""
        try:
            info = await self._get("/get_model_info")
        except BackendError as error:
            if error.status not in NOT_OFFERED:
                raise
            return []
        begins = info.get("bos_token_id")
        ends = info.get("eos_token_ids") or []
        return [begins] if isinstance(begins, int) else list(ends[:1])

    async def _ids(self, text: str) -> list[int]:
        body = {"prompt": text} if self.model is None else {"prompt": text, "model": self.model}
        ids: list[int] = (await self._post("/v1/tokenize", body, None))["tokens"]
        return ids

    async def _logprobs(
        self, rows: Sequence[Sequence[int]], start: int, context: Context
    ) -> tuple[list[tuple[float, ...]], dict[str, Any]]:
        """Prompt logprobs of several texts from `start` on, as one batch: for what `/v1/score` does not take."""
        body: dict[str, Any] = {"input_ids": [list(row) for row in rows], "sampling_params": {"max_new_tokens": 0}}
        body |= {"return_logprob": True, "logprob_start_len": start}
        answers = await self._post("/generate", self._with_lease(body, context), context)
        metas = [answer["meta_info"] for answer in answers]
        if len(metas) != len(rows):
            raise BackendError(f"{self.name} answered {len(metas)} of {len(rows)} texts")
        found = [choosing.logprobs(meta, row[start:]) for meta, row in zip(metas, rows, strict=True)]
        return found, {name: sum(meta.get(name) or 0 for meta in metas) for name in ("prompt_tokens", "cached_tokens")}

    async def flush_cache(self) -> None:
        """`POST /flush_cache`."""
        await self._post("/flush_cache", {}, None, plain=True)

    async def server_info(self) -> dict[str, Any]:
        """`GET /server_info`."""
        return await self._get("/server_info")

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            async with self._sessions.here().get(self.base_url + path) as answer:
                raw = await answer.read()
                if answer.status >= 400:
                    raise _refused(self.name, answer, raw)
                info: dict[str, Any] = json.loads(raw)
                return info
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BackendError(f"{self.name} cannot be used: {error or type(error).__name__}", status=503) from error

    # ---- leases --------------------------------------------------------------------------------

    async def plant(self, prompt: Prompt, ttl_ms: int, context: Context) -> Lease | None:
        """`POST /v1/leases`. A refusal for want of budget is no failure: the branches run without a lease."""
        body = self._with_lease({"prompt": prompt.text, "ttl_ms": ttl_ms}, Context(context.program, context.branch))
        try:
            answer = await self._post("/v1/leases", body, context)
        except BackendError as error:
            if error.status in (404, 405, 409, 429, 501, 503):
                return None
            raise
        return Lease(answer["id"], answer.get("tokens", 0), answer.get("ttl_ms", ttl_ms))

    async def renew(self, lease: Lease, ttl_ms: int) -> None:
        """`POST /v1/leases/{id}/renew`."""
        await self._post(f"/v1/leases/{lease.id}/renew", {"ttl_ms": ttl_ms}, None)

    async def release(self, lease: Lease) -> None:
        """`DELETE /v1/leases/{id}`; one that is gone already is no error."""
        async with self._sessions.here().delete(self.base_url + f"/v1/leases/{lease.id}") as answer:
            await answer.read()

    # ---- markup --------------------------------------------------------------------------------

    async def markup(self) -> Markup:
        """Derived from the model's own chat template: conversations with a marked content are rendered and cut apart.

        Raises:
            UnsupportedError: the template writes a message differently depending on others.
        """
        if self.chat_template is not None:
            return self.chat_template
        if self._markup is None:
            try:
                self._markup = await self._derive(system=True)
            except BackendError as error:
                if error.status != 400:
                    raise
                self._markup = await self._derive(system=False)  # the template refuses system messages
        return self._markup

    async def _render(self, roles: Sequence[str], generation: bool) -> list[str]:
        """The template's text around the contents of such messages."""
        messages = [{"role": role, "content": SENTINEL} for role in roles]
        body: dict[str, Any] = {"messages": messages, "add_generation_prompt": generation}
        if self.model is not None:
            body["model"] = self.model
        ids = (await self._post("/v1/tokenize", body, None))["tokens"]
        named = {} if self.model is None else {"model": self.model}
        answer = await self._post("/v1/detokenize", {"tokens": ids, "skip_special_tokens": False, **named}, None)
        return str(answer.get("text", answer.get("prompt"))).split(SENTINEL)

    async def _derive(self, system: bool) -> Markup:
        first = ("system",) if system else ()
        whole = await self._render((*first, "user", "assistant", "user"), False)
        asked = await self._render((*first, "user"), True)
        alone = await self._render(("user",), False)
        if len(whole) != len(first) + 4 or len(asked) != len(first) + 2 or len(alone) != 2:
            raise UnsupportedError(f"the chat template of {self.name} hides contents: write the markup as text")
        before, asking, between = whole[-4:-1]
        begin_assistant = asked[-1][len(alone[1]) :] if asked[-1].startswith(alone[1]) else None
        if begin_assistant is None or not asking.endswith(begin_assistant):
            raise UnsupportedError(f"the chat template of {self.name} cannot be written piece by piece")
        begin_user, end_system = _cut(before if system else between, alone[0])
        return Markup(
            begin={**({"system": whole[0]} if system else {}), "user": begin_user, "assistant": begin_assistant},
            end={
                **({"system": end_system} if system else {}),
                "user": asking[: len(asking) - len(begin_assistant)],
                "assistant": between[: len(between) - len(begin_user)],
            },
            default_system=alone[0][: len(alone[0]) - len(begin_user)],
        )

    # ---- transport -----------------------------------------------------------------------------

    def _request_headers(self, context: Context | None) -> dict[str, str]:
        if context is None:
            return {}
        # The gateway keeps requests of one session together where its policy does (sticky, consistent_hashing).
        headers = {"x-branchline-program": context.program, "x-branchline-session": context.program}
        if context.fork_width:
            headers["x-branchline-fork-width"] = str(context.fork_width)
        if context.expected_tokens:
            headers["x-branchline-expected-tokens"] = str(context.expected_tokens)
        return headers

    async def _post(self, path: str, body: dict[str, Any], context: Context | None, *, plain: bool = False) -> Any:
        try:
            async with self._sessions.here().post(
                self.base_url + path, json=body, headers=self._request_headers(context)
            ) as answer:
                raw = await answer.read()
                if answer.status >= 400:
                    raise _refused(self.name, answer, raw)
                return None if plain else json.loads(raw)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BackendError(f"{self.name} cannot be used: {error or type(error).__name__}", status=503) from error

    async def _events(self, path: str, body: dict[str, Any], context: Context) -> AsyncGenerator[Any]:
        """Data of an event stream, up to `[DONE]`.

        Raises:
            BackendError: the stream broke, or carried an error.
        """
        try:
            async with self._sessions.here().post(
                self.base_url + path, json=body, headers=self._request_headers(context)
            ) as answer:
                if answer.status >= 400:
                    raise _refused(self.name, answer, await answer.read())
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    value = json.loads(data)
                    if "error" in value:
                        raise BackendError(f"{self.name}: {_message(value)}")
                    yield value
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BackendError(f"{self.name}: the stream broke: {error or type(error).__name__}", status=503) from error
        raise BackendError(f"{self.name}: the stream ended before the answer did")

    def close(self) -> None:
        """Ends the connections; the backend can be used again."""
        self._sessions.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await self._sessions.aclose()


def _cut(joint: str, first: str) -> tuple[str, str]:
    """Where a message's end meets the next one's beginning: the longest common end of both is the beginning."""
    size = 0
    while size < min(len(joint), len(first)) and joint[-1 - size] == first[-1 - size]:
        size += 1
    begin = joint[len(joint) - size :]
    return begin, joint[: len(joint) - size]


def _message(value: Any) -> str:
    error = value.get("error", value) if isinstance(value, dict) else value
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _refused(name: str, answer: aiohttp.ClientResponse, raw: bytes) -> BackendError:
    try:
        text = _message(json.loads(raw))
    except ValueError:
        text = raw[:200].decode(errors="replace")
    after = answer.headers.get("retry-after")
    seconds = float(after) if after and after.replace(".", "", 1).isdigit() else None
    return BackendError(f"{name} answered {answer.status}: {text}", status=answer.status, retry_after_s=seconds)
