"""What an attention backend must do, and what it may rely on.

A backend reads pages and writes nothing but its output. It is built once an executor, plans once a step and
attends once a layer. Keys and values of the step's own tokens are in the pool before `attend` is called.
Slots that no sequence of the batch owns may hold anything, NaN included: they must not reach an output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt
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


class Upload(Protocol):
    """Brings host arrays to the device without waiting for it."""

    def __call__(
        self, arrays: Mapping[str, npt.NDArray[Any]], into: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """int32, int64 and float32 arrays as device tensors of the same shapes, in new memory or in `into`."""


@runtime_checkable
class GraphAttention(Protocol):
    """What a backend offers besides AttentionBackend if its decode steps can be captured in a graph.

    A prepared plan lives on memory of its own: a graph is captured over it once, and `update` fills it before each
    replay. Only `attend` is called inside a capture, where it must not wait for the device nor look at values. Between
    two calls of `plan` or `update` the caller waits until what the first one queued has been copied.
    """

    def connect(self, upload: Upload, queries: torch.dtype, pool: torch.dtype) -> None:
        """Use `upload` for whatever plans bring to the device; what queries and the pool hold. Called once, before any
        plan. Raises LoadError for dtypes that it does not compute with."""

    def prepare(self, rows: int, pages: int) -> object:
        """A plan for `rows` sequences of one new token and at most `pages` pages each."""

    def update(self, plan: object, batch: ForwardBatch) -> None:
        """Fill a prepared plan with a step of exactly as many sequences."""


def context_slots(pages: list[int], start: int, end: int, page_size: int) -> list[int]:
    """Slots of positions start..end-1 of a sequence with these pages."""
    return [pages[position // page_size] * page_size + position % page_size for position in range(start, end)]
