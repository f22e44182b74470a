"""Two engines behind one gateway: requests go to the engine that holds their prefix, and the index is exact."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from .stack import Engine, Stack, metric, wait_until
from .test_cases_logprobs_cache import ids_of
from .tiny import TinyModels

PAGE, PREFIX = 16, 10 * 16
PREDICTED = "branchline_router_predicted_cached_tokens_total"


@pytest.fixture
def pair(tiny: TinyModels) -> Iterator[Stack]:
    """Its own stack: the tests kill engines and count from zero."""
    stack = Stack(model=str(tiny.llama("plain")), engines=2)
    yield stack
    stack.close()


def prompt_tokens(stack: Stack) -> list[int]:
    """Prompt tokens served by each worker, in the order of their addresses on the command line; dead ones count 0."""
    workers = stack.client.get("/server_info").json()["workers"]
    return [worker.get("cache", {}).get("prompt_tokens", 0) for worker in workers]


def ask(stack: Stack, ids: list[int]) -> tuple[int, int, int]:
    """Worker that served, tokens predicted and tokens found in its cache."""
    predicted, served = metric(stack.client, PREDICTED), prompt_tokens(stack)
    params = {"max_new_tokens": 1, "ignore_eos": True}
    info: dict[str, Any] = stack.generate(ids, sampling_params=params)["meta_info"]
    moved = [now - then for now, then in zip(prompt_tokens(stack), served, strict=True)]
    (worker,) = [index for index, tokens in enumerate(moved) if tokens > 0]
    return worker, int(metric(stack.client, PREDICTED) - predicted), info["cached_tokens"]


def branch(prefix: int, number: int) -> list[int]:
    """One of a prefix's continuations."""
    return ids_of(7000 + prefix, PREFIX) + ids_of(8000 + prefix * 100 + number, 20)


def test_branches_go_where_their_prefix_is_and_the_prediction_is_exact(pair: Stack) -> None:
    homes = {}
    for prefix in range(8):
        worker, predicted, cached = ask(pair, ids_of(7000 + prefix, PREFIX))
        assert (predicted, cached) == (0, 0)
        homes[prefix] = worker
    assert Counter(homes.values()).keys() == {0, 1}, "both engines got prefixes"
    for number in range(3):
        for prefix, home in homes.items():
            worker, predicted, cached = ask(pair, branch(prefix, number))
            assert worker == home
            assert predicted == cached == PREFIX
    # A part of a prefix is predicted to the page.
    worker, predicted, cached = ask(pair, ids_of(7000, PREFIX)[:70] + ids_of(9000, 30))
    assert (worker, predicted, cached) == (homes[0], 64, 64)


def test_flush_empties_the_index_too(pair: Stack) -> None:
    for prefix in range(12):
        ask(pair, ids_of(7000 + prefix, PREFIX))
    assert ask(pair, branch(0, 0))[1:] == (PREFIX, PREFIX)
    pair.flush()
    probes = count(1)  # a prefix that was asked for is cached again, so each probe takes another
    wait_until(lambda: ask(pair, branch(next(probes), 0))[1:] == (0, 0), 10, "the prediction is none after a flush")
    assert next(probes) < 12, "some prefix was left to ask for"


def test_restarted_engine_starts_with_an_empty_index(pair: Stack, tiny: TinyModels) -> None:
    homes = {prefix: ask(pair, ids_of(7000 + prefix, PREFIX))[0] for prefix in range(8)}
    lost = [prefix for prefix, home in homes.items() if home == 0]
    kept = [prefix for prefix, home in homes.items() if home == 1]
    assert lost and kept
    engine = pair.engines[0]
    os.killpg(engine.process.child.pid, signal.SIGKILL)
    engine.process.stop()

    def ready() -> list[bool]:
        return [worker["ready"] for worker in pair.client.get("/workers").json()["workers"]]

    wait_until(lambda: ready() == [False, True], 20, "the death is noticed")
    assert ask(pair, branch(kept[0], 0))[1:] == (PREFIX, PREFIX)
    pair.engines[0] = Engine(model=str(tiny.llama("plain")), port=int(engine.address.rsplit(":", 1)[1]))
    wait_until(lambda: ready() == [True, True], 20, "the new engine is used")
    assert ask(pair, branch(lost[0], 0))[1:] == (0, 0)
    for prefix in kept:
        assert ask(pair, branch(prefix, 1)) == (1, PREFIX, PREFIX)
