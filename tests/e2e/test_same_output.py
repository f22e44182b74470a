"""One request, one output: streamed or not, alone or in company, cached, evicted or retracted (to near-ties)."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import Starter
from .stack import Stack, collect
from .test_cases_logprobs_cache import ids_of

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
NEAR_TIE = 1e-3


def mix(seed: int, count: int) -> list[dict[str, Any]]:
    """Random requests: lengths, shared beginnings, greedy and seeded, penalties, logprobs."""
    draw = random.Random(seed)
    shared = [ids_of(1000 + seed * 10 + i, draw.choice([48, 80])) for i in range(4)]
    out = []
    for index in range(count):
        ids = [*draw.choice(shared), *ids_of(5000 + seed * 1000 + index, draw.randint(1, 24))]
        params: dict[str, Any] = {"max_new_tokens": draw.randint(1, 24), "ignore_eos": True, "temperature": 0}
        if draw.random() < 0.5:
            params |= {"temperature": draw.choice([0.7, 1.0]), "top_p": draw.choice([0.9, 1.0]), "sampling_seed": index}
        if draw.random() < 0.3:
            params["repetition_penalty"] = 1.2
        out.append({"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2})
    return out


def run(stack: Stack, body: dict[str, Any]) -> dict[str, Any]:
    answer = stack.post("/generate", body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def assert_same(body: dict[str, Any], one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal ids and close logprobs up to the first near-tie of a greedy choice.

    Whether a change of 1e-3 in a logit explains a seeded choice can't be seen from outside, so those get the same rule.
    """
    left, right = one["meta_info"], other["meta_info"]
    tops = left["output_top_logprobs"]
    for position, (a, b) in enumerate(zip(left["output_token_logprobs"], right["output_token_logprobs"], strict=True)):
        if a[1] != b[1]:
            gap = abs(tops[position][0][0] - tops[position][1][0])
            greedy = body["sampling_params"]["temperature"] == 0 and "repetition_penalty" not in body["sampling_params"]
            assert not greedy or gap < NEAR_TIE, f"position {position}: {a} or {b}, gap {gap}"
            assert greedy or NEAR_TIED_DRAWS.take(), f"position {position}: {a} or {b} ({body['sampling_params']})"
            return
        assert a[0] == pytest.approx(b[0], abs=NEAR_TIE)
    assert one["text"] == other["text"]


class Allowance:
    """Seeded draws may differ where two perturbed logits tie; that is rare, so few are allowed in a session."""

    def __init__(self, count: int) -> None:
        self.left = count

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0


NEAR_TIED_DRAWS = Allowance(2)


@pytest.fixture(scope="module")
def alone(stacks: Starter) -> dict[int, list[dict[str, Any]]]:
    """Answers of each mix one by one, cache off."""
    stack = stacks("--disable-radix-cache")
    return {seed: [run(stack, body) for body in mix(seed, 64)] for seed in (1, 2)}


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--disable-radix-cache",),
        ("--max-total-tokens", "1024"),
        ("--max-total-tokens", "1024", "--page-size", "1", "--prefill-chunk", "7"),
    ],
    ids=["cache", "no cache", "evicting and retracting", "page 1, chunks of 7, evicting and retracting"],
)
def test_sixty_four_at_once_equal_one_by_one(
    stacks: Starter, alone: dict[int, list[dict[str, Any]]], flags: tuple[str, ...]
) -> None:
    stack = stacks(*flags)
    before = stack.cache()
    for seed, expected in alone.items():
        bodies = mix(seed, 64)
        with ThreadPoolExecutor(64) as pool:
            together = list(pool.map(lambda body: run(stack, body), bodies))
        for body, one, other in zip(bodies, expected, together, strict=True):
            assert_same(body, one, other)
    after = stack.cache()
    if "1024" in flags:
        assert after["evicted_pages"] > before["evicted_pages"]
    stack.assert_idle(10)


def test_streamed_text_equals_plain(stack: Stack) -> None:
    for body in mix(3, 12):
        params = body["sampling_params"]
        plain = run(stack, {**body, "stream": False})
        with stack.stream("/generate", body) as data:
            pieces = collect(data)
        assert pieces[-1]["text"] == plain["text"], params
        assert pieces[-1]["output_ids"] == plain["output_ids"], params
        completion = {
            "model": "default",
            "prompt": body["input_ids"],
            "max_tokens": params["max_new_tokens"],
            "ignore_eos": True,
        }
        completion |= {name: params[name] for name in ("temperature", "top_p", "repetition_penalty") if name in params}
        completion["seed"] = params.get("sampling_seed")
        with stack.stream("/v1/completions", completion) as data:
            joined = "".join(chunk["choices"][0]["text"] for chunk in collect(data))
        assert joined == plain["text"], params
