"""The decoder's operations on tensors: kernels of our own on a GPU, plain torch elsewhere.

Nothing here waits for the device, so all of it may stand in a graph. With `invariant` a row's result depends on that
row and the weights alone, bit by bit.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol, TypeAlias

import torch
from torch.nn.functional import linear, silu

from branchline.engine.executor.weights import Weight, project
from branchline.engine.kernels.linear import linear_e4m3, linear_invariant
from branchline.engine.kernels.norm import add_rms_norm, rms_norm
from branchline.engine.kernels.rope import rope_write
from branchline.engine.quantization.online import Held

Table: TypeAlias = tuple[torch.Tensor, torch.Tensor]
E4M3_LARGEST = 448.0


class Ops(Protocol):
    """What a decoder is made of. Tensors are contiguous, on one device, in the model's dtype unless said otherwise."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm of [rows, width] over the last dimension; statistics in float32."""

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add x to `residual` in place, both [rows, width]; the norm of the sum."""

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, in] through a weight [out, in] of either form."""

    def rope_write(
        self,
        projected: torch.Tensor,
        table: Table,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pool: Table,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> torch.Tensor:
        """Turned queries [T, heads, head_dim] of a fused projection [T, (heads + 2 kv_heads) head_dim]; keys and values
        go to `slots` of the layer's `pool` (keys, values). `table` is RotaryTable.whole(); `norms` [head_dim] of query
        and key come before the turn."""


def gate(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half of [rows, 2 width] times the second half."""
    first, second = x.chunk(2, dim=-1)
    return silu(first).mul_(second)


class KernelOps:
    """Ops by `branchline.engine.kernels`, for a device where Triton runs."""

    def __init__(self, eps: float, *, invariant: bool) -> None:
        self._eps = eps
        self._invariant = invariant

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return rms_norm(x, weight, self._eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        return add_rms_norm(x, residual, weight, self._eps)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See Ops. Quantised weights other than e4m3 have their own products, which are not invariant."""
        if isinstance(weight, torch.Tensor):
            return linear_invariant(x, weight, bias) if self._invariant else linear(x, weight, bias)
        if isinstance(weight, Held) and weight.codes.dtype == torch.float8_e4m3fn:
            return linear_e4m3(x, weight.codes, weight.scales, bias, invariant=self._invariant)
        return weight.linear(x, bias)

    def rope_write(
        self,
        projected: torch.Tensor,
        table: Table,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pool: Table,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> torch.Tensor:
        """See Ops."""
        kv_heads, width = pool[0].shape[1:]
        return rope_write(
            projected, *table, positions, slots, *pool,
            heads=projected.shape[1] // width - 2 * kv_heads, kv_heads=kv_heads,
            query_norm=norms[0], key_norm=norms[1], eps=self._eps,
        )  # fmt: skip


class PlainOps:
    """Ops by torch alone, on any device."""

    def __init__(self, eps: float, *, invariant: bool) -> None:
        self._eps = eps
        self._invariant = invariant

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self._eps))
        return (wide * scale).to(x.dtype) * weight

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See Ops."""
        residual.add_(x)
        return self.norm(residual, weight)

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See Ops. Invariant products are made row by row: slow, and for comparing with."""
        if self._invariant and x.shape[0] > 1:
            # Cloned, so that each row lies as well aligned as any other: products may differ by that.
            return torch.cat([project(row[None].clone(), weight, bias) for row in x.unbind(0)])
        return project(x, weight, bias)

    def rope_write(
        self,
        projected: torch.Tensor,
        table: Table,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pool: Table,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
    ) -> torch.Tensor:
        """See Ops."""
        kv_heads, width = pool[0].shape[1:]
        parts = projected.view(projected.shape[0], -1, width)
        query, key, value = parts[:, : -2 * kv_heads], parts[:, -2 * kv_heads : -kv_heads], parts[:, -kv_heads:]
        if norms[0] is not None and norms[1] is not None:
            query, key = self.norm(query, norms[0]), self.norm(key, norms[1])
        cos, sin = (rows.index_select(0, positions).unsqueeze(1) for rows in table)
        _store(pool[0], slots, _turn(key, cos, sin))
        _store(pool[1], slots, value)
        return _turn(query, cos, sin)


def _turn(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return torch.addcmul(heads * cos, swapped, sin)


def _store(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    if pool.element_size() > 1:
        pool.index_copy_(0, slots, rows)
        return
    narrow = rows.float().clamp(-E4M3_LARGEST, E4M3_LARGEST).to(pool.dtype)
    pool.view(torch.uint8).index_copy_(0, slots, narrow.view(torch.uint8))


def ops_for(device: torch.device, eps: float, *, invariant: bool) -> Ops:
    """Our kernels where Triton runs, plain torch elsewhere."""
    fast = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return KernelOps(eps, invariant=invariant) if fast else PlainOps(eps, invariant=invariant)
