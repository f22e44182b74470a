"""Pages reserved by what outputs turn out to be: no thrash when they are short, no waste when they are not."""

from __future__ import annotations

import random

import pytest
from branchline.engine.scheduler.forecast import BUCKET, CALM, UNKNOWN, Forecast
from harness import EOS, Engine
from parts import Parts
from tiny import expected


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


def test_the_expected_rest_is_the_mean_of_those_that_went_so_far() -> None:
    forecast, parts = Forecast(), Parts()
    for end in [10] * 8 + [200] * 8:
        forecast.ended(end)
    sequence = parts.sequence([1] * 5)
    sequence.max_len = 10_000
    assert forecast.left(sequence) == 105
    sequence.tokens += [1] * 2 * BUCKET
    assert forecast.left(sequence) == 200 - 2 * BUCKET
    sequence.tokens += [1] * 300
    assert forecast.left(sequence) == (2 * BUCKET + 300) // 2, "beyond all that were seen: half as much again"
    sequence.max_len = len(sequence.tokens) + 7
    assert forecast.left(sequence) == 7, "never more than it may"


def test_without_ends_nothing_is_reserved_until_pages_were_short() -> None:
    forecast, parts = Forecast(), Parts()
    sequence = parts.sequence([1] * 5)
    sequence.max_len = 10_000
    assert forecast.left(sequence) == 0 and forecast.pages([sequence] * 3, 4) == 3
    forecast.retracted()
    assert forecast.left(sequence) == UNKNOWN and forecast.pages([sequence], 4) == UNKNOWN // 4 + 1


def test_caution_eases_off() -> None:
    forecast = Forecast()
    forecast.retracted()
    assert forecast.share == 1.0
    shares = []
    for _ in range(600):
        forecast.step()
        shares.append(forecast.share)
    assert shares == sorted(shares, reverse=True) and shares[-1] == CALM


def storm(pages: int, count: int, **limits: object) -> tuple[Engine, int]:
    """More work than pages; the engine after it and the tokens that had to be computed at least."""
    engine = Engine(pages=pages, page_size=4, max_running_requests=32, **limits)
    least, generator = 0, random.Random(2)
    for number in range(count):
        length, new = generator.randrange(4, 20), generator.choice([8, 60, 60])
        engine.submit(f"r{number}", ids(length, number), max_tokens=new, ignore_eos=True)
        least += length + new - 1
    engine.finish()
    for number in range(count):
        assert engine.answers[f"r{number}", 0].finish is not None
    return engine, least


def test_a_storm_of_requests_does_not_thrash_when_pages_are_short() -> None:
    engine, least = storm(pages=80, count=120)
    stats = engine.loop.stats()
    assert stats.retractions <= 30, "a request is retracted once in four at most"
    assert engine.executor.computed_tokens <= 1.25 * least, "and little is computed twice"


def test_plenty_of_pages_are_used_in_full() -> None:
    engine, _ = storm(pages=2000, count=120)
    assert engine.loop.stats().retractions == 0
    assert engine.executor.steps < 400, "32 at once"


def test_pages_that_suffice_for_the_usual_output_are_not_kept_for_the_longest_allowed() -> None:
    engine = Engine(pages=100, page_size=4, max_running_requests=8, context_length=4000)
    for number in range(32):
        engine.submit(f"teach-{number}", ids(8, number), max_tokens=4, ignore_eos=True)
    engine.finish()
    for number in range(8):
        engine.submit(f"r{number}", ids(8, number), max_tokens=3000, stop=[" "], ignore_eos=True)
    engine.step(2)
    assert engine.loop.stats().running == 8
    engine.loop.abort_all()
    engine.finish()


def test_what_is_retracted_gives_the_same_tokens() -> None:
    engine = Engine(pages=24, page_size=4, max_running_requests=8)
    for number in range(8):
        engine.submit(f"r{number}", ids(12, number), max_tokens=40, ignore_eos=True)
    engine.finish()
    assert engine.loop.stats().retractions > 0
    for number in range(8):
        assert engine.answers[f"r{number}", 0].token_ids == expected(ids(12, number), 40)


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_output_that_fills_the_pool_is_as_long_after_a_cache_hit(page_size: int) -> None:
    made = Engine(pages=128 // page_size, page_size=page_size, max_step_tokens=512)
    prompt = [number % 90 for number in range(100)]
    for name in ("cold", "warm", "again"):
        made.submit(name, prompt, max_tokens=100, ignore_eos=True)
        made.finish()
    cold, *others = [made.answers[name, 0] for name in ("cold", "warm", "again")]
    assert len(cold.token_ids) == 29 and made.prompts["warm"][1] > 0
    assert [answer.token_ids for answer in others] == [cold.token_ids] * 2
