"""The e2e cases of areas logprobs and cache, on the real model through the gateway."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cases.loader import case

from .conftest import Starter
from .stack import Stack

pytestmark = pytest.mark.model


def close(left: list[Any], right: list[Any], tolerance: float = 1e-3) -> bool:
    """Same nulls, same numbers within the tolerance."""
    return len(left) == len(right) and all(
        (a is None and b is None) or (a is not None and b is not None and abs(a - b) <= tolerance)
        for a, b in zip(left, right, strict=True)
    )


def ids_of(seed: int, count: int) -> list[int]:
    """Distinct ordinary token ids."""
    return random.Random(seed).sample(range(1000, 40000), count)


def test_logprobs_boundary_not_null(stack_page1: Stack) -> None:
    given = case("logprobs-boundary-not-null")
    ids, params = given["given"]["input_ids"], given["given"]["sampling_params"]

    def run(start: int) -> dict[str, Any]:
        answer = stack_page1.generate(ids, sampling_params=params, return_logprob=True, logprob_start_len=start)
        info: dict[str, Any] = answer["meta_info"]
        return info

    stack_page1.flush()
    cold = [entry[0] for entry in run(0)["input_token_logprobs"]]
    starts = given["given"]["logprob_start_len_each"]
    for start, length in zip(starts, given["right"]["len_input_token_logprobs_each"], strict=True):
        info = run(start)
        values = [entry[0] for entry in info["input_token_logprobs"]]
        assert len(values) == length
        assert [i for i, value in enumerate(values) if value is None] == ([0] if start == 0 else [])
        assert close(values, cold[start:])
        assert [entry[1] for entry in info["input_token_logprobs"]] == ids[start:]
        if start == 5:
            assert info["cached_tokens"] >= 4


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_logprobs_prompt_with_prefix_cache(stacks: Starter, page_size: int) -> None:
    given = case("logprobs-prompt-with-prefix-cache")
    assert page_size in given["given"]["page_sizes"]
    stack = stacks("--page-size", str(page_size))
    for name, length in given["right"]["len_input_token_logprobs"].items():
        ids = list(range(1000, 1000 + length))
        both = []
        for _ in range(2):
            answer = stack.generate(
                ids, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
            )
            both.append([entry[0] for entry in answer["meta_info"]["input_token_logprobs"]])
        assert len(both[0]) == length, name
        assert close(both[0], both[1])


def test_logprobs_zero_is_a_request(stack: Stack) -> None:
    bodies = case("logprobs-zero-is-a-request")["given"]["bodies"]
    first, second = (stack.post("/v1/completions", {"model": "default", **body}).json() for body in bodies)
    values = first["choices"][0]["logprobs"]["token_logprobs"]
    assert len(values) == 3 and all(isinstance(value, float) for value in values)
    assert second["choices"][0]["logprobs"] is None


def test_logprobs_echo_no_generation(stack: Stack) -> None:
    given = case("logprobs-echo-no-generation")
    right = given["right"]
    answer = stack.post("/v1/completions", {"model": "default", **given["given"]["body"]})
    assert answer.status_code == right["status"], answer.text
    body = answer.json()
    choice = body["choices"][0]
    assert choice["text"] == right["text"]
    assert choice["finish_reason"] == right["finish_reason"]
    assert body["usage"]["completion_tokens"] == right["usage_completion_tokens"]
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == body["usage"]["prompt_tokens"]
    assert [i for i, value in enumerate(values) if value is None] == [0]
    assert stack.post("/v1/completions", {"model": "default", "prompt": "x", "max_tokens": 1}).status_code == 200


def test_cache_cached_tokens_after_retraction(stacks: Starter) -> None:
    given = case("cache-cached-tokens-after-retraction")
    flags = given["given"]["flags"]
    stack = stacks("--max-total-tokens", str(flags["max_total_tokens"]), "--page-size", str(flags["page_size"]))
    params = given["given"]["sampling_params"]
    prompts = [ids_of(1, 48), ids_of(2, 48)]
    stack.flush()
    before = stack.cache()["retractions"]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda ids: stack.generate(ids, sampling_params=params), prompts))
    assert stack.cache()["retractions"] > before
    stack.assert_idle(10)
    for ids, answer in zip(prompts, both, strict=True):
        info = answer["meta_info"]
        assert info["cached_tokens"] == given["right"]["cached_tokens_each"]
        assert info["completion_tokens"] == given["right"]["completion_tokens_each"]
        stack.flush()
        assert stack.generate(ids, sampling_params=params)["output_ids"] == answer["output_ids"]


def test_cache_salt_and_extra_key_apart(stack_page1: Stack) -> None:
    given = case("cache-salt-and-extra-key-apart")
    stack_page1.flush()
    ids = ids_of(3, 40)
    seen = [
        stack_page1.generate(ids, sampling_params=given["given"]["sampling_params"], **fields)["meta_info"][
            "cached_tokens"
        ]
        for fields in given["given"]["sequence"]
    ]
    assert seen == given["right"]["cached_tokens"]


@pytest.mark.parametrize("page_size", [1, 16])
def test_cache_same_prompt_twice(stacks: Starter, page_size: int) -> None:
    given = case("cache-same-prompt-twice")
    stack = stacks("--page-size", str(page_size))
    want = given["right"]["second_cached_tokens"][f"page_{page_size}"]
    for length, cached in zip(given["given"]["input_ids_lengths"], want, strict=True):
        stack.flush()
        ids = ids_of(100 + length, length)
        first, second = (stack.generate(ids, sampling_params={"max_new_tokens": 4}) for _ in range(2))
        assert second["output_ids"] == first["output_ids"]
        assert second["meta_info"]["cached_tokens"] == cached, length


def test_cache_eight_at_once(stack_page1: Stack) -> None:
    """On the greedy text, through the gateway; with its regex in engine/tests/grammar/test_real_model.py."""
    given = case("cache-eight-at-once")
    prefix = ids_of(4, 64)
    prompts = [prefix + ids_of(200 + i, 8) for i in range(given["given"]["requests"])]
    params = {"max_new_tokens": 6, "ignore_eos": True}
    stack_page1.flush()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda ids: stack_page1.generate(ids, sampling_params=params), prompts))
    cached = sorted(answer["meta_info"]["cached_tokens"] for answer in together)
    assert sum(value >= 64 for value in cached) >= 7, cached
    assert cached[-1] <= 71
    stack_page1.flush()
    for ids, answer in zip(prompts, together, strict=True):
        assert stack_page1.generate(ids, sampling_params=params)["output_ids"] == answer["output_ids"]
