"""Storms: aborts, short pages, poisoned plugins and NaN rows at random. Each request ends once, the pages come back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from branchline.engine.cache import CacheContext
from branchline.engine.cache.reference import ReferenceCache
from branchline.engine.errors import ErrorCode, InternalError, ResourceExhausted
from branchline.engine.types import FinishReason, LogprobParams
from harness import EOS, Engine
from tiny import expected

POISON = 60  # a prompt that holds this token makes the plugin raise
SEEDS = range(6)


class PoisonedCache(ReferenceCache):
    """A backend as a plugin might be: some calls fail for some prompts."""

    where = "match"

    def match(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """Fails where told."""
        if self.where == "match" and POISON in token_ids:
            raise KeyError("the plugin lost its index")
        return super().match(namespace, token_ids, limit)

    def insert(
        self, namespace: bytes, token_ids: Sequence[int], pages: Sequence[int], priority: int = 0
    ) -> tuple[int, int]:
        """Fails where told."""
        if self.where == "insert" and POISON in token_ids:
            raise ZeroDivisionError("the plugin can't count")
        return super().insert(namespace, token_ids, pages, priority)


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


def clean(count: int, length: int, new: int) -> list[list[int]]:
    """Prompts whose greedy continuation has no poison either."""
    return [p for s in range(2000) if POISON not in (p := ids(length, s)) + expected(p, new)][:count]


@pytest.mark.parametrize("where", ["match", "insert"])
def test_a_plugin_that_raises_for_a_prompt_ends_that_request_only(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoisonedCache, "where", where)
    engine = Engine(pages=256)
    engine.cache = PoisonedCache(CacheContext(256, 4))
    engine.rebuild()
    good = clean(5, 9, 10)
    for number, prompt in enumerate(good):
        engine.submit(f"good-{number}", prompt, max_tokens=10, ignore_eos=True)
    engine.step(2)
    for number in range(3):
        engine.submit(f"bad-{number}", [*good[number], POISON, 1, 2], n=1 + number, max_tokens=5)
    engine.finish()
    assert set(engine.errors) == {"bad-0", "bad-1", "bad-2"}
    for error in engine.errors.values():
        assert isinstance(error, InternalError) and "the plugin" in error.message
    for number, prompt in enumerate(good):
        assert engine.answers[f"good-{number}", 0].token_ids == expected(prompt, 10)


def test_text_that_can_not_be_finished_does_not_stop_an_abort() -> None:
    engine = Engine()
    engine.submit("bad", ids(5), max_tokens=50, ignore_eos=True)
    engine.submit("good", ids(5, 1), max_tokens=9, ignore_eos=True)
    engine.step(2)

    class Broken:
        def push(self, token_ids: list[int]) -> tuple[str, int, str | None]:
            return "", 1, None

        def finish(self) -> str:
            raise UnicodeError("lone surrogate")

    engine.loop._live["bad"].sequences[0].text = Broken()
    engine.loop.abort("bad")
    engine.finish()
    assert "lone surrogate" in engine.errors["bad"].message
    assert engine.answers["good", 0].token_ids == expected(ids(5, 1), 9)


def churn(engine: Engine, seed: int, turns: int) -> dict[str, tuple[list[int], int]]:
    """Random submits, aborts, flushes and time; the greedy requests that were not aborted."""
    generator = random.Random(seed)
    kept: dict[str, tuple[list[int], int]] = {}
    alive: list[str] = []
    for turn in range(turns):
        for _ in range(generator.choice([0, 0, 1, 4])):
            name, prompt = f"r{seed}-{turn}-{len(alive)}", ids(generator.randrange(1, 30), generator.randrange(12))
            new, n = generator.randrange(0, 24), generator.choice([1, 1, 1, 3])
            try:
                engine.submit(
                    name, prompt, max_tokens=new, n=n, ignore_eos=True, priority=generator.choice([0, 0, 0, 1, -2]),
                    stop=generator.choice([(), (), ("~~",)]),
                    deadline_s=generator.choice([None, None, engine.clock() + 2]),
                    logprobs=LogprobParams(input_start=generator.choice([None, None, 0])),
                )  # fmt: skip
            except ResourceExhausted as refused:
                assert refused.retry_after_ms
                continue
            alive.append(name)
            kept[name] = (prompt, new)
        if alive and generator.random() < 0.3:
            for name in generator.sample(alive, min(len(alive), generator.choice([1, 1, 6]))):
                engine.loop.abort(name)
        if generator.random() < 0.02:
            engine.loop.flush()
        if generator.random() < 0.01:
            engine.loop.abort_all()
        engine.clock.now += generator.random() * 0.05
        engine.step()
    return kept


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pages", [9, 40, 400])
def test_a_storm_ends_every_request_once_and_rightly(seed: int, pages: int) -> None:
    engine = Engine(pages=pages, max_running_requests=12, max_queued_requests=30, max_step_tokens=24)
    kept = churn(engine, seed, 250)
    engine.finish()
    engine.cache.audit()
    for name, (prompt, new) in kept.items():
        if name in engine.errors:
            continue
        answers = [answer for (request, _), answer in engine.answers.items() if request == name]
        assert answers and all(answer.finish is not None for answer in answers)
        for answer in answers:
            assert answer.token_ids == expected(prompt, new)[: len(answer.token_ids)]
            whole = (
                answer.finish is not None and answer.finish.reason is FinishReason.LENGTH and not answer.finish.message
            )
            assert not whole or len(answer.token_ids) == new
    assert not any(error.code is ErrorCode.INTERNAL for error in engine.errors.values())
    assert engine.loop._places == 0 and not engine.loop._live and not engine.loop._deadlines


@pytest.mark.parametrize("seed", SEEDS)
def test_broken_rows_in_a_storm_cost_their_requests_only(seed: int) -> None:
    engine = Engine(pages=60, max_running_requests=12, max_queued_requests=100, max_step_tokens=24)
    engine.executor.broken_tokens, engine.executor.poison = {17}, {23}
    kept = churn(engine, seed, 120)
    engine.finish()
    assert engine.errors, "the storm has hit some"
    for name, error in engine.errors.items():
        prompt, new = kept[name]
        whole = prompt + expected(prompt, max(new, 1))
        assert {17, 23} & set(whole), f"{name} failed with {error} without a reason"
    engine.cache.audit()
