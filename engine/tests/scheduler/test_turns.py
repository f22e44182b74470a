"""A short prompt beside a long one: it waits a few steps, and the long one at most doubles its time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from branchline.engine.scheduler.turns import LEAST, Claim, Turns
from harness import Engine


def engine(**limits: object) -> Engine:
    return Engine(pages=400, page_size=4, **{"max_step_tokens": 64, "max_running_requests": 16, **limits})


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(index * 7 + salt) % 90 for index in range(length)]


def steps_until(made: Engine, request_id: str, most: int = 200) -> int:
    """Steps until a request's first token."""
    for number in range(1, most + 1):
        made.step()
        answer = made.answers.get((request_id, 0))
        if answer is not None and answer.token_ids:
            return number
    raise AssertionError(f"{request_id} had no token after {most} steps")


def test_a_short_prompt_does_not_wait_for_a_long_ones_end() -> None:
    made = engine()
    made.submit("long", prompt(1000), max_tokens=2)
    made.step()
    made.submit("short", prompt(20, 3), max_tokens=2)
    assert steps_until(made, "short") <= 2
    assert not made.answers.get(("long", 0))


def test_a_long_prompt_keeps_half_of_each_step_however_many_short_ones_come() -> None:
    made = engine()
    made.submit("long", prompt(960), max_tokens=1)
    alone = 960 // 64
    for number in range(100):
        made.submit(f"short-{number}", prompt(20, number), max_tokens=1)
    assert steps_until(made, "long") <= 2 * alone + 2


def test_nothing_of_a_step_is_wasted_when_short_ones_need_less_than_their_half() -> None:
    made = engine()
    made.submit("long", prompt(640), max_tokens=1)
    made.submit("short", prompt(8, 3), max_tokens=1)
    # 648 prompt tokens in steps of 64, the one decode token of the short request apart.
    assert steps_until(made, "long") <= -(-(640 + 8 + 1) // 64)


def test_prompts_of_like_length_go_in_order() -> None:
    made = engine()
    for name in ("first", "second"):
        made.submit(name, prompt(320, len(name)), max_tokens=1)
    assert steps_until(made, "first") == 5
    assert not made.answers.get(("second", 0))
    assert steps_until(made, "second") == 5


def test_a_second_long_prompt_is_not_let_in_by_what_the_first_left_for_short_ones() -> None:
    made = engine()
    made.submit("first", prompt(640), max_tokens=1)
    made.step()
    made.submit("second", prompt(600, 2), max_tokens=1)
    made.submit("short", prompt(16, 5), max_tokens=1)
    assert steps_until(made, "short") <= 2
    assert made.loop._scheduler.running == 1 and "second" not in made.prompts


def test_small_rooms_are_taken_in_turns() -> None:
    made = engine(max_step_tokens=16)
    made.submit("long", prompt(320), max_tokens=1)
    for number in range(40):
        made.submit(f"short-{number}", prompt(15, number), max_tokens=1)
    made.step()
    assert steps_until(made, "long") <= 2 * (320 // 16) + 2


def test_what_a_short_one_cannot_use_in_its_turn_is_given_back() -> None:
    made = Engine(pages=84, page_size=4, max_step_tokens=16, max_running_requests=4)
    made.submit("long", prompt(320), max_tokens=1)
    made.step()
    made.submit("short", prompt(64, 3), max_tokens=100)  # its output has no pages while the long one holds them
    assert steps_until(made, "long") <= 2 * (320 // 16)


@pytest.mark.parametrize(
    ("mine", "other", "goes"),
    [
        (Claim(10, 0), Claim(20, 0), True),
        (Claim(11, 0), Claim(20, 0), False),
        (Claim(1000, 1), Claim(20, 0), True),
        (Claim(1, 0), Claim(1000, 1), False),
    ],
)
def test_who_goes_before_whom(mine: Claim, other: Claim, goes: bool) -> None:
    assert mine.goes_before(other) is goes


def lacking(left: int) -> Any:
    """A sequence with so many tokens to compute."""
    return SimpleNamespace(tokens=range(left), computed=0, matched=0, priority=0)


def test_a_prompt_leaves_what_is_wanted_but_at_most_half() -> None:
    long = Claim(1000, 0)
    for left, room in ((10, 54), (100, 32), (800, 64)):
        other = lacking(left)
        assert Turns([lacking(1000), other], (), 0).share(long, 64) == room
        assert Turns([lacking(1000)], [other, lacking(999)], 0).share(long, 64) == room
    small = [Turns([lacking(1000)], [lacking(10)], number).share(long, LEAST - 1) for number in (0, 1)]
    assert small == [LEAST - 1, 0]
    assert Turns((), (), 1).share(long, 8) == 8
