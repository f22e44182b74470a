"""The e2e cases of areas text and sampling, on the real model through the gateway."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cases.loader import case

from .conftest import Starter
from .stack import Stack, collect
from .tiny import TinyModels

pytestmark = pytest.mark.model


def healthy(stack: Stack) -> None:
    """A normal request is served and the gateway is healthy."""
    assert stack.generate("Hi", sampling_params={"max_new_tokens": 1})["meta_info"]["completion_tokens"] == 1
    assert stack.client.get("/health").status_code == 200


def test_text_utf8_emoji_two_tokens(stack: Stack) -> None:
    given = case("text-utf8-emoji-two-tokens")
    request, right = given["given"]["truncated"]["request"], given["right"]["truncated"]
    plain = stack.post("/generate", request).json()
    with stack.stream("/generate", request) as data:
        pieces = collect(data)
    assert plain["text"] == pieces[-1]["text"] == right["text_non_stream"]
    assert plain["meta_info"]["finish_reason"]["type"] == right["finish_reason"]
    assert plain["meta_info"]["completion_tokens"] == right["completion_tokens"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_text_skip_special_per_request(stack: Stack, order: tuple[int, int]) -> None:
    given = case("text-skip-special-per-request")
    bodies = given["given"]["requests"]
    with ThreadPoolExecutor(2) as pool:
        answers = dict(zip(order, pool.map(lambda i: stack.post("/generate", bodies[i]).json(), order), strict=True))
    for index in (0, 1):
        want = given["right"][f"request_{index}"]
        assert answers[index]["text"] == want["text"]
        assert answers[index]["output_ids"] == want["output_ids"]


def test_sampling_input_ids_out_of_vocab(stack: Stack) -> None:
    given = case("sampling-input-ids-out-of-vocab")
    params = given["given"]["sampling_params"]
    for ids, status in zip(given["given"]["input_ids_each"], given["right"]["status_each"], strict=True):
        answer = stack.post("/generate", {"input_ids": ids, "sampling_params": params})
        assert answer.status_code == status, (ids, answer.text)
        if status == 400:
            assert answer.json()["error"]["message"]
        healthy(stack)
    for prompt in ([[-1]], [[49152]]):
        answer = stack.post("/v1/completions", {"model": "default", "prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 400, answer.text


def test_sampling_logit_bias_keys(stack: Stack) -> None:
    given = case("sampling-logit-bias-keys")
    body = given["given"]["body"]
    for bias, status in zip(given["given"]["logit_bias_each"], given["right"]["status_each"], strict=True):
        answer = stack.post("/v1/chat/completions", {**body, "logit_bias": bias})
        assert answer.status_code == status, (bias, answer.text)
        assert stack.post("/v1/chat/completions", body).status_code == 200


def test_sampling_stop_token_ids_range(stack: Stack) -> None:
    given = case("sampling-stop-token-ids-range")
    params = given["given"]["sampling_params"]
    neighbour_params = {"max_new_tokens": 24, "ignore_eos": True}
    alone = stack.generate("The tide comes in", sampling_params=neighbour_params)["text"]
    for ids, status in zip(given["given"]["stop_token_ids_each"], given["right"]["status_each"], strict=True):
        with ThreadPoolExecutor(1) as pool:
            neighbour = pool.submit(stack.generate, "The tide comes in", sampling_params=neighbour_params)
            body = {"text": given["given"]["text"], "sampling_params": {**params, "stop_token_ids": ids}}
            answer = stack.post("/generate", body)
            assert answer.status_code == status, (ids, answer.text)
            assert neighbour.result()["text"] == alone


def test_sampling_n_with_seed(stack: Stack) -> None:
    given = case("sampling-n-with-seed")
    body = {"model": "default", **given["given"]["body"]}
    first, second = (stack.post("/v1/completions", body).json()["choices"] for _ in range(2))
    assert [choice["index"] for choice in first] == given["right"]["choice_indices"]
    texts = [choice["text"] for choice in first]
    assert len(set(texts)) >= given["right"]["distinct_texts_at_least"]
    assert [choice["text"] for choice in second] == texts


def test_sampling_min_tokens_all_eos_ids(stacks: Starter, tiny: TinyModels) -> None:
    given = case("sampling-min-tokens-all-eos-ids")
    model = tiny.llama(
        "min-tokens",
        generation_config={"eos_token_id": given["given"]["model_override"]["generation_config.eos_token_id"]},
    )
    stack = stacks(model=str(model))
    answer: dict[str, Any] = stack.post("/generate", given["given"]["request"]).json()
    right = given["right"]
    assert 0 not in answer["output_ids"][:5]
    assert answer["output_ids"][5] == right["output_ids_position_6"]
    assert answer["meta_info"]["completion_tokens"] == right["completion_tokens"]
    reason = answer["meta_info"]["finish_reason"]
    assert {key: reason[key] for key in ("type", "matched")} == right["finish_reason"]
