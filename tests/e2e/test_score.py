"""`/v1/score` on the real model: exact sums, shared prefix, leases, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest

from .conftest import Starter
from .stack import Stack
from .test_cases_logprobs_cache import ids_of

pytestmark = pytest.mark.model
PAGE = 16


def score(stack: Stack, **body: Any) -> dict[str, Any]:
    answer = stack.post("/v1/score", {"model": "default", **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_sums_are_those_of_input_logprobs(stack: Stack) -> None:
    prefix, choices = ids_of(40, 50), [ids_of(41 + index, 1 + index) for index in range(4)]
    found = score(stack, prompt=prefix, choices=choices)
    for one, choice in zip(found["scores"], choices, strict=True):
        alone = stack.generate(
            prefix + choice,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=len(prefix),
        )["meta_info"]["input_token_logprobs"]
        assert one["tokens"] == choice
        assert one["token_logprobs"] == pytest.approx([entry[0] for entry in alone], abs=1e-6)
        assert one["sum"] == pytest.approx(math.fsum(one["token_logprobs"]), abs=1e-9)
    assert sum(found["probabilities"]) == pytest.approx(1.0)


def test_the_likelier_text_wins_and_the_prefix_is_shared(stack: Stack) -> None:
    stack.flush()
    text = "The sun is a star. The moon goes around the earth. " * 4 + "The capital of France is"
    found = score(stack, prompt=text, choices=[" Paris", " London", " a small green frog"])
    assert max(range(3), key=lambda index: found["probabilities"][index]) == 0
    usage = found["usage"]
    length = len(stack.post("/v1/tokenize", {"prompt": text}).json()["tokens"])
    assert usage["prompt_tokens"] == 3 * length + sum(len(one["tokens"]) for one in found["scores"])
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3 * (length // PAGE * PAGE)


def test_messages_can_be_scored(stack: Stack) -> None:
    messages = [{"role": "user", "content": "Is the sky blue? Answer yes or no."}]
    found = score(stack, messages=messages, choices=["Yes", "No"])
    assert len(found["scores"]) == 2


def test_a_score_finds_its_lease(stack: Stack) -> None:
    prefix = ids_of(45, 64)
    lease = stack.post("/v1/leases", {"model": "default", "prompt": prefix, "ttl_ms": 60_000}).json()
    found = score(stack, prompt=prefix, choices=[[5], [6]], lease={"id": lease["id"]})
    assert found["lease"] == "held"
    stack.client.delete(f"/v1/leases/{lease['id']}")
    assert score(stack, prompt=prefix, choices=[[5], [6]], lease={"id": lease["id"]})["lease"] == "lost"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a"}, "choices"),
        ({"prompt": "a", "choices": []}, "choices"),
        ({"prompt": "a", "choices": ["b", ""]}, "choices[1]"),
        ({"prompt": "a", "choices": ["b", 3]}, "choices[1]"),
        ({"prompt": "a", "choices": [[10**9]]}, "choices[0][0]"),
        ({"choices": ["b"]}, "prompt"),
        ({"prompt": "a", "choices": ["b"], "lease": {"ttl_ms": 5}}, "lease.ttl_ms"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_field(stack: Stack, body: dict[str, Any], field: str) -> None:
    answer = stack.post("/v1/score", {"model": "default", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_a_workers_refusal_reaches_the_client_without_its_address(stacks: Starter) -> None:
    stack = stacks("--max-total-tokens", "512")
    answer = stack.post("/v1/score", {"model": "default", "prompt": ids_of(46, 600), "choices": [[5], [6]]})
    message = answer.json()["error"]["message"]
    assert answer.status_code in (400, 429)
    assert "grpc://" not in message and "127.0.0.1" not in message, message
    assert "512" in message or "600" in message or "pages" in message, message
    stack.assert_idle(10)
