"""Whole models: the same numbers as on a CPU in float32, and what steps of an 8B-shaped model cost."""

from __future__ import annotations

import dataclasses
import gc
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu.model import (
    PAGE,
    batch_of,
    device_ms,
    executor_kind,
    fitting,
    make_executor,
    settle,
    shapes,
    step,
)  # fmt: skip

# Memory bandwidth (GB/s) and dense bfloat16 arithmetic (TFLOP/s), as their makers state them.
PEAKS = {"H200": (4800, 989), "H100": (3350, 989), "B200": (8000, 2250), "A100": (2039, 312), "L40S": (864, 362)}
BOUNDS = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.05}


@dataclass(frozen=True, slots=True)
class Machine:
    """What rooflines are drawn from."""

    device: str
    dry: bool
    bandwidth_gb_s: float
    peak_tflop_s: float
    free_bytes: float

    @property
    def dtype(self) -> str:
        """Of the large models."""
        return "float32" if self.dry else "bfloat16"

    def kv_bytes(self, tokens: int) -> float:
        """Of this many tokens of the model that is timed, in bfloat16."""
        spec = shapes()[self.model]
        return 4.0 * spec.layers * spec.kv_heads * spec.head_dim * tokens

    @property
    def model(self) -> str:
        """The shape that is timed."""
        return "tiny" if self.dry else fitting(self.free_bytes)


def logits_check(report: Any, device: str, dtype: str, **options: Any) -> None:
    """Prefill, chunks, scattered pages and decode rows beside the CPU in float32, fed with the same tokens.

    Bounds: the largest difference of a logit; and no other best token where the CPU's leads by more than twice that.
    """
    spec = shapes()["tiny"]
    oracle = make_executor(spec, "cpu", "float32", 128, weights_on="cpu", plain=True)
    other = make_executor(spec, device, dtype, 128, weights_on="cpu", **options)
    chance = np.random.default_rng(1)
    order = chance.permutation(128).tolist()
    lines = [order[at : at + 16] for at in (0, 16, 32)]
    texts = [chance.integers(0, spec.vocab_size, 200).tolist() for _ in lines]
    own, theirs = [0, 0, 0], [0, 0, 0]
    largest, wrong = 0.0, 0
    for cut in [(70, 1, 30), (1, 64, 1), (1, 1, 1), (40, 1, 1), *[(1, 1, 1)] * 30]:
        new = [text[at : at + count] for text, at, count in zip(texts, own, cut, strict=True)]
        expected = step(oracle, lines, own, new)
        found = step(other, lines, theirs, new).float().cpu()
        largest = max(largest, float((expected - found).abs().max()))
        lead = expected.topk(2, dim=1).values
        clear = lead[:, 0] - lead[:, 1] > 2 * BOUNDS[dtype]
        wrong += int((clear & (expected.argmax(1) != found.argmax(1))).sum())
    oracle.close()
    other.close()
    told = f"{device} {dtype} {' '.join(f'{key}={value}' for key, value in options.items())}".rstrip()
    report.check(f"logits of {told} beside cpu float32", largest, BOUNDS[dtype])
    report.check(f"best tokens of {told} that are others", wrong, 0)


def generation(report: Any, machine: Machine) -> None:
    """Every dtype and mode that an executor has."""
    for dtype in ("float32",) if machine.dry else ("float32", "bfloat16", "float16"):
        logits_check(report, machine.device, dtype)
    if executor_kind() == "torch":
        report.absent("graphs, deterministic, fp8 KV", "this tree has no executor torch-cuda")
        return
    logits_check(report, machine.device, "float32", graph_rows=4, context_length=512)
    if not machine.dry:
        logits_check(report, machine.device, "bfloat16", deterministic=True, graph_rows=4, context_length=512)


class Bench:
    """One executor with sequences of zeros as context, so that decode can be timed without a prefill."""

    def __init__(self, machine: Machine, sizes: tuple[int, ...], context: int, **options: Any) -> None:
        self.machine, self.sizes, self.context = machine, sizes, context
        self.spec = dataclasses.replace(shapes()[machine.model], context_length=4096)
        self.pages_a_line = (context + 256) // PAGE
        self.executor = make_executor(
            self.spec, machine.device, machine.dtype, max(sizes) * self.pages_a_line,
            weights_on=machine.device, **options,
        )  # fmt: skip
        self.executor.decoder.pool.view(-1)[:].zero_()
        settle(machine.device)

    def close(self) -> None:
        """Give weights, pool and graphs back, so that the next one has room."""
        self.executor.close()
        del self.executor
        gc.collect()
        if self.machine.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()

    def lines(self, size: int) -> list[list[int]]:
        """Pages of `size` sequences."""
        return [list(range(line * self.pages_a_line, (line + 1) * self.pages_a_line)) for line in range(size)]

    def steps(self, report: Any, size: int, most: int) -> float:
        """Milliseconds of a greedy decode step, tokens read by the host after each one."""
        from branchline.engine.types import RowPlan, SamplingParams

        lines, lengths = self.lines(size), [self.context] * size
        plans = [RowPlan(row, SamplingParams(temperature=0.0)) for row in range(size)]
        new, spent = [[1] for _ in range(size)], []
        for _ in range(most + 3):
            began = time.perf_counter()
            answers = self.executor.sample(step(self.executor, lines, lengths, new), plans)
            spent.append(time.perf_counter() - began)
            new = [[answer.token_id] for answer in answers]
            if len(spent) > 6 and report.left_s() < 3:
                break
        return 1e3 * float(np.median(spent[3:]))

    def busy_ms(self, size: int) -> float:
        """Milliseconds that the device needs for one step's forward pass: many queued, none waited for."""
        batch = batch_of(self.lines(size), [self.context] * size, [[1]] * size)
        return device_ms(lambda: self.executor.run(batch), self.machine.device, times=10)

    def bytes_a_step(self, size: int, weight_bytes: float) -> float:
        """Bytes that a decode step must read: weights without the embedding, keys and values of the contexts."""
        pool = self.executor.decoder.pool
        spec = self.spec
        token = 2 * spec.layers * spec.kv_heads * spec.head_dim * pool.element_size()
        return (spec.parameters() - spec.vocab_size * spec.hidden) * weight_bytes + size * self.context * token


