"""Paged attention by our own kernels: Triton on a GPU, plain torch elsewhere (`branchline.engine.kernels`).

Sequences of one new token at the head of a step go to the decode kernel, which cuts contexts into splits, all others to
the prefill kernel. `triton_invariant` fixes the size of splits and the order of sums, so that a token's bits depend on
its own context alone, whichever kernel computes it: what `--deterministic` uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from branchline.engine.attention.base import AttentionShape, Upload
from branchline.engine.attention.tables import PageRows
from branchline.engine.kernels import attention as kernels
from branchline.engine.types import ForwardBatch

INVARIANT_SPLIT = 256  # positions; a power of two


@dataclass(slots=True)
class TritonPlan:
    """The first `decodes` sequences have one token; the others' starts are counted from the first of theirs."""

    table: torch.Tensor  # int32 [B, pages]
    lengths: torch.Tensor  # int32 [B]
    decodes: int
    longest: int  # bounds the lengths
    starts: torch.Tensor | None = None  # int32 [B - decodes + 1]
    tiles: torch.Tensor | None = None  # int32 [N, 2]
    workspace: torch.Tensor | None = None


class TritonAttention:
    """See AttentionBackend and GraphAttention; registered as `triton` and `triton_invariant`."""

    api_version = 1

    def __init__(self, shape: AttentionShape, device: torch.device, *, invariant: bool = False) -> None:
        self._shape = shape
        self._device = device
        self._invariant = invariant
        self._split = INVARIANT_SPLIT if invariant else None
        self._upload: Upload = self._send
        self._rows = PageRows()
        self._workspace: torch.Tensor | None = None

    def _send(self, arrays: object, into: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The upload of whoever was not connected."""
        assert isinstance(arrays, dict) and into is None, "as plan and update call it"
        return {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}

    def connect(self, upload: Upload, queries: torch.dtype, pool: torch.dtype) -> None:
        """See GraphAttention; any dtypes."""
        self._upload = upload

    def plan(self, batch: ForwardBatch) -> object:
        """See AttentionBackend."""
        shape, counts = self._shape, batch.query_lens
        longer = np.flatnonzero(counts != 1)
        decodes = int(longer[0]) if len(longer) else len(counts)
        given = {"table": self._rows.padded(batch, shape.page_size), "lengths": batch.context_lens}
        if decodes < len(counts):
            starts = np.zeros(len(counts) - decodes + 1, dtype=np.int32)
            np.cumsum(counts[decodes:], out=starts[1:])
            given["starts"] = starts
            given["tiles"] = kernels.prefill_tiles(
                counts[decodes:], shape.heads, shape.kv_heads, invariant=self._invariant
            )
        made = self._upload(given)
        longest = int(batch.context_lens[:decodes].max()) if decodes else 0
        return TritonPlan(made["table"], made["lengths"], decodes, longest, made.get("starts"), made.get("tiles"))

    def prepare(self, rows: int, pages: int) -> object:
        """See GraphAttention."""
        longest = pages * self._shape.page_size
        return TritonPlan(
            torch.zeros((rows, pages), dtype=torch.int32, device=self._device),
            torch.ones(rows, dtype=torch.int32, device=self._device),
            rows,
            longest,
            workspace=self._scratch(rows, longest),
        )

    def _scratch(self, rows: int, longest: int) -> torch.Tensor:
        """The workspace of a graph: graphs run one after the other, so all of them have the same memory."""
        shape = self._shape

        def room(device: torch.device) -> torch.Tensor:
            return kernels.decode_workspace(
                rows, shape.heads, shape.head_dim, longest, split_tokens=self._split, device=device
            )

        count = room(torch.device("meta")).numel()
        if self._workspace is None or self._workspace.numel() < count:
            self._workspace = room(self._device)
        return self._workspace[:count]

    def update(self, plan: object, batch: ForwardBatch) -> None:
        """See GraphAttention. Only as many columns as the step has pages go up."""
        assert isinstance(plan, TritonPlan), "plan comes from this backend"
        made = self._upload({"table": self._rows.padded(batch, self._shape.page_size), "lengths": batch.context_lens})
        plan.table[:, : made["table"].shape[1]].copy_(made["table"])
        plan.lengths.copy_(made["lengths"])

    def attend(self, plan: object, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(plan, TritonPlan), "plan comes from this backend"
        shape, count = self._shape, plan.decodes
        result = torch.empty_like(queries)
        if count:
            kernels.decode_attention(
                queries[:count], keys, values, plan.table[:count], plan.lengths[:count],
                page_size=shape.page_size, window=shape.window, split_tokens=self._split, max_context=plan.longest,
                invariant=self._invariant, workspace=plan.workspace, out=result[:count],
            )  # fmt: skip
        if plan.starts is not None and plan.tiles is not None:
            kernels.prefill_attention(
                queries[count:], keys, values, plan.table[count:], plan.starts, plan.lengths[count:], plan.tiles,
                page_size=shape.page_size, window=shape.window, split_tokens=self._split, invariant=self._invariant,
                out=result[count:],
            )  # fmt: skip
        return result.view(result.shape[0], -1)


def build(shape: AttentionShape, device: torch.device) -> TritonAttention:
    """Factory for the registry."""
    return TritonAttention(shape, device)


def build_invariant(shape: AttentionShape, device: torch.device) -> TritonAttention:
    """Factory for the registry."""
    return TritonAttention(shape, device, invariant=True)
