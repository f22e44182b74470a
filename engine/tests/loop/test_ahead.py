"""A loop one step ahead: the same answers, pages that wait for the step in flight, faults that cost one request."""

from __future__ import annotations

import random

import pytest
from branchline.engine.loop import EngineLoop
from branchline.engine.loop_ahead import AheadLoop
from branchline.engine.types import LogprobParams
from harness import EOS, VOCAB, Engine
from queueing import QueueTiny
from tiny import expected


class Ahead(Engine):
    """An Engine whose loop is one step ahead of its results."""

    loop_class: type[EngineLoop] = AheadLoop

    def __init__(self, pages: int = 64, page_size: int = 4, **options: object) -> None:
        self._sizes = (pages, page_size)
        super().__init__(pages, page_size, **options)  # type: ignore[arg-type]

    def rebuild(self) -> None:
        """With the queueing executor."""
        from harness import vocabulary

        host = self.executor.host.shape[0]
        self.executor: QueueTiny = QueueTiny(*self._sizes)
        self.executor.reserve_host(host)
        self.loop = self.loop_class(
            self.executor,
            self.cache,
            vocabulary(),
            self.options,
            clock=self.clock,
            draw_seed=lambda: self.seed,
            epoch=5,
        )


class Behind(Ahead):
    """The same parts, one step after the other."""

    loop_class = EngineLoop


def prompt(chance: random.Random, most: int = 20) -> list[int]:
    return [chance.randrange(VOCAB - 1) for _ in range(chance.randrange(1, most))]


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 7])
def test_answers_are_those_of_a_loop_that_waits(seed: int) -> None:
    answers = []
    for kind in (Behind, Ahead):
        chance = random.Random(seed)
        engine = kind(
            pages=24 + 20 * (seed % 2), max_running_requests=3 + seed % 3, max_step_tokens=16, host=seed % 3 * 4
        )
        for number in range(9):
            options = chance.choice(
                [{}, {"temperature": 0.9}, {"n": 2}, {"stop": ("a", "Q")}, {"presence_penalty": 0.4}, {"min_tokens": 5}]
            )
            logprobs = LogprobParams(output=bool(number % 2), input_start=0 if number % 4 == 3 else None)
            engine.submit(
                str(number), prompt(chance), max_tokens=chance.randrange(1, 30), logprobs=logprobs,
                ignore_eos=number % 3 == 0, priority=chance.randrange(2), **options,
            )  # fmt: skip
            engine.step(chance.randrange(4))
            if number == 5:
                engine.loop.abort("4")
        engine.finish()
        engine.loop.flush()
        assert engine.counters()["free"] == engine.executor.num_pages
        assert not engine.errors
        assert not engine.executor.in_flight
        assert (engine.executor.ahead > 0) == (kind is Ahead)
        answers.append({key: (one.token_ids, one.text, one.output, one.input) for key, one in engine.answers.items()
                        if key[0] != "4"})  # fmt: skip
    # What was aborted ended where the loop happened to be.
    assert repr(answers[0]) == repr(answers[1])


def test_a_steady_decode_is_queued_ahead_and_ends_with_one_row_for_nothing() -> None:
    engine = Ahead()
    answer = engine.run("a", [1, 2, 3], max_tokens=12, ignore_eos=True)
    assert answer.token_ids == expected([1, 2, 3], 12)
    assert engine.executor.ahead == 11  # whoever ends by length is known to: nothing is computed for nothing
    assert engine.executor.steps == 12
    first = next(at for at, token in enumerate(answer.token_ids) if at > 2)
    stopped = engine.run("b", [1, 2, 3], max_tokens=12, stop_token_ids=(answer.token_ids[first],), ignore_eos=True)
    assert stopped.token_ids == answer.token_ids[: stopped.finish.completion_tokens]  # type: ignore[union-attr]
    assert engine.executor.steps == 12 + len(stopped.token_ids) + 1


def test_pages_of_an_ended_sequence_are_free_when_the_step_in_flight_is_over() -> None:
    engine = Ahead(pages=16)
    engine.submit("a", [5] * 6, max_tokens=30, ignore_eos=True)
    engine.submit("b", [9] * 6, max_tokens=30, ignore_eos=True)
    engine.step(4)
    assert len(engine.executor.in_flight) == 1
    engine.loop.abort("a")
    engine.loop._receive()
    held = engine.counters()["private"]
    assert engine.loop._scheduler.pages.epoch > 0
    engine.step()
    assert engine.counters()["private"] < held  # the step that still wrote to them has been read
    engine.finish()
    assert engine.answers["b", 0].token_ids == expected([9] * 6, 30)


def test_nobody_waits_behind_steps_that_were_queued() -> None:
    engine = Ahead()
    engine.submit("a", [1, 2], max_tokens=40, ignore_eos=True)
    engine.step(5)
    engine.submit("b", [3, 4], max_tokens=3, ignore_eos=True)
    engine.step(2)  # the one in flight, then one that computes the prompt
    assert engine.answers["b", 0].token_ids == expected([3, 4], 1)
    engine.finish()


def test_a_failing_step_costs_the_request_at_fault_alone_though_the_next_was_queued() -> None:
    engine = Ahead()
    good = expected([1, 2, 3], 10)
    bad = expected([7, 7, 7], 4)
    engine.executor.poison = {bad[3]} - set(good)
    assert engine.executor.poison
    engine.submit("good", [1, 2, 3], max_tokens=10, ignore_eos=True)
    engine.submit("bad", [7, 7, 7], max_tokens=10, ignore_eos=True)
    engine.finish()
    assert engine.answers["good", 0].token_ids == good
    assert "poisoned kernel" in str(engine.errors["bad"])


def test_end_ids_are_kept_out_before_min_tokens_in_queued_steps_too() -> None:
    plain = Ahead().run("a", [1, 2, 3], max_tokens=9, ignore_eos=True).token_ids
    engine = Ahead()
    answer = engine.run("a", [1, 2, 3], max_tokens=9, min_tokens=6, stop_token_ids=tuple(plain[:6]))
    assert len(answer.token_ids) >= 6
    assert not set(answer.token_ids[:5]) & {*plain[:6], EOS}
    waiting = Behind().run("a", [1, 2, 3], max_tokens=9, min_tokens=6, stop_token_ids=tuple(plain[:6]))
    assert answer.token_ids == waiting.token_ids
