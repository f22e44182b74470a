"""Several gateways before one fleet share nothing and agree nevertheless: each follows the engines' events."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from .stack import Engine, Gateway, metric
from .test_cases_logprobs_cache import ids_of
from .tiny import TinyModels

PREFIXES, BRANCHES, PREFIX = 32, 6, 10 * 16
PREDICTED = "branchline_router_predicted_cached_tokens_total"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines(tiny: TinyModels) -> Iterator[list[Engine]]:
    """Four engines of one model."""
    with ExitStack() as stack:
        model = str(tiny.llama("plain"))
        found = []
        for _ in range(4):
            found.append(Engine(model=model))
            stack.callback(found[-1].stop)
        yield found


def trace(base: int) -> list[list[int]]:
    """Prompts of branches that share prefixes, in an order in which equal prefixes are far from each other."""
    draw = random.Random(7)
    prompts = []
    for branch in range(BRANCHES):
        order = list(range(PREFIXES))
        draw.shuffle(order)
        # The first of a round is never the last of the one before: events take a moment.
        order.sort(key=lambda prefix: prefix % 2)
        prompts += [ids_of(base + prefix, PREFIX) + ids_of(base + 5000 + prefix * 50 + branch, 12) for prefix in order]
    return prompts


def hit_rate(engines: list[Engine], gateways: int, base: int) -> tuple[float, float]:
    """Share of prompt tokens found in caches, and how far the predictions of the gateways were off, as a share."""
    with ExitStack() as stack:
        workers = [f"grpc://{engine.address}" for engine in engines]
        front = []
        for _ in range(gateways):
            front.append(Gateway(workers=workers))
            stack.callback(front[-1].stop)
        for gateway in front:
            gateway.wait_ready()
            gateway.client.get("/health").raise_for_status()
        total = cached = 0
        for at, prompt in enumerate(trace(base)):
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}}
            answer = front[at % gateways].client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            info = answer.json()["meta_info"]
            total += info["prompt_tokens"]
            cached += info["cached_tokens"]
        predicted = sum(metric(gateway.client, PREDICTED) or 0.0 for gateway in front)
        return cached / total, abs(predicted - cached) / total


def test_three_gateways_hit_as_often_as_one(engines: list[Engine]) -> None:
    alone, wrong_alone = hit_rate(engines, 1, 20_000)
    three, wrong_three = hit_rate(engines, 3, 40_000)
    print(
        f"hit rate: one gateway {alone:.4f}, three {three:.4f}; predictions off by {wrong_alone:.4f}, {wrong_three:.4f}"
    )
    assert alone > 0.6, "the trace shares most of its tokens"
    assert abs(alone - three) <= 0.02
    assert wrong_three <= 0.02, "each gateway knows what the others' requests left in the caches"
