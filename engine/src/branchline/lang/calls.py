"""One call of a branch: sends it, streams pieces into its variable, retries before the first, parses the value."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from branchline.lang import reasoning, scoring, typed
from branchline.lang.backends.base import GenCall, Piece, SelectCall
from branchline.lang.errors import BackendError, DeadlineError
from branchline.lang.ir import Gen, Select
from branchline.lang.values import Event, Variable

if TYPE_CHECKING:
    from branchline.lang.branch import Branch

RETRIES = 2
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
    call = GenCall(branch.prompt(), gen, run.sampling_of(gen), branch.context())
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
    values = [typed.parse(text, gen.target) if gen.target is not None else text for text in texts]
    value: Any = values if count > 1 else values[0]
    meta: dict[str, Any] = metas[0] if count == 1 else {"sequences": metas}
    variable.finish(value, meta)
    run.emit(Event("end", branch.path, gen.name, value=value, meta=meta))


async def _answer(branch: Branch, call: GenCall, count: int, show: Callable[[Piece], None]) -> Answer:
    """The whole answer: from the log if the run replays one, else from the backend, retried before the first piece."""
    run = branch.run
    if (stored := run.replayed(call)) is not None:
        for index, text in enumerate(stored.texts):
            show(Piece(text, index))
        return stored
    answer = Answer([""] * count, [{} for _ in range(count)])
    retries = RETRIES if call.gen.retries is None else call.gen.retries
    for attempt in range(retries + 1):
        begun = False
        try:
            async with (
                asyncio.timeout(_limit(branch, call.gen.timeout_s)),
                aclosing(run.backend.generate(call)) as pieces,
            ):
                async for piece in pieces:
                    begun = begun or bool(piece.text)
                    if piece.index >= count:
                        raise BackendError(f"{run.backend.name} sent sequence {piece.index} of {count}")
                    answer.texts[piece.index] += piece.text
                    if piece.meta is not None:
                        answer.metas[piece.index] = piece.meta
                    show(piece)
            break
        except TimeoutError:
            raise DeadlineError(_late(branch, call.gen.timeout_s)) from None
        except BackendError as error:
            if begun or attempt == retries or error.status not in RETRYABLE:
                raise
            await _pause(branch, attempt, error.retry_after_s)
    run.log(call, answer)
    return answer


def _limit(branch: Branch, timeout_s: float | None) -> float | None:
    """Seconds until the nearest of the block's and the program's limits."""
    limits = [] if timeout_s is None else [timeout_s]
    if branch.run.deadline is not None:
        limits.append(branch.run.deadline - asyncio.get_running_loop().time())
    return max(min(limits), 0.0) if limits else None


def _late(branch: Branch, timeout_s: float | None) -> str:
    limit = _limit(branch, None)
    if limit is not None and limit <= 0:
        return f"the program's deadline of {branch.run.timeout_s:g} s has passed"
    return f"no complete answer within timeout_s={timeout_s:g}: raise it, or lower max_tokens"


async def _pause(branch: Branch, attempt: int, wanted_s: float | None) -> None:
    pause = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) if wanted_s is None else min(wanted_s, LONGEST_PAUSE_S)
    left = _limit(branch, None)
    if left is not None and left <= pause:
        raise DeadlineError(_late(branch, None))
    await asyncio.sleep(pause * random.uniform(1.0, 1.1))


async def choose(branch: Branch, select: Select, variable: Variable) -> None:
    """Runs a select block; exactly the picked choice is appended."""
    run = branch.run
    run.emit(Event("start", branch.path, select.name))
    prompt = branch.prompt()
    started = time.monotonic()
    if len(select.choices) == 1:
        picked, meta = 0, {"probabilities": [1.0]}
    else:
        call = SelectCall(prompt, select, branch.context())
        scores = run.replayed_scores(call)
        if scores is None:
            try:
                async with asyncio.timeout(_limit(branch, select.timeout_s)):
                    scores = await run.backend.score(call)
            except TimeoutError:
                raise DeadlineError(_late(branch, select.timeout_s)) from None
            if len(scores) != len(select.choices):
                raise BackendError(f"{run.backend.name} scored {len(scores)} of {len(select.choices)} choices")
            run.log_scores(call, scores)
        picked, meta = scoring.pick(select, scores)
    choice = select.choices[picked]
    run.record(branch, "select", select.name, prompt.text, [choice], [meta], time.monotonic() - started)
    branch.write(choice)
    variable.add(choice)
    variable.finish(choice, meta)
    run.emit(Event("end", branch.path, select.name, value=choice, meta=meta))
