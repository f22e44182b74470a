"""Attention in one fixed order a token: splits of SPLIT positions from the sequence's first one on, in float32.

What a token gets depends on its own context alone, bit by bit: not on the other rows, on how its prompt was cut, or on
whether a graph runs it. The plain form of what the kernels of `--deterministic` do, and their oracle. Slow: each token
and split is a product of its own, always of the same shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from branchline.engine.attention.base import AttentionShape, Upload
from branchline.engine.attention.tables import PageRows
from branchline.engine.types import ForwardBatch

SPLIT = 64  # positions, or a page if that has more


@dataclass(slots=True)
class FixedPlan:
    """Tokens by their sequence's line of `table`, and how many positions each sees."""

    table: torch.Tensor  # int64 [B, pages], whole splits
    lengths: torch.Tensor  # int32 [T]
    lines: list[int]  # [T]
    splits: list[int]  # [T] how many to look at


class FixedAttention:
    """See AttentionBackend and GraphAttention; registered as `fixed`."""

    api_version = 1

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._group = shape.heads // shape.kv_heads
        self._pages = max(1, SPLIT // shape.page_size)  # of a split
        self._span = self._pages * shape.page_size
        self._offsets = torch.arange(shape.page_size, device=device)
        self._places = torch.arange(self._span, device=device)
        self._rows = PageRows()

    def connect(self, upload: Upload, queries: torch.dtype, pool: torch.dtype) -> None:
        """Any dtypes; its tables go by themselves: it is there to be compared with."""

    def plan(self, batch: ForwardBatch) -> object:
        """See AttentionBackend."""
        lines = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
        lengths = batch.positions + 1
        splits = -(-lengths // self._span)
        return FixedPlan(
            self._table(batch),
            torch.from_numpy(lengths.astype(np.int32)).to(self._device),
            lines.tolist(),
            splits.tolist(),
        )

    def prepare(self, rows: int, pages: int) -> object:
        """See GraphAttention."""
        splits = -(-pages // self._pages)
        table = torch.zeros((rows, splits * self._pages), dtype=torch.int64, device=self._device)
        lengths = torch.ones(rows, dtype=torch.int32, device=self._device)
        return FixedPlan(table, lengths, list(range(rows)), [splits] * rows)

    def update(self, plan: object, batch: ForwardBatch) -> None:
        """See GraphAttention."""
        assert isinstance(plan, FixedPlan), "plan comes from this backend"
        table = self._table(batch)
        plan.table[:, : table.shape[1]].copy_(table)
        plan.lengths.copy_(torch.from_numpy(batch.context_lens))

    def _table(self, batch: ForwardBatch) -> torch.Tensor:
        rows = self._rows.padded(batch, self._shape.page_size)
        missing = -rows.shape[1] % self._pages
        return torch.from_numpy(np.pad(rows, ((0, 0), (0, missing)), mode="edge").astype(np.int64)).to(self._device)

    def attend(self, plan: object, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(plan, FixedPlan), "plan comes from this backend"
        rows = [
            self._token(query, keys, values, plan.table[line], length, splits)
            for query, line, length, splits in zip(
                queries.unbind(0), plan.lines, plan.lengths.unbind(0), plan.splits, strict=True
            )
        ]
        return torch.stack(rows).to(queries.dtype)

    def _token(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: torch.Tensor,
        length: torch.Tensor,
        splits: int,
    ) -> torch.Tensor:
        """float32 [heads * head_dim] of one token."""
        shape = self._shape
        scale = 1 / math.sqrt(shape.head_dim)
        # Copied, so that it lies as well aligned as any other token's: products may differ by that.
        asked = (query.float() * scale).view(shape.kv_heads, self._group, shape.head_dim).clone()
        best = torch.full((shape.kv_heads, self._group, 1), -math.inf, device=self._device)
        total = torch.zeros_like(best)
        result = torch.zeros_like(asked)
        for number in range(splits):
            chosen = pages[number * self._pages : (number + 1) * self._pages]
            slots = (chosen[:, None] * shape.page_size + self._offsets).flatten()
            places = self._places + number * self._span
            seen = places < length
            if shape.window is not None:
                seen = seen & (places >= length - shape.window)
            # What nobody owns may be NaN, which no weight of zero takes away.
            key = torch.where(seen[:, None, None], _wide(keys, slots), 0.0).transpose(0, 1)
            value = torch.where(seen[:, None, None], _wide(values, slots), 0.0).transpose(0, 1)
            scores = torch.where(seen, asked @ key.transpose(1, 2), -math.inf)
            higher = torch.maximum(best, scores.amax(-1, keepdim=True))
            floor = torch.where(higher == -math.inf, 0.0, higher)
            weights = (scores - floor).exp()
            kept = (best - floor).exp()
            total = total * kept + weights.sum(-1, keepdim=True)
            result = result * kept + weights @ value
            best = higher
        return (result / total).flatten()


def _wide(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Those slots in float32, whatever the pool holds."""
    if pool.element_size() > 1:
        return pool.index_select(0, slots).float()
    return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype).float()


def build(shape: AttentionShape, device: torch.device) -> FixedAttention:
    """Factory for the registry."""
    return FixedAttention(shape, device)
