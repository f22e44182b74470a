"""A backend without a model: answers from a list or a function, and counts what a real one would have been asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from branchline.lang.backends.base import (
    CHATML,
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
from branchline.lang.errors import BackendError
from branchline.lang.ir import SELECT_METHODS, Sampling

Answer = str | Sequence[str] | BaseException


@dataclass(slots=True)
class Meter:
    """What a run cost, in characters for tokens: calls, in, cached and out, prefixes planted and held."""

    calls: int = 0
    selects: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    planted: int = 0
    held: int = 0
    most_held: int = 0
    in_flight: int = 0
    most_in_flight: int = 0


@dataclass(slots=True)
class Mock(Backend):
    """Answers calls in order from `answers` (repeated for ever), or by a function of the call.

    A text answers all n sequences alike and a list each its own; an exception is raised. `scores` gives a select's
    logprobs: a mapping of choice to its tokens' logprobs, or a function of the call; by default the first choice wins.
    Every call is kept in `calls`, `selects` and `planted`; `meter` counts.
    """

    answers: Iterable[Answer] | Callable[[GenCall], Any] = ("answer",)
    scores: Any = None
    chunk: int = 4  # characters a piece
    delay_s: float = 0.0  # before the first piece
    style: Markup = field(default_factory=lambda: CHATML)
    calls: list[GenCall] = field(default_factory=list)
    selects: list[SelectCall] = field(default_factory=list)
    planted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    aborted: list[GenCall] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    _seen: set[str] = field(default_factory=set)
    _next: Any = None
    _ids: Any = field(default_factory=itertools.count)

    name = "mock"
    options = frozenset(Sampling.__dataclass_fields__)
    constraints = frozenset({"regex", "json_schema", "ebnf"})
    select_methods = frozenset(SELECT_METHODS)
    images = True
    leases = True

    async def markup(self) -> Markup:
        """As given; ChatML by default."""
        return self.style

    async def _answer(self, call: GenCall) -> Sequence[str]:
        if callable(self.answers):
            answer = self.answers(call)
            if asyncio.iscoroutine(answer):
                answer = await answer
        else:
            if self._next is None:
                self._next = itertools.cycle(self.answers)
            answer = next(self._next)
        if isinstance(answer, BaseException):
            raise answer
        count = call.sampling.n or 1
        if isinstance(answer, str):
            return [answer] * count
        answers: list[str] = list(answer)
        if len(answers) != count:
            raise BackendError(f"the mock has {len(answers)} answers for n={count}")
        return answers

    async def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
        """The next answer, in pieces."""
        self.calls.append(call)
        meter, prompt = self.meter, call.prompt.text
        meter.calls += 1
        meter.in_flight += 1
        meter.most_in_flight = max(meter.most_in_flight, meter.in_flight)
        whole = False
        try:
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            answers = await self._answer(call)
            cached = max((len(text) for text in self._seen if prompt.startswith(text)), default=0)
            meter.prompt += len(prompt)
            meter.cached += cached
            for index, text in enumerate(answers):
                meter.completion += len(text)
                for start in range(0, len(text), self.chunk):
                    yield Piece(text[start : start + self.chunk], index)
                    await asyncio.sleep(0)
                meta = {"prompt_tokens": len(prompt), "cached_tokens": cached, "completion_tokens": len(text)}
                yield Piece("", index, {**meta, "finish_reason": {"type": "stop"}})
            self._seen.add(prompt + answers[0])
            whole = True
        finally:
            meter.in_flight -= 1
            if not whole:
                self.aborted.append(call)

    async def score(self, call: SelectCall) -> Scores:
        """Scores as given."""
        self.selects.append(call)
        self.meter.selects += 1
        given = self.scores
        if callable(given):
            given = given(call)
        if isinstance(given, BaseException):
            raise given
        if given is None:
            given = {choice: [-1.0 - rank] for rank, choice in enumerate(call.select.choices)}
        out = []
        for choice in call.select.choices:
            item = given[choice]
            out.append(item if isinstance(item, ChoiceScore) else ChoiceScore(tuple(item), tuple(0.0 for _ in item)))
        return Scores(out)

    async def plant(self, prompt: Prompt, ttl_ms: int, context: Context) -> Lease | None:
        """Holds the text."""
        self.planted.append(prompt.text)
        self._seen.add(prompt.text)
        self.meter.planted += 1
        self.meter.held += 1
        self.meter.most_held = max(self.meter.most_held, self.meter.held)
        return Lease(f"lease-{next(self._ids)}", len(prompt.text), ttl_ms)

    async def release(self, lease: Lease) -> None:
        """Lets go of it."""
        self.released.append(lease.id)
        self.meter.held -= 1
