"""What the weights of the gateway's one-cost policy do to hits, balance and first tokens, in virtual time.

    python benchmarks/routing_cost.py TRACE.jsonl [--workers 4,8] [--seeds 4]

Workers are those of the router kit's scenario d: one prefill at a time, an LRU cache, decode that slows with company.
The trace is Mooncake's format, lengths divided by 8; prompts of `hot` and `families` share one or 40 long prefixes.
Prints a row for each set of weights; the gateway's own are the last. Time is the trace's own, not compressed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PAGE, BLOCK = 16, 64  # tokens of a worker's page, of a block that the gateway remembers
RUNNING = 64.0


@dataclass(frozen=True, slots=True)
class Weights:
    """A copied token, the most that copies cost, a surplus token, and the most that comes to."""

    copy: float
    copy_most: float
    surplus: float
    surplus_most: float


SETS = (Weights(0, 0, 0, 0), Weights(7, 12_000, 0, 0), Weights(24, 12_000, 0, 0), Weights(24, 12_000, 0.02, 500))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: when (s), prompt and output tokens, chained page names."""

    at: float
    prompt: int
    output: int
    pages: list[int]


@dataclass(slots=True)
class Worker:
    """One simulated worker and what the gateway holds of it."""

    pages: int
    rate: float
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    sent: set[int] = field(default_factory=set)
    waiting: list[tuple[Ask, int]] = field(default_factory=list)
    busy: bool = False
    queued: int = 0
    running: int = 0
    decoding: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


def chained(parts: list[object]) -> list[int]:
    parent, made = 0, []
    for part in parts:
        parent = hash((parent, part))
        made.append(parent)
    return made


def read_trace(path: Path, most: int = 1500) -> list[Ask]:
    rows = [json.loads(line) for line in path.read_text().splitlines()[:most]]
    asks = []
    for start, group in itertools.groupby(enumerate(rows), key=lambda pair: pair[1]["timestamp"]):
        members = [row for _, row in group]
        later = [row["timestamp"] for row in rows if row["timestamp"] > start][:1] or [start + 3000]
        for place, row in enumerate(members):
            at = (start + (later[0] - start) * place / len(members)) / 1000
            prompt = max(row["input_length"] // 8, 2)
            pages = chained([(name, part) for name in row["hash_ids"] for part in range(4)][: prompt // PAGE])
            asks.append(Ask(at, prompt, max(row["output_length"] // 8, 1), pages))
    return asks


def shared(families: int, rate: float, count: int = 3000) -> list[Ask]:
    """Prompts of 1,760 tokens of which 1,504 are a family's; families by a power law."""
    draw, at, asks = random.Random(5), 0.0, []
    for number in range(count):
        at += draw.expovariate(rate)
        family = int(draw.paretovariate(1.0)) % families
        pages = chained([(family, part) for part in range(94)] + [(family, number, part) for part in range(16)])
        asks.append(Ask(at, 1760, 30, pages))
    return asks


def choose(
    ask: Ask, workers: list[Worker], uses: Counter[int], weights: Weights, draw: random.Random
) -> tuple[int, int]:
    """Position of the worker and the tokens it is believed to have."""
    blocks = ask.pages[BLOCK // PAGE - 1 :: BLOCK // PAGE]
    found = [sum(1 for _ in itertools.takewhile(worker.sent.__contains__, blocks)) for worker in workers]
    copies = [0.0, *itertools.accumulate(BLOCK / uses[name] ** 2 for name in blocks[: max(found)])]
    least = min(worker.prompt_tokens for worker in workers)
    costs = []
    for worker, has in zip(workers, found, strict=True):
        copied = min((copies[-1] - copies[has]) * weights.copy, weights.copy_most)
        surplus = min((worker.prompt_tokens - least) * weights.surplus, weights.surplus_most)
        costs.append(ask.prompt - has * BLOCK + copied + surplus + worker.queued / 2 + worker.running * RUNNING)
    limit = min(costs) + max(min(costs) / 50, RUNNING / 4)
    chosen = draw.choice([place for place, cost in enumerate(costs) if cost <= limit])
    uses.update(blocks)
    workers[chosen].sent.update(blocks)
    return chosen, found[chosen] * BLOCK


def simulate(asks: list[Ask], count: int, weights: Weights, seed: int) -> tuple[float, float, float, float]:
    """Hit share, most loaded worker beside the mean, TTFT p50 and p99 in seconds."""
    draw, uses = random.Random(seed), Counter[int]()
    workers = [Worker(100_000 // PAGE, 1600 * 4 / count) for _ in range(count)]
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order, first = itertools.count(), []

    def at(when: float, what: Callable[[float], None]) -> None:
        heapq.heappush(events, (when, next(order), what))

    def start(now: float, worker: Worker) -> None:
        if worker.busy or not worker.waiting:
            return
        ask, uncached = worker.waiting.pop(0)
        worker.busy = True
        cached = PAGE * sum(1 for _ in itertools.takewhile(worker.cache.__contains__, ask.pages))
        at(now + (ask.prompt - cached) / worker.rate, lambda then: computed(then, worker, ask, cached, uncached))

    def computed(now: float, worker: Worker, ask: Ask, cached: int, uncached: int) -> None:
        worker.busy = False
        for name in reversed(ask.pages):  # leaves go first
            worker.cache[name] = None
            worker.cache.move_to_end(name)
        while len(worker.cache) > worker.pages:
            worker.cache.popitem(last=False)
        worker.cached_tokens += cached
        worker.queued -= uncached
        worker.decoding += 1
        first.append(now - ask.at)
        at(now + ask.output / 40 * (1 + 0.02 * worker.decoding), lambda _: ended(worker))
        start(now, worker)

    def ended(worker: Worker) -> None:
        worker.decoding -= 1
        worker.running -= 1

    def arrive(now: float, ask: Ask) -> None:
        place, cached = choose(ask, workers, uses, weights, draw)
        worker, uncached = workers[place], ask.prompt - cached
        worker.queued += uncached
        worker.running += 1
        worker.prompt_tokens += ask.prompt
        worker.waiting.append((ask, uncached))
        start(now, worker)

    for ask in asks:
        at(ask.at, lambda now, ask=ask: arrive(now, ask))
    while events:
        now, _, what = heapq.heappop(events)
        what(now)
    total = sum(worker.prompt_tokens for worker in workers)
    most = max(worker.prompt_tokens for worker in workers) * count / total
    first.sort()
    hit = sum(worker.cached_tokens for worker in workers) / total
    return hit, most, first[len(first) // 2], first[int(len(first) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--workers", default="4,8")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    print("| load | workers | copy, most | surplus, most | hit % | max / mean | TTFT p50 / p99 s |")
    print("|---|---|---|---|---|---|---|")
    for count in (int(part) for part in options.workers.split(",")):
        loads = {"trace": read_trace(options.trace), "hot": shared(1, count), "families": shared(40, count * 0.75)}
        for (name, asks), weights in itertools.product(loads.items(), SETS):
            runs = [simulate(asks, count, weights, seed) for seed in range(options.seeds)]
            hit, most, half, tail = (statistics.median(column) for column in zip(*runs, strict=True))
            print(
                f"| {name} | {count} | {weights.copy:g}, {weights.copy_most:g} | {weights.surplus:g}, "
                f"{weights.surplus_most:g} | {hit * 100:.1f} | {most:.2f} | {half:.2f} / {tail:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
