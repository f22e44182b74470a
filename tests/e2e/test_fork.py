"""The fork experiment: a planted prefix is reused by its continuations, and the counters say exactly how much."""

from __future__ import annotations

import pytest

from .conftest import Starter
from .stack import Stack
from .test_cases_logprobs_cache import ids_of

pytestmark = pytest.mark.model
PREFIX, SUFFIX, OUT, PAGE = 160, 10, 6, 16


def delta(stack: Stack, before: dict[str, int]) -> dict[str, int]:
    """Growth of the counters."""
    after = stack.cache()
    return {name: after[name] - before[name] for name in ("prompt_tokens", "cached_tokens", "lookups", "hits")}


def branches(stack: Stack) -> list[int]:
    """Runs two continuations; their cached tokens."""
    params = {"max_new_tokens": OUT, "ignore_eos": True}
    prompts = [ids_of(50, PREFIX) + ids_of(60 + i, SUFFIX) for i in range(2)]
    return [stack.generate(ids, sampling_params=params)["meta_info"]["cached_tokens"] for ids in prompts]


def test_planted_prefix_is_reused(stack: Stack) -> None:
    stack.flush()
    before = stack.cache()
    planted = stack.generate(ids_of(50, PREFIX), sampling_params={"max_new_tokens": 0})
    assert planted["meta_info"]["completion_tokens"] == 0
    assert planted["meta_info"]["finish_reason"]["type"] == "length"
    assert delta(stack, before) == {"prompt_tokens": PREFIX, "cached_tokens": 0, "lookups": 1, "hits": 0}
    assert stack.cache()["pages_evictable"] == PREFIX // PAGE
    assert branches(stack) == [PREFIX, PREFIX]
    assert delta(stack, before) == {
        "prompt_tokens": PREFIX + 2 * (PREFIX + SUFFIX),
        "cached_tokens": 2 * PREFIX,
        "lookups": 3,
        "hits": 2,
    }
    info = stack.client.get("/server_info").json()["workers"][0]["cache"]
    assert info["hit_rate"] == pytest.approx(info["cached_tokens"] / info["prompt_tokens"])


def test_without_cache_nothing_is_reused(stacks: Starter) -> None:
    stack = stacks("--disable-radix-cache")
    before = stack.cache()
    stack.generate(ids_of(50, PREFIX), sampling_params={"max_new_tokens": 0})
    assert branches(stack) == [0, 0]
    assert delta(stack, before) == {
        "prompt_tokens": PREFIX + 2 * (PREFIX + SUFFIX),
        "cached_tokens": 0,
        "lookups": 3,
        "hits": 0,
    }
    assert stack.cache()["pages_free"] == stack.cache()["pages_total"]


def test_without_planting_the_first_branch_pays(stack: Stack) -> None:
    stack.flush()
    assert branches(stack) == [0, PREFIX]
