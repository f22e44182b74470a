"""One call of a branch: sends it, streams pieces into its variable, retries before the first, parses the value."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from branchline.lang import reasoning, scoring, typed
from branchline.lang.backends.base import GenCall, Piece, SelectCall
from branchline.lang.errors import BackendError, DeadlineError, ParseError
from branchline.lang.ir import Gen, Select
from branchline.lang.values import Event, Variable

if TYPE_CHECKING:
    from branchline.lang.branch import Branch

T = TypeVar("T")
RETRIES = 2
CUT_OFF = ("length", "max_tokens", "MAX_TOKENS")  # how vendors say it
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(slots=True)
class Answer:
    """What came back: a text and its meta for each of the n sequences."""

    texts: list[str]
    metas: list[dict[str, Any]] = field(default_factory=list)


async def generate(
    branch: Branch, gen: Gen, variable: Variable, thought: Variable | None, model_type: str | None
) -> None:
    """Runs a gen block; the first sequence's text is appended to the branch."""
    run = branch.run
    sampling = run.sampling_of(gen)
    if branch.role is not None and branch.role.role == "assistant":
        stops = (await bounded(branch, run.markup)).stops
        if stops:
            sampling = replace(sampling, stop=tuple(dict.fromkeys((*(sampling.stop or ()), *stops))))
    call = GenCall(branch.prompt(), gen, sampling, branch.context())
    run.emit(Event("start", branch.path, gen.name))
    count = call.sampling.n or 1
    # Reasoning and several sequences are told apart only at the end; what streams is then the whole first text.
    live = thought is None

    def show(piece: Piece) -> None:
        if piece.index == 0 and piece.text:
            branch.write(piece.text)
            if live:
                variable.add(piece.text)
            run.emit(Event("delta", branch.path, gen.name, text=piece.text))

    started = time.monotonic()
    answer = await _answer(branch, call, count, show)
    texts, metas = answer.texts, answer.metas
    run.record(branch, "gen", gen.name, call.prompt.text, texts, metas, time.monotonic() - started)
    if thought is not None:
        split = [reasoning.split(text, model_type or "") for text in texts]
        texts = [content for _, content in split]
        thoughts: Any = [inner for inner, _ in split]
        thought.finish(thoughts if count > 1 else thoughts[0])
        if texts[0]:
            variable.add(texts[0])
    values = [_value(text, gen, meta) for text, meta in zip(texts, metas, strict=True)]
    value: Any = values if count > 1 else values[0]
    meta: dict[str, Any] = metas[0] if count == 1 else {"sequences": metas}
    variable.finish(value, meta)
    run.emit(Event("end", branch.path, gen.name, value=value, meta=meta))


def _value(text: str, gen: Gen, meta: dict[str, Any]) -> Any:
    if gen.target is None:
        return text
    try:
        return typed.parse(text, gen.target)
    except ParseError as error:
        if (meta.get("finish_reason") or {}).get("type") not in CUT_OFF:
            raise
        raise ParseError(f"{error}; it was cut off: raise max_tokens", text) from error


async def _answer(branch: Branch, call: GenCall, count: int, show: Callable[[Piece], None]) -> Answer:
    """The whole answer: from the log if the run replays one, else from the backend, retried before the first piece."""
    run = branch.run
    if (stored := run.replayed(call)) is not None:
        for index, text in enumerate(stored.texts):
            show(Piece(text, index))
        return stored
    answer = Answer([""] * count, [{} for _ in range(count)])
    begun = False

    async def once() -> None:
        nonlocal begun
        async with aclosing(run.backend.generate(call)) as pieces:
            async for piece in pieces:
                begun = begun or bool(piece.text)
                if piece.index >= count:
                    raise BackendError(f"{run.backend.name} sent sequence {piece.index} of {count}")
                answer.texts[piece.index] += piece.text
                if piece.meta is not None:
                    answer.metas[piece.index] = piece.meta
                show(piece)

    retries = RETRIES if call.gen.retries is None else call.gen.retries
    await bounded(branch, once, timeout_s=call.gen.timeout_s, retries=retries, may_retry=lambda: not begun)
    run.log(call, answer)
    return answer


