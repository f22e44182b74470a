"""Nothing leaks: a thousand requests, half of them cut at random, twice."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import httpx
import pytest

from .conftest import Starter
from .stack import Stack
from .test_cases_logprobs_cache import ids_of

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]
REQUESTS, CONCURRENCY = 1000, 32


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"no VmRSS for {pid}")


def one(client: httpx.Client, url: str, draw: random.Random) -> None:
    """One streamed request; every second is cut after a random number of events, some before the first."""
    params = {"max_new_tokens": draw.randint(1, 12), "ignore_eos": True, "temperature": draw.choice([0, 1])}
    body = {"input_ids": ids_of(draw.randint(0, 40), draw.randint(4, 60)), "sampling_params": params, "stream": True}
    cut = draw.randint(0, 6) if draw.random() < 0.5 else None
    with client.stream("POST", f"{url}/generate", json=body) as answer:
        assert answer.status_code == 200
        for count, _ in enumerate(answer.iter_lines()):
            if cut is not None and count >= cut * 2:
                return


def storm(stack: Stack, seed: int) -> None:
    """REQUESTS requests from CONCURRENCY threads."""
    faults: list[BaseException] = []

    def worker(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        try:
            with httpx.Client(timeout=60) as client:
                for _ in range(REQUESTS // CONCURRENCY + 1):
                    one(client, stack.url, draw)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(CONCURRENCY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]


def test_half_the_clients_leave(stacks: Starter) -> None:
    stack = stacks()
    assert stack.gateway is not None
    pids = [stack.gateway.process.child.pid, stack.engines[0].process.child.pid]
    sizes = []
    for seed in (1, 2, 3):
        storm(stack, seed)
        stack.assert_idle(10)
        metrics = stack.client.get("/metrics").text
        in_flight = [line for line in metrics.splitlines() if "in_flight" in line and not line.startswith("#")]
        assert in_flight and all(float(line.rsplit(" ", 1)[1]) <= 1 for line in in_flight), in_flight
        sizes.append([resident_mb(pid) for pid in pids])
    # The first round fills caches and arenas; after it nothing may grow.
    for before, after in zip(sizes[1], sizes[2], strict=True):
        assert after - before < 8, sizes
