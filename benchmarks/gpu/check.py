"""The GPU check: oracle comparisons and a decode loop with random weights; see check.sh.

Compares the executor on `cuda` with the CPU in float32 under reference attention, then times decode at several batch
sizes with random weights of an 8B-like shape, or a smaller one if memory is short. Prints a table, writes JSON,
names everything that is absent. Exit 0 if all that could run passed, 1 if a comparison failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BUDGET_S = 300.0
PAGE = 16


@dataclass
class Report:
    """What was found, measured and missing."""

    started: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    decode: list[dict[str, Any]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def left_s(self) -> float:
        """Seconds of the budget that remain."""
        return BUDGET_S - (time.monotonic() - self.started)

    def document(self) -> dict[str, Any]:
        """The JSON form."""
        return {"facts": self.facts, "checks": self.checks, "decode": self.decode, "absent": self.absent}


def versions(report: Report) -> None:
    """Versions of the packages that matter on a GPU."""
    for name in ("torch", "triton", "flashinfer-python", "numpy", "gguf"):
        try:
            report.facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            report.absent.append(f"package {name}")


class RandomTensors:
    """A TensorSource of random weights, made when asked for; the same name gives the same numbers."""

    def __init__(self, spec: Any, device: str) -> None:
        self._device = device
        wide, query, key, inner = spec.hidden, spec.query_size, spec.kv_size, spec.intermediate
        layer = {
            "input_layernorm": (wide,),
            "post_attention_layernorm": (wide,),
            "self_attn.q_proj": (query, wide),
            "self_attn.k_proj": (key, wide),
            "self_attn.v_proj": (key, wide),
            "self_attn.o_proj": (wide, query),
            "mlp.gate_proj": (inner, wide),
            "mlp.up_proj": (inner, wide),
            "mlp.down_proj": (wide, inner),
        }
        self._shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (spec.vocab_size, wide),
            "model.norm.weight": (wide,),
            "lm_head.weight": (spec.vocab_size, wide),
        }
        for number in range(spec.layers):
            self._shapes.update({f"model.layers.{number}.{part}.weight": shape for part, shape in layer.items()})

    def names(self) -> set[str]:
        """All names."""
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str) -> Any:
        """Random values: norms are one, matrices are scaled by their width."""
        import torch

        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        chance = torch.Generator(self._device).manual_seed(sorted(self._shapes).index(name))
        return torch.randn(shape, generator=chance, device=self._device).mul_(shape[-1] ** -0.5)


def make_executor(
    spec: Any, device: str, dtype: str, pages: int, weights_on: str, attention: str = "torch_paged"
) -> Any:
    """An executor with random weights. `weights_on` is where they are drawn: the same place gives the same model."""
    import branchline.engine.attention
    import branchline.engine.executor  # noqa: F401  registers
    from branchline.engine.executor.pytorch import build_executor
    from branchline.engine.model.source import LoadedModel

    model = LoadedModel("random", Path("random"), spec, RandomTensors(spec, weights_on), "random", "F32")
    return build_executor(
        model,
        device=device,
        dtype=dtype,
        num_pages=pages,
        page_size=PAGE,
        threads=None,
        attention_backend=attention,
    )


def shapes() -> dict[str, Any]:
    """Models by name."""
    from branchline.engine.model.spec import ModelSpec

    tiny = ModelSpec("LlamaForCausalLM", 256, 4, 8, 2, 32, 512, 1024, 4096, 1e-5, 10000.0)
    one = dataclasses.replace(
        tiny, hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab_size=128256
    )
    eight = dataclasses.replace(one, hidden=4096, layers=32, head_dim=128, intermediate=14336)
    return {"tiny": tiny, "1B-like": one, "8B-like": eight}


def step(executor: Any, lines: list[list[int]], lengths: list[int], new: list[list[int]]) -> Any:
    """Run one step that appends `new` to each line; returns the logits of each line's last token."""
    from branchline.engine.types import ForwardBatch

    tokens = [token for one in new for token in one]
    positions = [length + at for length, one in zip(lengths, new, strict=True) for at in range(len(one))]
    owners = [pages for pages, one in zip(lines, new, strict=True) for _ in one]
    slots = [pages[at // PAGE] * PAGE + at % PAGE for pages, at in zip(owners, positions, strict=True)]
    counts = np.array([len(one) for one in new], np.int32)
    contexts = np.array(lengths, np.int32) + counts
    for line, count in enumerate(counts):
        lengths[line] += int(count)
    return executor.run(
        ForwardBatch(
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.array(slots, np.int64),
            counts,
            contexts,
            lines,
            np.cumsum(counts).astype(np.int64) - 1,
        )
    )


def compare(report: Report, device: str, dtype: str, tolerance: float) -> None:
    """Prefill, chunked prefill, scattered pages, mixed and decode rows against the CPU in float32."""
    spec = shapes()["tiny"]
    oracle = make_executor(spec, "cpu", "float32", 128, "cpu", "reference")
    other = make_executor(spec, device, dtype, 128, "cpu")
    chance = np.random.default_rng(1)
    order = chance.permutation(128).tolist()
    lines = [sorted(order[:16]), order[16:32], list(range(order[32], order[32] + 1)) + order[33:48]]
    texts = [chance.integers(0, spec.vocab_size, 150).tolist() for _ in lines]
    worst, own, theirs = 0.0, [0, 0, 0], [0, 0, 0]
    cuts = [(70, 1, 30), (1, 64, 1), (1, 1, 1), (40, 1, 1), (1, 1, 1)]
    for cut in cuts:
        new = [text[at : at + count] for text, at, count in zip(texts, own, cut, strict=True)]
        expected, found = step(oracle, lines, own, new), step(other, lines, theirs, new)
        worst = max(worst, float((expected - found.float().cpu()).abs().max()))
    passed = worst <= tolerance
    report.checks.append(
        {"check": f"{device} {dtype} against cpu float32", "worst": worst, "tolerance": tolerance, "passed": passed}
    )
    oracle.close()
    other.close()


def sampler_check(report: Report, device: str) -> None:
    """The same rows give the same draws on the device and on the CPU."""
    import torch
    from branchline.engine.sampling.sampler import sample
    from branchline.engine.types import RowPlan, SamplingParams

    logits = torch.randn((16, 5000), generator=torch.Generator().manual_seed(3)) * 3
    kinds = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.9)]
    plans = [RowPlan(row, kinds[row % 4], seed=row, position=row, want_logprob=True, top_k=3) for row in range(16)]
    here, there = sample(logits, plans), sample(logits.to(device), plans)
    equal = sum(a.token_id == b.token_id for a, b in zip(here, there, strict=True))
    report.checks.append(
        {"check": f"sampler on {device} against cpu", "worst": 16 - equal, "tolerance": 0, "passed": equal == 16}
    )


