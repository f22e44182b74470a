"""What hooks cost a step of the loop: none registered beside the plain loop, and one that does nothing at each point.

Interleaved in one process, CPU milliseconds, as ratios to the plain loop; the model costs nothing, so these are the
worst ratios. Run from the repository's root: python benchmarks/engine_hooks.py [--rounds 30] [--steps 40]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from engine_scheduler import EOS, FreeExecutor, measure, submit  # noqa: E402, I001

from branchline.engine.cache import CacheContext, build_cache  # noqa: E402
from branchline.engine.hooks import POINTS, Chain, Mode, Placed  # noqa: E402
from branchline.engine.hooks.loop import HookedLoop  # noqa: E402
from branchline.engine.loop import EngineLoop, LoopOptions  # noqa: E402
from branchline.engine.scheduler import SchedulerOptions  # noqa: E402
from branchline.engine.service.assembly import _loop  # noqa: E402
from harness import vocabulary  # noqa: E402

RUNNING, PAGE = 64, 16


def nothing(*given: Any) -> None:
    """A hook that costs what a call costs."""


def loop_of(make: Any) -> tuple[EngineLoop, FreeExecutor]:
    """A loop in which RUNNING sequences decode."""
    pages = RUNNING * 2048 // PAGE
    executor = FreeExecutor(pages, PAGE)
    limits = SchedulerOptions(max_running_requests=RUNNING, max_step_tokens=512)
    cache = build_cache("native", CacheContext(pages, PAGE))
    loop: EngineLoop = make(executor, cache, vocabulary(), LoopOptions(limits, (EOS,)))
    for number in range(RUNNING):
        submit(loop, f"r{number}", 100, 1900)
    while loop.stats().waiting or loop.stats().running < RUNNING:
        loop.step()
    return loop, executor


def main() -> None:
    """Print the ratios as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    random.seed(1)
    step_points = ("scheduler.step", "sampling", "request.end")
    one_each = Chain([Placed("noop", "bench 1", POINTS[name], Mode.BEFORE, 0, nothing) for name in step_points])
    kinds = {
        "plain loop": EngineLoop,
        "no hook registered": _loop(Chain()),
        "one that does nothing at each point": partial(HookedLoop, one_each),
    }
    loops = {name: loop_of(make) for name, make in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    gc.collect()
    for _ in range(given.rounds):
        for name, (loop, executor) in loops.items():
            times[name].append(statistics.median(measure(loop, executor, given.steps)[1]))
    plain = statistics.median(times["plain loop"])
    rows = {name: {"cpu_ms": statistics.median(found), "ratio": statistics.median(found) / plain}
            for name, found in times.items()}  # fmt: skip
    for name, row in rows.items():
        print(f"{name:38} {row['cpu_ms']:8.4f} ms a step of {RUNNING}  {row['ratio']:6.3f} x")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
