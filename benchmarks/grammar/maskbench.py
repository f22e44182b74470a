"""Real schemas with valid and invalid instances (JSON Schema Bench): passes, wrong verdicts, time to the first mask.

`python -m benchmarks.grammar.maskbench FILE [EVERY]` takes each EVERY-th schema and prints JSON. Times are CPU time
of compiling and of the first mask over single bytes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from branchline.engine.errors import EngineError
from branchline.engine.grammar.schema import SchemaOptions

from benchmarks.grammar.feed import Checker

WALL_S = 4.0


def run(path: Path, every: int) -> dict[str, Any]:
    """Counts by schema, the wrong ones by name, and percentiles."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    times: list[float] = []
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row["tests"]][::every]
    signal.signal(signal.SIGALRM, _late)
    for row in rows:
        signal.setitimer(signal.ITIMER_REAL, WALL_S)
        try:
            verdict = _one(row, times)
        except TimeoutError:
            verdict = "timeout"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        counts[verdict] += 1
        if verdict not in ("passed", "declined"):
            wrong.append(f"{verdict}: {row['id']}")
    times.sort()
    shares = {name: round(times[int(len(times) * share)] * 1e3, 2) for name, share in (("p50", 0.5), ("p99", 0.99))}
    return {
        "schemas": len(rows),
        **counts,
        "first_mask_cpu_ms": {**shares, "max": round(times[-1] * 1e3, 2)},
        "wrong": wrong,
    }


def _one(row: dict[str, Any], times: list[float]) -> str:
    started = time.process_time()
    try:
        checker = Checker(row["schema"], SchemaOptions())
        checker.matcher.compute_bitmask()
    except EngineError:
        return "declined"
    finally:
        times.append(time.process_time() - started)
    verdict = "passed"
    for test in row["tests"]:
        accepted = checker.accepts(test["data"])
        if accepted and not test["valid"]:
            return "wrongly accepted"
        if test["valid"] and not accepted:
            verdict = "wrongly refused"
    return verdict


def _late(number: int, frame: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1), indent=1))
