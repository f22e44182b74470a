"""The scheduler's own milliseconds a step: schedule + commit + emit, with real text automata and page cache.

The model costs nothing here: an executor that answers a fixed token. Run from the repository's root:
    python benchmarks/engine_scheduler.py [--steps 400] [--running 8 64 256] [--page-size 16]
    python benchmarks/engine_scheduler.py --before TREE [--rounds 5] [--out FILE] …
Prints one line per number of running sequences: CPU and wall time of a decode step apart from `run` and
`sample`; then the same while prompts come and go (an admission and an end on most steps). On a busy machine
the CPU column is the one to read. With `--before`, another built tree is measured in turn with this one, by this
script and each in its own process, and the ratio of medians is given.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

TREE = "--tree"  # whose code is measured; said before it is imported
ROOT = Path(sys.argv[sys.argv.index(TREE) + 1] if TREE in sys.argv else Path(__file__).parent.parent).resolve()
sys.path[:0] = [str(ROOT / "engine/src"), str(ROOT / "engine/tests/support")]

from branchline.engine.cache import CacheContext, build_cache  # noqa: E402
from branchline.engine.loop import EngineLoop, LoopOptions  # noqa: E402
from branchline.engine.scheduler import SchedulerOptions  # noqa: E402
from branchline.engine.types import (  # noqa: E402
    Delta,
    ForwardBatch,
    Request,
    RowPlan,
    RowResult,
    SamplingParams,
)
from harness import EOS, vocabulary  # noqa: E402


class FreeExecutor:
    """Answers a character that depends on the position, at no cost, and keeps the time it takes itself."""

    api_version = 1
    numerics_id = "free"

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.vocab_size = EOS + 1
        self.num_pages = num_pages
        self.page_size = page_size
        self.busy_s = self.busy_cpu_s = 0.0

    def run(self, batch: ForwardBatch) -> object:
        """Nothing."""
        return None

    def sample(self, logits: object, plans: list[RowPlan]) -> list[RowResult]:
        """One result per plan; its time is not the scheduler's."""
        started, used = time.perf_counter(), time.thread_time()
        results = [RowResult(33 + plan.position % 26, -1.0) for plan in plans]
        self.busy_cpu_s += time.thread_time() - used
        self.busy_s += time.perf_counter() - started
        return results

    def penalty_state(self, prompt: tuple[int, ...], params: SamplingParams) -> object | None:
        """None."""
        return None

    def observe(self, state: object, token_id: int) -> None:
        """Never called."""

    def close(self) -> None:
        """Nothing to release."""


def build(running: int, page_size: int) -> tuple[EngineLoop, FreeExecutor]:
    """A loop with room for `running` sequences of 2,048 tokens."""
    pages = running * 2048 // page_size
    executor = FreeExecutor(pages, page_size)
    limits = SchedulerOptions(
        max_running_requests=running, max_step_tokens=max(512, running), max_queued_requests=100_000
    )
    cache = build_cache("native", CacheContext(pages, page_size))
    return EngineLoop(executor, cache, vocabulary(), LoopOptions(limits, (EOS,))), executor


def submit(loop: EngineLoop, name: str, length: int, max_tokens: int) -> None:
    """A random prompt with two stop strings."""
    prompt = tuple(random.randrange(EOS) for _ in range(length))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=("~~~", "###"), ignore_eos=True)
    loop.submit(Request(name, prompt, params), discard)


def discard(step: int, deltas: list[Delta]) -> None:
    """The sink: a stream that is always ready."""


Times = tuple[list[float], list[float]]
"""Wall and CPU milliseconds of each step."""


def measure(loop: EngineLoop, executor: FreeExecutor, steps: int) -> Times:
    """Each step's times, the executor's share taken off."""
    wall, cpu = [], []
    for _ in range(steps):
        executor.busy_s = executor.busy_cpu_s = 0.0
        started, used = time.perf_counter(), time.thread_time()
        loop.step()
        cpu.append((time.thread_time() - used - executor.busy_cpu_s) * 1e3)
        wall.append((time.perf_counter() - started - executor.busy_s) * 1e3)
    return wall, cpu


def decode(running: int, steps: int, page_size: int) -> Times:
    """Steady decoding: nobody comes, nobody ends."""
    loop, executor = build(running, page_size)
    for number in range(running):
        submit(loop, f"r{number}", 100, 1900)
    while loop.stats().waiting or loop.stats().running < running:
        loop.step()
    loop.step()
    return measure(loop, executor, steps)


def churn(running: int, steps: int, page_size: int) -> Times:
    """A full batch with a queue behind it: sequences of 64 tokens end and are replaced all the time."""
    loop, executor = build(running, page_size)
    for number in range(running * (2 + steps // 40)):
        submit(loop, f"r{number}", 100, random.randrange(32, 96))
    for _ in range(64 + running // 4):
        loop.step()
    return measure(loop, executor, steps)


def compare(before: str, rounds: int, given: list[str], out: Path | None) -> None:
    """Both trees in turn, each row as the median of its rounds; prints ratios and writes every round."""
    trees = {"before": before, "after": str(ROOT)}
    found: dict[str, list[list[dict[str, object]]]] = {name: [] for name in trees}
    for _ in range(rounds):
        for name, tree in trees.items():
            command = [sys.executable, __file__, TREE, tree, *given]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[name].append(json.loads(said.splitlines()[-1]))
    for at, row in enumerate(found["after"][0]):
        columns = [key for key in row if key.endswith("_ms")]
        medians = {
            name: {key: statistics.median(one[at][key] for one in many) for key in columns}  # type: ignore[type-var]
            for name, many in found.items()
        }
        print(f"{row['load']} {row['running']}, before / after / ratio of medians:")
        for key in columns:
            old, new = float(medians["before"][key]), float(medians["after"][key])  # type: ignore[arg-type]
            print(f"  {key:14} {old:8.3f} {new:8.3f} {new / old:8.3f}")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--running", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--before", help="another tree, built, to be measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument(TREE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.before:
        given = ["--steps", str(arguments.steps), "--page-size", str(arguments.page_size), "--running"]
        compare(arguments.before, arguments.rounds, [*given, *map(str, arguments.running)], arguments.out)
        return
    random.seed(1)
    rows = []
    print(f"{'load':8} {'running':>8} {'cpu mean':>9} {'wall mean':>9} {'p50':>9} {'p99':>9}  ms a step")
    for load, driver in (("decode", decode), ("churn", churn)):
        for running in arguments.running:
            gc.collect()
            wall, cpu = driver(running, arguments.steps, arguments.page_size)
            wall.sort()
            row = {
                "cpu_mean_ms": statistics.fmean(cpu),
                "wall_mean_ms": statistics.fmean(wall),
                "wall_p50_ms": wall[len(wall) // 2],
                "wall_p99_ms": wall[int(len(wall) * 0.99)],
            }
            rows.append({"load": load, "running": running, **row})
            print(f"{load:8} {running:8} " + " ".join(f"{value:9.3f}" for value in row.values()))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
