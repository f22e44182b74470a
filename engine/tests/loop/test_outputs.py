"""What a request gets does not depend on its company, the cache, chunking, retraction or the pool."""

from __future__ import annotations

import random

import pytest
from branchline.engine.types import FinishReason
from harness import EOS, Engine, text_of
from tiny import expected

BACKENDS = ("native", "reference", "none")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_greedy_answer_equals_the_model_without_pages(backend: str, page_size: int) -> None:
    engine = Engine(pages=256 // page_size, page_size=page_size, backend=backend)
    prompt = prompt_of(21)
    first = engine.run("a", prompt, max_tokens=20, ignore_eos=True)
    again = engine.run("b", prompt, max_tokens=20, ignore_eos=True)
    assert first.token_ids == again.token_ids == expected(prompt, 20)
    assert first.finish is not None and first.finish.reason is FinishReason.LENGTH
    assert first.finish.completion_tokens == 20
    assert engine.prompts["a"] == (21, 0)
    hit = 0 if backend == "none" else 20 // page_size * page_size
    assert engine.prompts["b"] == (21, hit)
    assert first.text == text_of(first.token_ids)


def mixed_requests(generator: random.Random, count: int) -> list[dict[str, object]]:
    """Requests over a few shared prefixes, with every option that changes the course of a sequence."""
    stems = [prompt_of(generator.randrange(1, 40), seed) for seed in range(3)]
    requests: list[dict[str, object]] = []
    for number in range(count):
        stem = generator.choice(stems)
        own = prompt_of(generator.randrange(0, 12), 1000 + number)
        options: dict[str, object] = {
            "prompt": [*stem[: generator.randrange(1, len(stem) + 1)], *own],
            "max_tokens": generator.choice([0, 1, 2, 7, 25]),
            "ignore_eos": generator.random() < 0.5,
        }
        if generator.random() < 0.4:
            options |= {"temperature": 0.9, "seed": generator.randrange(1 << 64)}
        if generator.random() < 0.3:
            options |= {"frequency_penalty": 1.5, "presence_penalty": 0.5}
        if generator.random() < 0.3:
            options |= {"stop": (text_of(prompt_of(1, number)),), "min_tokens": generator.randrange(3)}
        if generator.random() < 0.2:
            options["stop_token_ids"] = tuple(prompt_of(3, number))
        if generator.random() < 0.25:
            options |= {"n": 3, "temperature": 0.8, "seed": number}
        if generator.random() < 0.2:
            options["namespace"] = b"other"
        requests.append(options)
    return requests


def outcomes(engine: Engine) -> dict[tuple[str, int], tuple[object, ...]]:
    return {
        key: (
            answer.token_ids,
            answer.text,
            answer.finish and (answer.finish.reason, answer.finish.matched_stop, answer.finish.matched_token_id),
        )
        for key, answer in engine.answers.items()
    }


SETTINGS: list[dict[str, object]] = [
    {"backend": "native"},
    {"backend": "reference"},
    {"backend": "none"},
    {"backend": "native", "page_size": 1, "pages": 1024},
    {"backend": "native", "max_step_tokens": 7, "max_running_requests": 7},
    {"backend": "native", "prefill_chunk": 1},
    {"backend": "native", "mixed_prefill_tokens": 3},
    {"backend": "native", "pages": 24},
    {"backend": "native", "pages": 20, "max_step_tokens": 9, "max_running_requests": 9},
    {"backend": "none", "pages": 24},
    {"backend": "native", "page_size": 1, "pages": 90},
    {"backend": "native", "max_running_requests": 2},
]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize("seed", range(4))
def test_company_cache_chunks_and_tiny_pools_change_no_answer(number: int, seed: int) -> None:
    generator = random.Random(seed)
    requests = mixed_requests(generator, 24)
    alone: dict[tuple[str, int], tuple[object, ...]] = {}
    for index, request in enumerate(requests):
        lonely = Engine(pages=512, backend="none")
        lonely.submit(f"r{index}", **request)  # type: ignore[arg-type]
        lonely.finish()
        alone |= outcomes(lonely)
    together = Engine(**{"pages": 256, **SETTINGS[number]})  # type: ignore[arg-type]
    pending = list(enumerate(requests))
    while pending or together.loop.busy:
        for index, request in [pending.pop(0) for _ in range(min(generator.randrange(5), len(pending)))]:
            together.submit(f"r{index}", **request)  # type: ignore[arg-type]
        together.step()
    together.finish()
    assert not together.errors
    assert outcomes(together) == alone
    assert together.executor.widest <= together.loop.options.scheduler.max_step_tokens


def test_tiny_pools_do_retract_in_the_mixes_above() -> None:
    engine = Engine(pages=16)
    for number in range(6):
        engine.submit(f"r{number}", prompt_of(9, number), max_tokens=30, ignore_eos=True)
    engine.finish()
    assert engine.loop.stats().retractions > 0
    assert sum(answer.finish.retractions for answer in engine.answers.values() if answer.finish) > 0
    for number in range(6):
        assert engine.answers[f"r{number}", 0].token_ids == expected(prompt_of(9, number), 30)