async def bounded(
    branch: Branch,
    attempt: Callable[[], Awaitable[T]],
    *,
    timeout_s: float | None = None,
    retries: int = RETRIES,
    may_retry: Callable[[], bool] = lambda: True,
) -> T:
    """An attempt within the block's and the program's limits, made again after refusals that may pass.

    Raises:
        DeadlineError: a limit was reached; its cause is the last refusal, if there was one.
    """
    last: BackendError | None = None
    limit = _limit(branch, timeout_s)
    scope = asyncio.timeout(limit)
    try:
        async with scope:
            for number in range(retries + 1):
                if last is not None:
                    await _pause(number - 1, last, scope)
                try:
                    return await attempt()
                except BackendError as error:
                    if not may_retry() or number == retries or error.status not in RETRYABLE:
                        raise
                    last = error
    except TimeoutError as error:
        if isinstance(error, _NoTimeLeft) or scope.expired():
            raise DeadlineError(_late(branch, timeout_s if limit == timeout_s else None, last)) from last
        raise
    raise AssertionError("every attempt returns or raises")


class _NoTimeLeft(TimeoutError):
    """The next attempt would begin past the limit."""


def _limit(branch: Branch, timeout_s: float | None) -> float | None:
    """Seconds until the nearest of the block's and the program's limits."""
    limits = [] if timeout_s is None else [timeout_s]
    if branch.run.deadline is not None:
        limits.append(branch.run.deadline - asyncio.get_running_loop().time())
    return max(min(limits), 0.0) if limits else None


def _late(branch: Branch, timeout_s: float | None, last: BackendError | None) -> str:
    after = f"; the last answer was: {last}" if last is not None else ""
    if timeout_s is None:
        return f"the program's deadline of {branch.run.timeout_s:g} s has passed{after}"
    return f"no complete answer within timeout_s={timeout_s:g}: raise it, or lower max_tokens{after}"


async def _pause(number: int, refusal: BackendError, scope: asyncio.Timeout) -> None:
    wanted = FIRST_PAUSE_S * 2**number if refusal.retry_after_s is None else refusal.retry_after_s
    pause = min(wanted, LONGEST_PAUSE_S)
    end = scope.when()
    if end is not None and end - asyncio.get_running_loop().time() <= pause:
        raise _NoTimeLeft
    await asyncio.sleep(pause * random.uniform(1.0, 1.1))


async def choose(branch: Branch, select: Select, variable: Variable) -> None:
    """Runs a select block; exactly the picked choice is appended."""
    run = branch.run
    run.emit(Event("start", branch.path, select.name))
    prompt = branch.prompt()
    started = time.monotonic()
    if len(select.choices) == 1:
        picked, meta = 0, dict[str, Any](probabilities=[1.0])
    else:
        call = SelectCall(prompt, select, branch.context())
        scores = run.replayed_scores(call)
        if scores is None:
            scores = await bounded(branch, lambda: run.backend.score(call), timeout_s=select.timeout_s)
            found, wanted = len(scores.choices), len(select.choices)
            if found != wanted:
                raise BackendError(f"{run.backend.name} scored {found} of {wanted} choices")
            run.log_scores(call, scores)
        picked, how = scoring.pick(select, scores.choices)
        meta = {**scores.meta, **how}
    choice = select.choices[picked]
    run.record(branch, "select", select.name, prompt.text, [choice], [meta], time.monotonic() - started)
    branch.write(choice)
    variable.add(choice)
    value = choice if select.target is None else typed.parse(choice, select.target)
    variable.finish(value, meta)
    run.emit(Event("end", branch.path, select.name, value=value, meta=meta))
