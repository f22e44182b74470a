"""What prompts cost those who decode: the learnt cost of a step and the bound on gaps between tokens."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from branchline.engine.scheduler.cost import LEAST_TOKENS, PROBE, Allowance, StepCost, Work
from branchline.engine.types import ForwardBatch
from harness import EOS, Engine
from timed import Rates, timed
from tiny import expected


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


def learnt(noise: float = 0.0) -> StepCost:
    """A model fed with 10 ms a step, 2 ms a decode, 1 ms a prompt token."""
    cost, generator = StepCost(), random.Random(4)
    for number in range(200):
        work = Work(generator.randrange(1, 9), 800, generator.choice([0, 0, 32, 64, 100]))
        seconds = 0.010 + 0.002 * work.decodes + 0.001 * work.prompts
        cost.learn(work, seconds * (5.0 if noise and number % 10 == 0 else 1.0))
    return cost


def test_the_cost_of_a_step_is_learnt() -> None:
    cost = learnt()
    for work, seconds in ((Work(8, 800), 0.026), (Work(8, 800, 64), 0.090), (Work(1, 800, 200), 0.212)):
        assert cost.seconds(work) == pytest.approx(seconds, rel=0.05)


def test_steps_held_up_by_others_do_not_spoil_what_was_learnt() -> None:
    assert learnt(noise=1.0).seconds(Work(8, 800, 64)) == pytest.approx(0.090, rel=0.25)


def test_a_long_stretch_of_decodes_keeps_what_prompts_cost() -> None:
    cost = learnt()
    for _ in range(5000):
        cost.learn(Work(8, 800), 0.026)
    assert cost.seconds(Work(8, 800, 64)) == pytest.approx(0.090, rel=0.05)


def test_a_slower_machine_is_noticed() -> None:
    cost = learnt()
    for _ in range(120):
        cost.learn(Work(8, 800, 64), 0.270)
    assert cost.seconds(Work(8, 800, 64)) == pytest.approx(0.270, rel=0.1)


def test_prompts_that_take_longer_and_longer_do_not_make_decodes_look_dear() -> None:
    cost = StepCost()
    for _ in range(10):
        cost.learn(Work(8, 300), 0.020)
    for step in range(200):  # as contexts grow, so does what prompts cost, and what they are given
        cost.learn(Work(8, 300 + 8 * step, 20 + step // 8), 0.020 + (20 + step // 8) * 1e-3 * (1 + step / 100))
    assert cost.seconds(Work(8, 1900)) == pytest.approx(0.020, rel=0.25)


def test_decodes_are_looked_at_alone_now_and_then() -> None:
    engine, rows = timed(max_running_requests=16, context_length=4096), list[tuple[int, int]]()
    run = engine.executor.run

    def watched(batch: ForwardBatch) -> object:
        rows.append((int((batch.query_lens == 1).sum()), int((batch.query_lens > 1).sum())))
        return run(batch)

    engine.executor.run = watched  # type: ignore[method-assign,assignment]
    gaps(engine)
    streak, longest, probes = 0, 0, 0
    for decodes, prompts in rows[60:]:
        probes += not prompts and streak > 0
        streak = streak + 1 if prompts and decodes else 0
        longest = max(longest, streak)
    assert longest == PROBE and probes >= 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_clock_that_says_nothing_teaches_nothing(seconds: float) -> None:
    cost = StepCost()
    cost.learn(Work(1, 1), seconds)
    assert cost.rates() == (0.0,) * 5


def priced(token: float, context: float) -> StepCost:
    """A model that has learnt these prices of prompts."""
    cost = StepCost()
    for count in (16, 64, 256):
        for over in (0.5, 2.0, 8.0):
            cost.learn(Work(0, 0, count, count * over * 1e3), count * (token + context * over))
    return cost


def test_an_allowance_counts_the_growing_price_of_context() -> None:
    cost_model = priced(1e-3, 1e-3)  # seconds a token, and a token a thousand of context
    for start in (0, 500, 4000):
        room = Allowance(512, 0.1, cost_model)
        count = room.room(start)
        cost = count * (1e-3 + 1e-6 * (start + count / 2))
        assert cost <= 0.1 < (count + 1) * (1e-3 + 1e-6 * (start + (count + 1) / 2)) or count == LEAST_TOKENS
        room.take(start, count)
        assert room.room(0) == 0, "the rest is less than is worth a chunk"


def test_what_prompts_may_take_grows_step_by_step() -> None:
    cost, seen = priced(1e-3, 0.0), []
    for _ in range(5):
        seen.append(Allowance(512, 0.4, cost).room(0))
    assert seen[:2] == [128, 256] and seen[2:] == pytest.approx([400] * 3, rel=0.02)


def test_a_step_that_is_too_slow_already_still_takes_a_few_prompt_tokens() -> None:
    room = Allowance(512, 0.0, priced(1e-3, 0.0))
    assert room.room(0) == LEAST_TOKENS
    room.take(0, LEAST_TOKENS)
    assert room.room(0) == 0


def gaps(engine: Engine, decoders: int = 8, prompts: int = 3) -> tuple[list[float], list[float], float]:
    """Quiet gaps, gaps while long prompts are computed, and prompt tokens a second meanwhile."""
    for number in range(decoders):
        engine.submit(f"d{number}", ids(32, number), max_tokens=700, ignore_eos=True)
    quiet, busy = [], []

    def step(into: list[float]) -> None:
        before = engine.clock.now
        engine.step()
        into.append(engine.clock.now - before)

    while engine.loop.stats().waiting or len(engine.answers) < decoders:
        engine.step()
    for _ in range(40):
        step(quiet)
    started = engine.clock.now
    for number in range(prompts):
        engine.submit(f"long-{number}", ids(1900, 50 + number), max_tokens=1)
    while not all((f"long-{number}", 0) in engine.answers for number in range(prompts)):
        tokens = [len(engine.answers[f"d{number}", 0].token_ids) for number in range(decoders)]
        step(busy)
        after = [len(engine.answers[f"d{number}", 0].token_ids) for number in range(decoders)]
        assert after == [count + 1 for count in tokens], "decoders get their token every step"
    return quiet, busy, prompts * 1900 / (engine.clock.now - started)


@pytest.mark.parametrize(
    "rates",
    [Rates(), Rates(step=0.05, token=0.0002), Rates(0.001, 0.0001, 0.00005, 0.00002), Rates(context=0.001)],
)
def test_long_prompts_stretch_the_gap_of_decoders_less_than_five_times(rates: Rates) -> None:
    engine = timed(rates, max_running_requests=16, context_length=4096)
    quiet, busy, pace = gaps(engine)
    assert max(busy) <= 5 * statistics.mean(quiet)
    alone = timed(rates, max_running_requests=16, context_length=4096)
    _, _, best = gaps(alone, decoders=0)
    assert pace >= 0.4 * best, "and prompts get on"
    engine.finish()
    assert engine.answers["d0", 0].token_ids == expected(ids(32, 0), 700)


def test_the_gap_keeps_a_target_in_milliseconds() -> None:
    engine = timed(itl_target_s=0.150, max_running_requests=16, context_length=4096)
    _, busy, _ = gaps(engine)
    assert statistics.median(busy) == pytest.approx(0.150, rel=0.1) and max(busy) < 0.170


def test_without_a_target_a_prompt_takes_the_whole_step() -> None:
    engine = timed(itl_target_s=math.inf, max_running_requests=16, context_length=4096)
    _, busy, _ = gaps(engine)
    assert max(busy) > 0.5


def test_noise_does_not_break_the_bound_of_the_steps_without_it() -> None:
    engine = timed(noise=4.0, max_running_requests=16, context_length=4096)
    quiet, busy, _ = gaps(engine)
    assert statistics.median(busy) <= 5 * statistics.median(quiet)
