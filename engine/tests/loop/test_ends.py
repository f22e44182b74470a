"""How sequences end: stop strings and ids, limits, aborts, deadlines; what is said then, and what is given back."""

from __future__ import annotations

import random

import pytest
from branchline.engine.types import FinishReason, LogprobParams
from harness import EOS, Engine, text_of
from tiny import expected


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


PROMPT = ids(10)
PLAIN = expected(PROMPT, 30)


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_over_several_tokens_trims_text_ids_and_logprobs(include_stop: bool) -> None:
    engine = Engine()
    stop = text_of(PLAIN[4:7])
    answer = engine.run(
        "a", PROMPT, max_tokens=30, stop=(stop,), include_stop=include_stop, ignore_eos=True,
        logprobs=LogprobParams(output=True, top_k=2),
    )  # fmt: skip
    assert answer.finish is not None and answer.finish.reason is FinishReason.STOP
    assert answer.finish.matched_stop == stop and answer.finish.matched_token_id is None
    assert answer.token_ids == PLAIN[:7] and answer.finish.completion_tokens == 7
    assert answer.text == text_of(PLAIN[: 7 if include_stop else 4])
    assert len(answer.output.logprobs) == len(answer.output.top) == 7


def test_text_held_for_a_stop_is_released_at_the_end() -> None:
    engine = Engine()
    stop = text_of([*PLAIN[3:5], (PLAIN[5] + 1) % EOS])
    engine.submit("a", PROMPT, max_tokens=5, stop=(stop,), ignore_eos=True)
    engine.step(4)
    assert engine.answers["a", 0].text == text_of(PLAIN[:3]), "what may become a stop is held"
    engine.finish()
    assert engine.answers["a", 0].text == text_of(PLAIN[:5])


def test_an_abort_releases_held_text_too() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, max_tokens=20, stop=(text_of([*PLAIN[:5], 1, 1, 1]),), ignore_eos=True)
    engine.step(3)
    assert engine.answers["a", 0].text == ""
    engine.loop.abort("a")
    engine.finish()
    assert engine.answers["a", 0].text == text_of(PLAIN[:3])


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_id_is_counted_and_its_text_is_shown_only_if_asked(include_stop: bool) -> None:
    at = next(number for number in range(3, 30) if PLAIN[number] not in PLAIN[:number])
    answer = Engine().run("a", PROMPT, max_tokens=30, stop_token_ids=(PLAIN[at],), include_stop=include_stop)
    assert answer.finish is not None and answer.finish.matched_token_id == PLAIN[at]
    assert answer.token_ids == PLAIN[: at + 1] and answer.finish.completion_tokens == at + 1
    assert answer.text == text_of(PLAIN[: at + include_stop])


@pytest.mark.parametrize(
    ("skip", "include", "text"), [(True, False, ""), (True, True, ""), (False, False, ""), (False, True, "</s>")]
)
def test_the_end_mark_is_shown_only_with_include_stop_and_special_tokens(skip: bool, include: bool, text: str) -> None:
    answer = Engine().run(
        "a", PROMPT, max_tokens=5, logit_bias=((EOS, 100.0),), skip_special_tokens=skip, include_stop=include
    )
    assert answer.token_ids == [EOS] and answer.text == text
    assert answer.finish is not None and answer.finish.matched_token_id == EOS


def test_min_tokens_bans_every_end_id_until_then() -> None:
    answer = Engine().run(
        "a", PROMPT, max_tokens=20, min_tokens=5, stop_token_ids=(7,), logit_bias=((EOS, 50.0), (7, 90.0))
    )
    assert not {EOS, 7} & set(answer.token_ids[:5])
    assert answer.token_ids[5:] == [7]
    assert answer.finish is not None and answer.finish.matched_token_id == 7


def test_ignore_eos_goes_on_but_stop_ids_still_count() -> None:
    bias = ((EOS, 100.0),)
    engine = Engine()
    assert engine.run("a", PROMPT, max_tokens=4, ignore_eos=True, logit_bias=bias).token_ids == [EOS] * 4
    assert engine.run("b", PROMPT, max_tokens=4, ignore_eos=True, stop_token_ids=(EOS,), logit_bias=bias).token_ids == [
        EOS
    ]


def test_the_context_length_ends_by_length() -> None:
    answer = Engine(context_length=15).run("a", PROMPT, ignore_eos=True)
    assert answer.finish is not None and answer.finish.reason is FinishReason.LENGTH
    assert answer.token_ids == PLAIN[:5]


def test_a_deadline_ends_running_and_waiting_requests_within_one_step() -> None:
    engine = Engine(max_running_requests=1)
    engine.submit("runs", PROMPT, max_tokens=50, deadline_s=110.0, ignore_eos=True)
    engine.submit("waits", PROMPT, max_tokens=50, deadline_s=105.0)
    engine.submit("patient", ids(4), max_tokens=2, ignore_eos=True)
    engine.step(3)
    engine.clock.now = 107.0
    engine.step()
    waits = engine.answers["waits", 0]
    assert waits.finish is not None and waits.finish.reason is FinishReason.ABORT
    assert waits.finish.message == "deadline passed" and waits.token_ids == []
    assert engine.answers["runs", 0].finish is None
    engine.clock.now = 111.0
    engine.step()
    runs = engine.answers["runs", 0].finish
    assert runs is not None and runs.reason is FinishReason.ABORT and runs.completion_tokens >= 3
    engine.finish()
    patient = engine.answers["patient", 0].finish
    assert patient is not None and patient.reason is FinishReason.LENGTH


def test_timings_say_where_the_time_went() -> None:
    engine = Engine(max_step_tokens=4, max_running_requests=1)
    engine.submit("a", PROMPT, max_tokens=2, ignore_eos=True)
    for _ in range(4):
        engine.clock.now += 1.0
        engine.step()
    finish = engine.answers["a", 0].finish
    assert finish is not None
    assert (finish.queue_ms, finish.prefill_ms, finish.decode_ms) == (1000.0, 2000.0, 1000.0)


def test_aborted_whole_pages_stay_cached() -> None:
    engine = Engine()
    engine.submit("a", PROMPT, max_tokens=50, ignore_eos=True)
    engine.step(8)
    engine.loop.abort("a")
    engine.finish()
    engine.run("b", PROMPT + PLAIN[:6], max_tokens=1)
    assert engine.prompts["b"] == (16, 12)


def test_nothing_leaks_over_a_thousand_requests_of_which_half_are_aborted_at_random() -> None:
    generator = random.Random(11)
    engine = Engine(pages=80, max_running_requests=24, max_step_tokens=64)
    alive: list[str] = []
    for number in range(1000):
        name = f"r{number}"
        engine.submit(
            name, ids(generator.randrange(1, 60), generator.randrange(40)), max_tokens=generator.randrange(12),
            n=generator.choice([1, 1, 1, 3]), temperature=1.0, ignore_eos=True,
        )  # fmt: skip
        alive.append(name)
        if generator.random() < 0.5:
            engine.loop.abort(alive.pop(generator.randrange(len(alive))))
        if generator.random() < 0.3:
            engine.step()
    engine.finish()
    assert not engine.errors and len({name for name, _ in engine.answers}) == 1000
    assert all(answer.finish for answer in engine.answers.values())
    loop = engine.loop
    assert not loop._live and not loop._deadlines and loop._places == 0
    assert not loop._scheduler.has_work and len(loop._scheduler._inflight) == 0 == loop._scheduler.waiting.tokens
    counters = engine.counters()
    assert counters["free"] + counters["evictable"] == 80
    loop.flush()
    assert engine.counters()["free"] == 80
