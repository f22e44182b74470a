"""What an attention backend must do, and what it may rely on.

A backend reads pages and writes nothing but its output. It is built once an executor, plans once a step and
attends once a layer. Keys and values of the step's own tokens are in the pool before `attend` is called.
Slots that no sequence of the batch owns may hold anything, NaN included: they must not reach an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from branchline.engine.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constants of a model's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int | None  # last positions a token sees, itself included; None for all


class AttentionBackend(Protocol):
    """Causal grouped-query attention over paged keys and values."""

    api_version: int

    def plan(self, batch: ForwardBatch) -> object:
        """Index tensors and masks that all layers of one step share."""

    def attend(self, plan: object, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention of one layer.

        `queries` [T, heads, head_dim]; `keys`, `values` [slots, kv_heads, head_dim], one layer's whole pool;
        returns [T, heads * head_dim] in the dtype of `queries`.
        """


def context_slots(pages: list[int], start: int, end: int, page_size: int) -> list[int]:
    """Slots of positions start..end-1 of a sequence with these pages."""
    return [pages[position // page_size] * page_size + position % page_size for position in range(start, end)]
