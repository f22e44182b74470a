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
REQUESTS, CONCURRENCY, POOL = 1000, 32, 3072


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


def handles(pid: int) -> tuple[int, int]:
    """Open descriptors and threads of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir()))


def in_flight(stack: Stack) -> list[float]:
    """The gateway's in-flight gauges; the call that asks counts itself."""
    lines = stack.client.get("/metrics").text.splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if "in_flight" in line and not line.startswith("#")]


def test_half_the_clients_leave(stacks: Starter) -> None:
    # The pool is smaller than what one round caches, so that its memory has all been touched when growth is measured.
    stack = stacks("--max-total-tokens", str(POOL))
    assert stack.gateway is not None
    pids = [stack.gateway.process.child.pid, stack.engines[0].process.child.pid]
    sizes, opened = [], []
    for seed in (1, 2, 3):
        storm(stack, seed)
        stack.assert_idle(10)
        assert stack.cache()["evicted_pages"] > 0, "the pool has been full"
        gauges = in_flight(stack)
        assert gauges and sum(gauges) <= 1, gauges
        sizes.append([resident_mb(pid) for pid in pids])
        opened.append([handles(pid) for pid in pids])
    # The first round fills caches, pools of connections and arenas; after it nothing may grow.
    for before, after in zip(sizes[1], sizes[2], strict=True):
        assert after - before < 8, sizes
    for before, after in zip(opened[1], opened[2], strict=True):
        assert after[0] - before[0] < 8 and after[1] <= before[1] + 2, opened
