"""The slow and obvious attention: one token, one head at a time, in float32. The oracle of every other backend."""

from __future__ import annotations

import math

import torch

from branchline.engine.attention.base import AttentionShape, context_slots
from branchline.engine.types import ForwardBatch


class ReferenceAttention:
    """Computes softmax(q·K / sqrt(d))·V position by position."""

    api_version = 1

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device

    def plan(self, batch: ForwardBatch) -> object:
        """The slots that each new token may see."""
        visible: list[torch.Tensor] = []
        for query, context, pages in zip(batch.query_lens, batch.context_lens, batch.page_tables, strict=True):
            for position in range(int(context) - int(query), int(context)):
                start = 0 if self._shape.window is None else max(0, position + 1 - self._shape.window)
                slots = context_slots(pages, start, position + 1, self._shape.page_size)
                visible.append(torch.tensor(slots, device=self._device))
        return visible

    def attend(self, plan: object, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(plan, list), "plan comes from this backend"
        group = self._shape.heads // self._shape.kv_heads
        result = torch.empty_like(queries)
        for token, slots in enumerate(plan):
            for head in range(self._shape.heads):
                key = keys[slots, head // group].float()
                value = values[slots, head // group].float()
                scores = key @ queries[token, head].float() / math.sqrt(self._shape.head_dim)
                result[token, head] = (scores.softmax(dim=0) @ value).to(queries.dtype)
        return result.reshape(result.shape[0], -1)


def build(shape: AttentionShape, device: torch.device) -> ReferenceAttention:
    """Factory for the registry."""
    return ReferenceAttention(shape, device)
