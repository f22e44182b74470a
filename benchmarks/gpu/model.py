"""Models of random weights, executors over them, and steps for these executors."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 16


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
        self._seeds = {name: number for number, name in enumerate(sorted(self._shapes))}

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
        chance = torch.Generator(self._device).manual_seed(self._seeds[name])
        return torch.randn(shape, generator=chance, device=self._device).mul_(shape[-1] ** -0.5)


def shapes() -> dict[str, Any]:
    """Models by name, from the smallest."""
    from branchline.engine.model.spec import ModelSpec

    tiny = ModelSpec("LlamaForCausalLM", 256, 4, 8, 2, 32, 512, 1024, 4096, 1e-5, 10000.0)
    one = dataclasses.replace(
        tiny, hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab_size=128256
    )
    eight = dataclasses.replace(one, hidden=4096, layers=32, head_dim=128, intermediate=14336)
    return {"tiny": tiny, "1B-like": one, "8B-like": eight}


def fitting(free_bytes: float) -> str:
    """The largest shape whose bfloat16 weights take at most half of the free memory."""
    found = [name for name, spec in shapes().items() if 2 * spec.parameters() < free_bytes // 2]
    return found[-1] if found else "tiny"


def executor_kind() -> str:
    """Which executor the figures are of: torch-cuda where this tree has it, else torch."""
    try:
        import branchline.engine.executor.cuda.build  # noqa: F401
    except ImportError:
        return "torch"
    return "torch-cuda"


def make_executor(
    spec: Any,
    device: str,
    dtype: str,
    pages: int,
    *,
    weights_on: str,
    attention: str = "auto",
    quantization: str = "",
    plain: bool = False,
    **options: Any,
) -> Any:
    """An executor over random weights. `weights_on` is where they are drawn: the same place gives the same model.

    `plain` asks for the executor torch, the oracle; `options` are CudaOptions' fields.
    """
    import branchline.engine.attention
    import branchline.engine.executor
    from branchline.engine.model.source import LoadedModel
    from branchline.registry import quantization_methods

    method: Any = None
    if quantization:
        import branchline.engine.quantization  # noqa: F401  registers

        method = quantization_methods.get(quantization)()
    model = LoadedModel("random", Path("random"), spec, RandomTensors(spec, weights_on), "random", "F32")
    given = {"device": device, "dtype": dtype, "num_pages": pages, "page_size": PAGE, "threads": None}
    if plain or executor_kind() == "torch":
        from branchline.engine.executor.pytorch import build_executor

        name = "torch_paged" if attention == "auto" else attention
        return build_executor(model, **given, attention_backend=name, quantization=method)
    from branchline.engine.executor.cuda import build

    return build.build_executor(
        model, **given, attention_backend=attention, quantization=method, options=build.CudaOptions(**options)
    )


def batch_of(lines: list[list[int]], lengths: list[int], new: list[list[int]]) -> Any:
    """The step that appends `new` to sequences of these pages and lengths; logits of each one's last token."""
    from branchline.engine.types import ForwardBatch

    tokens = [token for one in new for token in one]
    positions = [length + at for length, one in zip(lengths, new, strict=True) for at in range(len(one))]
    owners = [pages for pages, one in zip(lines, new, strict=True) for _ in one]
    slots = [pages[at // PAGE] * PAGE + at % PAGE for pages, at in zip(owners, positions, strict=True)]
    counts = np.array([len(one) for one in new], np.int32)
    return ForwardBatch(
        np.array(tokens, np.int32),
        np.array(positions, np.int32),
        np.array(slots, np.int64),
        counts,
        np.array(lengths, np.int32) + counts,
        lines,
        np.cumsum(counts).astype(np.int64) - 1,
    )


def step(executor: Any, lines: list[list[int]], lengths: list[int], new: list[list[int]]) -> Any:
    """Run that step, count its tokens into `lengths`, and return its logits."""
    logits = executor.run(batch_of(lines, lengths, new))
    for line, one in enumerate(new):
        lengths[line] += len(one)
    return logits


def settle(device: str) -> None:
    """Until the device has done what it was given."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def device_ms(call: Callable[[], object], device: str, *, times: int = 20, warm: int = 3) -> float:
    """Milliseconds of one call, from marks in the device's queue around `times` of them."""
    if not device.startswith("cuda"):
        call()
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    import torch

    for _ in range(warm):
        call()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(times):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / times