def decode_loop(report: Report, name: str, device: str, dtype: str, sizes: tuple[int, ...], context: int) -> None:
    """Tokens a second at several batch sizes, greedy, after a prefill of `context` tokens a line."""
    import torch
    from branchline.engine.types import RowPlan, SamplingParams

    spec = shapes()[name]
    pages_a_line = (context + 128) // PAGE + 1
    executor = make_executor(spec, device, dtype, max(sizes) * pages_a_line, device)
    greedy = SamplingParams(temperature=0.0)
    for size in sizes:
        if report.left_s() < 30:
            report.absent.append(f"decode of {name} at batch {size}: no time left")
            continue
        lines = [list(range(line * pages_a_line, (line + 1) * pages_a_line)) for line in range(size)]
        lengths = [0] * size
        began = time.monotonic()
        for line in range(size):  # one prefill a step: bounds the logits and masks of the check itself
            own = [lengths[line]]
            step(executor, [lines[line]], own, [[(7 * line + at) % spec.vocab_size for at in range(context)]])
            lengths[line] = own[0]
        wait(device, torch)
        prefill_s = time.monotonic() - began
        plans = [RowPlan(row, greedy) for row in range(size)]
        new = [[1] for _ in range(size)]
        steps, began = 0, time.monotonic()
        while steps < 100 and (steps < 10 or time.monotonic() - began < 15):
            new = [[answer.token_id] for answer in executor.sample(step(executor, lines, lengths, new), plans)]
            steps += 1
        wait(device, torch)
        spent = time.monotonic() - began
        report.decode.append(
            {
                "model": name,
                "device": device,
                "dtype": dtype,
                "batch": size,
                "context": context,
                "prefill_tok_s": round(size * context / prefill_s, 1),
                "decode_tok_s": round(size * steps / spent, 1),
                "ms_per_step": round(1e3 * spent / steps, 2),
            }
        )
    executor.close()


def wait(device: str, torch: Any) -> None:
    """Until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def choose(free_bytes: int) -> str:
    """The largest shape whose bfloat16 weights take at most half of the free memory."""
    fitting = [name for name, spec in shapes().items() if 2 * spec.parameters() < free_bytes // 2]
    return fitting[-1] if fitting else "tiny"


def run(report: Report, dry: bool) -> None:
    """All that can run here."""
    versions(report)
    if "torch" not in report.facts:
        return
    import torch

    if torch.cuda.is_available() and not dry:
        free, total = torch.cuda.mem_get_info()
        report.facts["gpu"] = torch.cuda.get_device_name()
        report.facts["gpu_memory_gib"] = round(total / 2**30, 1)
        torch.backends.cuda.matmul.allow_tf32 = False
        compare(report, "cuda", "float32", 2e-3)
        compare(report, "cuda", "bfloat16", 0.25)
        sampler_check(report, "cuda")
        decode_loop(report, choose(free), "cuda", "bfloat16", (1, 8, 64), 512)
        return
    if not torch.cuda.is_available():
        report.absent.append("GPU: torch finds none")
    if dry:
        compare(report, "cpu", "float32", 1e-4)
        compare(report, "cpu", "bfloat16", 0.25)
        sampler_check(report, "cpu")
        decode_loop(report, "tiny", "cpu", "float32", (1, 8), 64)


def show(report: Report) -> None:
    """The table."""
    for name, value in report.facts.items():
        print(f"{name:24} {value}")
    for check in report.checks:
        mark = "pass" if check["passed"] else "FAIL"
        print(f"{mark}  {check['check']}: worst {check['worst']:.2e}, allowed {check['tolerance']:.0e}")
    for row in report.decode:
        print(
            f"{row['model']:8} {row['device']} {row['dtype']:9} batch {row['batch']:3}:"
            f" decode {row['decode_tok_s']:9} tok/s,"
            f" {row['ms_per_step']:8} ms a step, prefill {row['prefill_tok_s']:9} tok/s at {row['context']} tokens"
        )
    for thing in report.absent:
        print(f"absent: {thing}")


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes on the CPU, whatever GPU there is")
    parser.add_argument("--out", type=Path, help="write the report as JSON to this file")
    arguments = parser.parse_args()
    report = Report()
    run(report, arguments.dry)
    show(report)
    if arguments.out:
        arguments.out.write_text(json.dumps(report.document(), indent=1) + "\n")
    return 0 if all(check["passed"] for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
