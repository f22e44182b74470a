"""Hooks in a running loop: where they stand, what they may change, and what a failing one costs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
from branchline.engine.errors import InternalError, ResourceExhausted
from branchline.engine.hooks import POINTS, Chain, Mode, Placed
from branchline.engine.hooks.loop import HookedLoop
from branchline.engine.scheduler.batch import Step
from branchline.engine.types import Delta, FinishReason, Request
from harness import Engine, vocabulary
from tiny import expected


class Hooked(Engine):
    """The harness with hooks in its loop."""

    def __init__(self, *placed: Placed, **limits: Any) -> None:
        self.hooks = Chain(placed)
        super().__init__(**limits)

    def rebuild(self) -> None:
        self.loop = HookedLoop(
            self.hooks, self.executor, self.cache, vocabulary(), self.options, clock=self.clock,
            draw_seed=lambda: self.seed, epoch=5,
        )  # fmt: skip


def at(point: str, mode: Mode, function: Callable[..., Any]) -> Placed:
    return Placed("acme", "acme 1", POINTS[point], mode, 0, function)


A, B = [5, 6, 7, 8, 9], [15, 16, 17, 18, 19]


def test_every_point_of_a_request_is_passed_in_order() -> None:
    seen: list[str] = []
    points = ("request.admission", "scheduler.step", "sampling", "request.end")
    placed = [at(one, Mode.BEFORE, lambda *given, one=one: seen.append(one)) for one in points]
    engine = Hooked(*placed)
    assert engine.run("r", A, max_tokens=3, ignore_eos=True).token_ids == expected(A, 3)
    assert seen == ["request.admission", *["scheduler.step", "sampling"] * 3, "request.end"]
    assert [one.cost.calls for one in placed] == [1, 3, 3, 1]


def test_admission_may_change_a_request_or_refuse_it_with_its_own_status() -> None:
    def shorten(proceed: Callable[..., Request], request: Request) -> Request:
        if len(request.token_ids) > 5:
            raise ResourceExhausted("no long prompts today", retry_after_ms=5)
        sampling = dataclasses.replace(request.sampling, max_tokens=2)
        return proceed(dataclasses.replace(request, sampling=sampling))

    engine = Hooked(at("request.admission", Mode.AROUND, shorten))
    with pytest.raises(ResourceExhausted, match="no long prompts today"):
        engine.submit("long", [*A, *B])
    assert engine.run("r", A, max_tokens=9, ignore_eos=True).token_ids == expected(A, 2)
    assert not engine.loop.busy


@pytest.mark.parametrize("given_back", [None, "other"])
def test_admission_must_give_back_the_same_request(given_back: str | None) -> None:
    def wrong(request: Request) -> object:
        return dataclasses.replace(request, request_id=given_back) if given_back else None

    engine = Hooked(at("request.admission", Mode.REPLACE, wrong))
    with pytest.raises(InternalError, match="gave back no request, or one of another id"):
        engine.submit("r", A)
    assert not engine.loop.busy


@pytest.mark.parametrize("point", ["scheduler.step", "sampling"])
def test_a_hook_that_fails_for_one_request_ends_that_one_only(point: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail_for_bad(*given: Any) -> None:
        step: Step = given[-1]
        if any(row.sequence.group.request.request_id == "bad" for row in step.rows):
            raise ValueError("I do not like it")

    engine = Hooked(at(point, Mode.BEFORE, fail_for_bad))
    engine.submit("good", A, max_tokens=6, ignore_eos=True)
    engine.submit("bad", B, max_tokens=6, ignore_eos=True)
    with caplog.at_level(logging.CRITICAL):
        engine.finish()
    assert f"hook 'acme' of acme 1 failed at {point}: ValueError: I do not like it" in engine.errors["bad"].message
    assert engine.answers["good", 0].token_ids == expected(A, 6) and "good" not in engine.errors


def test_replaced_sampling_decides_what_is_said() -> None:
    def always_seven(proceed: Callable[..., list[Any]], logits: object, step: Step) -> list[Any]:
        return [dataclasses.replace(one, token_id=7) for one in proceed(logits, step)]

    engine = Hooked(at("sampling", Mode.AROUND, always_seven))
    assert engine.run("r", A, max_tokens=4, ignore_eos=True).token_ids == [7] * 4


def test_too_few_results_of_a_sampling_hook_end_the_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = Hooked(at("sampling", Mode.REPLACE, lambda logits, step: []))
    engine.submit("r", A, max_tokens=4)
    with caplog.at_level(logging.CRITICAL):
        engine.finish()
    assert "hooks at sampling gave 0 results for 1 plans" in engine.errors["r"].message


def test_every_end_is_seen_once_and_may_be_changed() -> None:
    seen: list[tuple[str, int, str]] = []

    def tell(proceed: Callable[..., Delta], request: Request, delta: Delta) -> Delta:
        told = proceed(request, delta)
        assert told.finish is not None
        seen.append((request.request_id, told.index, str(told.finish.reason)))
        return dataclasses.replace(told, finish=dataclasses.replace(told.finish, reason=FinishReason.STOP))

    engine = Hooked(at("request.end", Mode.AROUND, tell))
    engine.submit("r", A, n=2, max_tokens=2, ignore_eos=True, temperature=1.0, seed=3)
    engine.finish()
    assert sorted(seen) == [("r", 0, "length"), ("r", 1, "length")]
    finish = engine.answers["r", 0].finish
    assert finish is not None and finish.reason is FinishReason.STOP


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_hook_that_fails_at_an_end_becomes_the_requests_one_error(n: int) -> None:
    def fail_for_bad(request: Request, delta: Delta) -> None:
        if request.request_id == "bad":
            raise ValueError("not like this")

    engine = Hooked(at("request.end", Mode.BEFORE, fail_for_bad), pages=128)
    engine.submit("bad", B, n=n, temperature=3.0, seed=1, max_tokens=30)  # its sequences end one after the other
    engine.submit("good", A, max_tokens=6, ignore_eos=True)
    engine.finish()
    assert "failed at request.end: ValueError: not like this" in engine.errors["bad"].message
    assert sum(d.error is not None for _, deltas in engine.frames for d in deltas) == 1
    assert not any(answer.finish for (name, _), answer in engine.answers.items() if name == "bad")
    assert engine.answers["good", 0].token_ids == expected(A, 6)


def test_a_request_that_failed_already_keeps_its_own_error(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: Request, delta: Delta) -> None:
        raise ValueError("again")

    engine = Hooked(at("request.end", Mode.BEFORE, fail))
    engine.executor.lost = True
    engine.submit("r", A, max_tokens=2)
    with caplog.at_level(logging.CRITICAL):
        engine.finish()
    assert "device lost" in engine.errors["r"].message


def test_no_news_of_another_sequence_pass_for_an_end() -> None:
    engine = Hooked(at("request.end", Mode.REPLACE, lambda request, delta: Delta("other")))
    engine.submit("r", A, max_tokens=2, ignore_eos=True)
    engine.finish()
    assert "no news that end the same sequence" in engine.errors["r"].message
