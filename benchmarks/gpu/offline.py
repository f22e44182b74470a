"""Compiles the Triton kernels for a GPU that is not there: the same launches on CPU tensors, stopped before they run.

The interpreter accepts programs that the compiler refuses (types, block sizes, shared memory); this finds those without
a GPU. Used by `check.py --dry` in a process of its own and by engine/tests/kernels. Needs Triton with its NVIDIA
back end and no interpreter switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SHARED_BYTES = 227 * 1024  # of one block on sm_90


class AbsentGpu:
    """What Triton asks of a driver until a kernel would be loaded."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        """The GPU compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """Its number."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """The default stream."""
        return 0


@contextmanager
def compiled_only(capability: int = 90) -> Iterator[list[tuple[str, int]]]:
    """Inside, launches compile and do not run. Yields the list of (kernel, shared bytes) that grows with them."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, int]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append((self.__name__, int(made.metadata.shared)))
        return made

    driver.set_active(AbsentGpu(capability))
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = run


def launches(brief: bool) -> None:
    """Every kernel in the forms that an 8B-shaped model on a GPU uses; `brief`: in one form each, two of attention."""
    import numpy as np
    import torch
    from branchline.engine.kernels import attention, linear, rope, sampling
    from branchline.engine.kernels.compiled import attention as on_pages
    from branchline.engine.kernels.compiled import linear as products
    from branchline.engine.kernels.compiled import norm as norms
    from branchline.engine.kernels.compiled import pages
    from branchline.engine.kernels.compiled import rope as turns
    from branchline.engine.kernels.compiled import sampling as draws

    half = torch.bfloat16
    heads, kv_heads, width, rows = 32, 8, 128, 4
    queries = torch.zeros(rows, heads, width, dtype=half)
    table, lengths = torch.zeros(rows, 256, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    for kind in (half,) if brief else (half, torch.float8_e4m3fn):
        pool = torch.zeros(64, kv_heads, width, dtype=half).to(kind)
        held = attention.checked(queries, pool, pool, table, 16, None, None, 1.0, 1.0)
        for invariant in (False, True):
            on_pages.decode_attention(queries, held, lengths, 4096, 256, invariant, None, torch.empty_like(queries))
            tiles = torch.from_numpy(attention.prefill_tiles(np.ones(rows, np.int32), heads, kv_heads))
            split = 256 if invariant else 0
            on_pages.prefill_attention(queries, held, starts, lengths, tiles, split, torch.empty_like(queries))
        target = rope.Target(pool, pool, torch.zeros(rows, dtype=torch.int64), 1.0, 1.0)
        table_row = torch.zeros(16, width, dtype=half)
        projected = torch.zeros(rows, (heads + 2 * kv_heads) * width, dtype=half)
        positions = torch.zeros(rows, dtype=torch.int64)
        for heads_norm in (None,) if brief else (None, rope.HeadNorms(table_row[0], table_row[0], 1e-6)):
            turns.rope_write(projected, table_row, table_row, positions, target, heads_norm, torch.empty_like(queries))
    hidden, weight = torch.zeros(rows, 4096, dtype=half), torch.zeros(1024, 4096, dtype=half)
    for residual in (hidden,) if brief else (None, hidden):
        norms.rms_norm(hidden, residual, weight[0], 1e-5, torch.empty_like(hidden))
    out = torch.zeros(rows, 1024, dtype=half)
    eight, scales = linear.quantize_e4m3(weight)
    products.multiply(hidden, eight, scales, None, out, invariant=False, spread=True)
    if not brief:
        more_products(hidden, weight, eight, scales, out)
    logits, zeros = torch.zeros(rows, 128256), torch.zeros(rows, dtype=torch.int64)
    full = torch.zeros(rows, 4008, dtype=torch.int32)
    for mask in (full,) if brief else (None, full):
        floats = torch.ones(rows)
        rules = sampling.Rules(floats, lengths, floats, floats, zeros, zeros, mask)
        draws.sample(logits, rules, logits, strict=True)
    tier = torch.zeros(2, 3, 2, 16, kv_heads, width, dtype=half)
    for store in (True,) if brief else (False, True):
        pages.copy_pages(torch.zeros(3, 2, 64, kv_heads, width, dtype=half), tier, zeros, zeros, 16, store)


def more_products(hidden: Any, weight: Any, eight: Any, scales: Any, out: Any) -> None:
    """The other forms of a product."""
    import torch
    from branchline.engine.kernels.compiled.linear import multiply

    for spread in (False, True):
        multiply(hidden, weight, None, None, out, invariant=True, spread=spread)
    multiply(hidden, weight, None, out[0], out, invariant=True, spread=False)
    multiply(hidden, eight, scales, None, out, invariant=True)
    for count in (64, 256):
        wide = hidden[:1].expand(count, -1).contiguous()
        answer = torch.zeros(count, out.shape[1], dtype=out.dtype)
        multiply(wide, eight, scales, None, answer, invariant=False)


def compile_all(*, brief: bool = False) -> list[tuple[str, int]]:
    """(kernel, shared bytes) of every launch, compiled for sm_90. Raises what the compiler raises."""
    with compiled_only() as found:
        launches(brief)
    return found


if __name__ == "__main__":
    for name, shared in compile_all():
        print(f"{name} {shared}")
