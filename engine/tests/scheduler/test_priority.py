"""Priorities: who goes first, who gives way, and that nobody waits or gives way for ever."""

from __future__ import annotations

import random

import pytest
from branchline.engine.scheduler import SchedulerOptions, victims
from branchline.engine.scheduler.waiting import WINDOW, WaitingQueue
from harness import EOS, Clock, Engine
from parts import Parts
from tiny import expected


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


def test_a_higher_priority_goes_first_whatever_others_would_hit() -> None:
    engine = Engine(pages=256, max_running_requests=1)
    engine.run("warm", ids(80), max_tokens=1)
    engine.submit("runs", ids(8, 9), max_tokens=4, ignore_eos=True, priority=9)
    engine.step()
    for name, priority in (("low", -1), ("plain", 0), ("high", 1)):
        engine.submit(name, ids(80) if name == "plain" else ids(20, 3), max_tokens=1, priority=priority)
    engine.finish()
    assert [name for name, _ in engine.answers][2:] == ["high", "plain", "low"]


def test_a_waiting_request_takes_the_place_of_a_lower_one_which_goes_on_later() -> None:
    engine = Engine(pages=256, max_running_requests=2)
    for number in range(2):
        engine.submit(f"low-{number}", ids(8, number), max_tokens=30, ignore_eos=True)
    engine.step(5)
    engine.submit("high", ids(8, 7), max_tokens=3, ignore_eos=True, priority=1)
    engine.step(3)
    assert engine.answers["high", 0].finish is not None, "it did not wait for a place"
    engine.finish()
    stats = engine.loop.stats()
    assert (stats.preemptions, stats.retractions) == (1, 1)
    for number in range(2):
        assert engine.answers[f"low-{number}", 0].token_ids == expected(ids(8, number), 30)


def test_a_waiting_request_takes_the_pages_of_lower_ones() -> None:
    engine = Engine(pages=16, page_size=4, max_running_requests=8)
    for number in range(2):
        engine.submit(f"low-{number}", ids(16, number), max_tokens=12, ignore_eos=True)
    engine.step()
    engine.submit("high", ids(40, 7), max_tokens=2, ignore_eos=True, priority=5)
    engine.step(4)
    assert engine.answers["high", 0].finish is not None
    assert not any(engine.answers[f"low-{number}", 0].finish for number in range(2))
    engine.finish()
    assert engine.loop.stats().preemptions >= 1
    for number in range(2):
        assert engine.answers[f"low-{number}", 0].token_ids == expected(ids(16, number), 12)


def test_without_preemption_a_higher_priority_waits_for_a_place() -> None:
    engine = Engine(pages=256, max_running_requests=1, preemption=False)
    engine.submit("low", ids(8), max_tokens=30, ignore_eos=True)
    engine.step(2)
    engine.submit("high", ids(8, 7), max_tokens=3, ignore_eos=True, priority=1)
    engine.finish()
    assert engine.loop.stats().preemptions == 0
    assert [name for name, _ in engine.answers] == ["low", "high"]


def test_equal_priorities_never_preempt_each_other() -> None:
    engine = Engine(pages=256, max_running_requests=1)
    for number in range(5):
        engine.submit(f"r{number}", ids(8, number), max_tokens=5, ignore_eos=True, priority=3)
    engine.finish()
    assert engine.loop.stats().preemptions == 0


def test_no_request_gives_way_more_than_twice() -> None:
    engine = Engine(pages=256, max_running_requests=1)
    engine.submit("low", ids(8), max_tokens=12, ignore_eos=True)
    engine.step(2)
    for number in range(20):
        engine.submit(f"high-{number}", ids(8, 10 + number), max_tokens=1, priority=1)
        engine.step(2)
    engine.finish()
    finish = engine.answers["low", 0].finish
    assert finish is not None and finish.retractions == 2
    assert engine.answers["low", 0].token_ids == expected(ids(8), 12)


def test_waiting_makes_up_for_a_lower_priority() -> None:
    options = SchedulerOptions()
    queue, clock, parts = WaitingQueue(options), Clock(), Parts()
    low, high = parts.sequence([1, 2]), parts.sequence([1, 2], priority=2)
    queue.push(low, 0, clock())
    clock.now += 2 * options.priority_aging_seconds - 1
    queue.push(high, 0, clock())
    assert queue.order(0, clock())[0] is high
    queue.remove(high)
    clock.now += 2
    queue.push(high, 0, clock())
    assert queue.order(0, clock())[0] is low, "the other came past the bound"


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_overtaken_beyond_the_stated_bound(seed: int) -> None:
    options = SchedulerOptions(aging_passes=1000)
    queue, clock, parts, generator = WaitingQueue(options), Clock(), Parts(), random.Random(seed)
    came: dict[int, float] = {}
    for number in range(400):
        clock.now += generator.random() * 0.2
        one = parts.sequence([1, 2], priority=generator.choice([0, 0, 1]))
        one.matched = generator.choice([0, 0, 500, 10_000])
        queue.push(one, number * 1000, clock())
        came[one.number] = clock.now
        if generator.random() < 0.9:
            first = queue.order(number * 1000, clock())[0]
            for other in queue.window():
                lead = came[first.number] - came[other.number]
                levels = max(first.priority - other.priority, 0)
                assert lead <= options.aging_seconds + levels * options.priority_aging_seconds + 1e-6
            queue.remove(first)


def test_high_priorities_are_seen_behind_any_number_of_others() -> None:
    queue, parts = WaitingQueue(SchedulerOptions()), Parts()
    for _ in range(4 * WINDOW):
        queue.push(parts.sequence([1, 2]), 0, 0.0)
    high = parts.sequence([1, 2], priority=1)
    queue.push(high, 0, 0.0)
    assert queue.order(1, 0.0)[0] is high and len(queue.window()) == WINDOW
    assert queue.remove(high) and len(queue) == 4 * WINDOW
    assert queue.highest() is queue.window()[0]


def test_a_retracted_one_goes_before_its_equals_and_after_its_betters() -> None:
    queue, parts = WaitingQueue(SchedulerOptions()), Parts()
    equal, better, back = (parts.sequence([1, 2], priority=level) for level in (0, 1, 0))
    for one in (equal, better):
        queue.push(one, 0, 0.0)
    queue.push_front(back)
    assert queue.order(1, 0.0) == [better, back, equal]


def test_the_victim_is_of_the_lowest_priority() -> None:
    parts = Parts()
    first, second, third = (parts.sequence([1, 2], priority=level) for level in (1, 0, 0))
    second.admitted, third.admitted = 1, 2
    assert victims.for_pages([first, second, third], None) is third
    assert victims.for_pages([first, second], spare=second) is first
    assert victims.for_pages([first], None) is None
    assert victims.for_priority([first, second], 1, 2) is second
    second.preemptions = 2
    assert victims.for_priority([first, second], 1, 2) is None