def decode(report: Any, machine: Machine) -> None:
    """Tokens a second and share of the bandwidth roofline by batch, with graphs and without; overhead of a step."""
    sizes = (1, 2) if machine.dry else (1, 8, 64, 256)
    context = 64 if machine.dry else 1024
    width = 4 if machine.dry else 2
    for size in sizes:
        if not machine.dry and machine.kv_bytes(size * (context + 256)) > machine.free_bytes / 2:
            report.absent(f"decode {machine.model} batch {size}", "keys and values would take over half of the memory")
            sizes = tuple(one for one in sizes if one < size)
    graphs = {"graph_rows": max(sizes), "context_length": context + 256} if executor_kind() == "torch-cuda" else {}
    forms = [("graphs", graphs), ("no graphs", {})] if graphs else [("no graphs", {})]
    busy: dict[int, float] = {}
    for name, options in forms:
        bench = Bench(machine, sizes, context, **options)
        for size in sizes:
            wall = bench.steps(report, size, 3 if machine.dry else 40)
            if name == forms[0][0]:
                busy[size] = bench.busy_ms(size)
            least = bench.bytes_a_step(size, width) / machine.bandwidth_gb_s / 1e6
            report.figure(
                f"decode {machine.model} batch {size}, {name}", 1e3 * size / wall, "tok/s", ms=round(wall, 3),
                roofline=round(least / wall, 3), overhead_ms=round(wall - busy[size], 3), context=context,
            )  # fmt: skip
            report.figure(f"forward pass on the device, batch {size}, {name}", bench.busy_ms(size), "ms")
        memory(report, machine, f"decode, {name}")
        bench.close()


def modes(report: Any, machine: Machine) -> None:
    """What determinism costs, and what float8 weights and keys and values give, at two batch sizes."""
    if executor_kind() == "torch":
        report.absent("deterministic and float8", "this tree has no executor torch-cuda")
        return
    sizes = (1, 2) if machine.dry else (1, 64)
    context = 64 if machine.dry else 1024
    graphs = {"graph_rows": max(sizes), "context_length": context + 256}
    forms: list[tuple[str, dict[str, Any]]] = [
        ("own attention", {"attention": "fixed" if machine.dry else "triton"}),
        ("deterministic", {"deterministic": True}),
        (
            "float8 weights and KV",
            {"quantization": "fp8", "kv_cache_dtype": "fp8", "attention": "fixed" if machine.dry else "triton"},
        ),
    ]
    for name, options in forms:
        bench = Bench(machine, sizes, context, **graphs, **options)
        for size in sizes:
            wall = bench.steps(report, size, 3 if machine.dry else 30)
            report.figure(f"decode {machine.model} batch {size}, {name}", 1e3 * size / wall, "tok/s", ms=round(wall, 3))
        if name == "deterministic":
            prompt(report, machine, bench, "deterministic ")
        bench.close()


def prompt(report: Any, machine: Machine, bench: Bench, name: str = "") -> None:
    """Prefill of four prompts in one step: tokens a second and share of peak arithmetic."""
    spec, count, length = bench.spec, *((2, 64) if machine.dry else (4, 2048))
    pages = length // PAGE
    lines = [list(range(line * pages, (line + 1) * pages)) for line in range(count)]
    batch = batch_of(lines, [0] * count, [[token % spec.vocab_size for token in range(length)]] * count)
    spent = device_ms(lambda: bench.executor.run(batch), machine.device, times=5, warm=2)
    matrices = spec.parameters() - 2 * spec.vocab_size * spec.hidden
    attention = 2 * spec.layers * spec.heads * spec.head_dim * length  # a token sees half of the prompt on average
    work = count * length * (2 * matrices + attention) / 1e9  # GFLOP
    report.figure(
        f"{name}prefill {machine.model} {count} prompts of {length}", 1e3 * count * length / spent, "tok/s",
        ms=round(spent, 2), tflop_s=round(work / spent, 1), peak=round(work / spent / machine.peak_tflop_s, 3),
    )  # fmt: skip


def prefill(report: Any, machine: Machine) -> None:
    """Prefill without graphs; chunks have no fixed shape."""
    bench = Bench(machine, (8,), 64 if machine.dry else 1024)
    prompt(report, machine, bench)
    memory(report, machine, "prefill")
    bench.close()


def memory(report: Any, machine: Machine, name: str) -> None:
    """Most memory that torch had at once since the last such row."""
    if not machine.device.startswith("cuda"):
        return
    import torch

    report.figure(f"memory, {name}", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
