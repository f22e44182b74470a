"""Mixed churn through the whole stack with flat memory: `make soak` for half an hour, a short form in every run.

BRANCHLINE_SOAK_S is the length in seconds; CI's 25 show the leak of a few KB a request, `make soak` that of bytes.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time

import httpx
import pytest

from .conftest import Starter
from .stack import Stack
from .test_cases_logprobs_cache import ids_of
from .test_leaks import handles, resident_mb
from .tiny import TinyModels

SECONDS = float(os.environ.get("BRANCHLINE_SOAK_S", "25"))
CLIENTS = 24
WARM = 0.4  # of the time: caches, arenas and pools of connections fill
GROWTH_MB = 12.0  # a process may differ by so much between the two halves after it
pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


def one(client: httpx.Client, url: str, draw: random.Random) -> None:
    """One request of any kind: whole, cut, batched, wrong, planted, aborted by its id, high or low."""
    prompt = ids_of(draw.randrange(60), draw.randint(4, 90))
    params = {"max_new_tokens": draw.choice([0, 1, 8, 40]), "ignore_eos": True, "temperature": draw.choice([0, 0.8])}
    kind = draw.choice(["whole", "cut", "cut", "batch", "wrong", "abort", "chat", "n"])
    body = {"input_ids": prompt, "sampling_params": params, "priority": draw.choice([0, 0, 0, 1, -1])}
    if kind == "cut":
        with client.stream("POST", f"{url}/generate", json={**body, "stream": True}) as answer:
            for count, _ in enumerate(answer.iter_lines()):
                if count >= draw.randint(0, 12):
                    return
        return
    if kind == "chat":
        text = "tide " * draw.randint(1, 30)
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
        answer = client.post(f"{url}/v1/chat/completions", json=chat)
    elif kind == "abort":
        rid = f"soak-{draw.getrandbits(60)}"
        with client.stream("POST", f"{url}/generate", json={**body, "rid": rid, "stream": True}) as stream:
            httpx.post(f"{url}/abort_request", json={"rid": rid}, timeout=60)
            stream.read()
        return
    else:
        if kind == "batch":
            body["input_ids"] = [prompt, prompt[: len(prompt) // 2 + 1], ids_of(draw.randrange(60), 5)]
        if kind == "wrong":
            body["input_ids"] = draw.choice([[], [-1], [10**9], ["x"], list(range(4000))])
        if kind == "n":
            body["sampling_params"] = {**params, "n": 3}
        answer = client.post(f"{url}/generate", json=body)
    assert answer.status_code in ((400,) if kind == "wrong" else (200, 429)), answer.text


def churn(stack: Stack, until: float, counts: list[int], faults: list[BaseException]) -> list[threading.Thread]:
    """CLIENTS threads that go on until then."""

    def work(number: int) -> None:
        draw = random.Random(number)
        try:
            with httpx.Client(timeout=120) as client:
                while time.monotonic() < until and not faults:
                    one(client, stack.url, draw)
                    counts[number] += 1
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    return threads


def test_mixed_churn_leaves_memory_flat(stacks: Starter, tiny: TinyModels) -> None:
    # The pool is small, so that it is full, evicts and retracts all the time.
    stack = stacks(
        "--max-total-tokens", "1024", "--max-running-requests", "8", "--max-queued-requests", "64",
        model=str(tiny.llama("plain")),
    )  # fmt: skip
    assert stack.gateway is not None
    pids = [stack.gateway.process.child.pid, stack.engines[0].process.child.pid]
    start = time.monotonic()
    counts, faults = [0] * CLIENTS, list[BaseException]()
    threads = churn(stack, start + SECONDS, counts, faults)
    samples: list[tuple[float, list[float]]] = []
    while any(thread.is_alive() for thread in threads):
        samples.append(((time.monotonic() - start) / SECONDS, [resident_mb(pid) for pid in pids]))
        threads[0].join(SECONDS / 200)
        next((thread for thread in threads if thread.is_alive()), threads[0]).join(SECONDS / 200)
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]
    assert sum(counts) > SECONDS, "the stack has worked"
    stack.assert_idle(20)
    cache = stack.cache()
    assert cache["evicted_pages"] > 0
    half = WARM + (1 - WARM) / 2
    for place, _ in enumerate(pids):
        early = statistics.median(sizes[place] for at, sizes in samples if WARM <= at < half)
        late = statistics.median(sizes[place] for at, sizes in samples if at >= half)
        assert late - early < GROWTH_MB, f"process {place} grew from {early:.1f} to {late:.1f} MB"
    print(f"{sum(counts)} requests in {SECONDS:g} s; MB at last: {samples[-1][1]}; {cache['retractions']} retractions")
    assert all(opened[0] < 400 for opened in map(handles, pids))
