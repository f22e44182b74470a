"""Paged attention on torch's scaled_dot_product_attention, for any mix of prefill and decode rows.

A sequence whose pages lie side by side is read in place; others are gathered slot by slot. Decode rows are
gathered in groups of similar length, small enough on a CPU to stay in its cache. Padding repeats a slot of
the same sequence, so that nothing of a neighbour can reach a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from branchline.engine.attention.base import AttentionShape
from branchline.engine.types import ForwardBatch

GROUP_ELEMENTS_CPU = 1 << 18  # keys of one gathered group: 1 MB in float32, half a core's L2
IN_PLACE_TOKENS = 64  # shorter contexts are cheaper gathered together than attended one by one
PAD_SHARE = 0.25  # a group's shortest context is at least this much less than its longest


@dataclass(frozen=True, slots=True)
class _Span:
    """New tokens first..last-1 of one sequence over its own context, in place (`start`) or by `slots`."""

    first: int
    last: int
    context: int
    start: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode rows that are attended together. `rows` None means all rows of the step in order."""

    rows: torch.Tensor | None
    slots: torch.Tensor  # [rows * longest]
    longest: int
    mask: torch.Tensor | None  # [rows, 1, 1, longest]


@dataclass(slots=True)
class PagedPlan:
    """One step's spans and groups."""

    spans: list[_Span] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)


class PagedAttention:
    """See AttentionBackend; registered as `torch_paged`."""

    api_version = 1

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._group = shape.heads // shape.kv_heads
        self._limit = GROUP_ELEMENTS_CPU if device.type == "cpu" else 1 << 62
        self._buffers: dict[str, torch.Tensor] = {}

    # ---- planning ---------------------------------------------------------------------------

    def plan(self, batch: ForwardBatch) -> object:
        """Split the step's sequences into spans and groups; builds every index tensor once."""
        plan = PagedPlan()
        ends = np.cumsum(batch.query_lens)
        decode: list[tuple[int, int, npt.NDArray[np.int64]]] = []  # (context, row, slots)
        for number, end in enumerate(ends):
            query, context = int(batch.query_lens[number]), int(batch.context_lens[number])
            first = 0 if self._shape.window is None else max(0, context - query + 1 - self._shape.window)
            slots = self._slots(batch.page_tables[number], first, context)
            in_place = bool(slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all())
            if query == 1 and not (in_place and len(slots) >= IN_PLACE_TOKENS):
                decode.append((len(slots), int(end) - 1, slots))
                continue
            plan.spans.append(self._span(int(end) - query, int(end), slots, in_place))
        self._plan_groups(plan, decode, len(batch.token_ids))
        return plan

    def _slots(self, pages: list[int], first: int, context: int) -> npt.NDArray[np.int64]:
        size = self._shape.page_size
        low, high = first // size, -(-context // size)
        table = np.asarray(pages[low:high], dtype=np.int64)
        slots = (table[:, None] * size + np.arange(size)).reshape(-1)
        return slots[first - low * size : context - low * size]

    def _span(self, first: int, last: int, slots: npt.NDArray[np.int64], in_place: bool) -> _Span:
        query, context = last - first, len(slots)
        causal = query > 1 and query == context and (self._shape.window is None or context <= self._shape.window)
        mask = None
        if query > 1 and not causal:
            mask = self._mask(query, context)
        index = None if in_place else self._tensor(slots)
        return _Span(first, last, context, int(slots[0]), index, mask, causal)

    def _mask(self, query: int, context: int) -> torch.Tensor:
        """Additive mask [query, context]: new token i stands at context position context - query + i."""
        column = torch.arange(context, device=self._device)
        row = torch.arange(context - query, context, device=self._device)[:, None]
        hidden = column > row
        if self._shape.window is not None:
            hidden |= column <= row - self._shape.window
        return torch.zeros((query, context), device=self._device).masked_fill_(hidden, float("-inf"))

    def _tensor(self, values: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _plan_groups(self, plan: PagedPlan, decode: list[tuple[int, int, npt.NDArray[np.int64]]], tokens: int) -> None:
        decode.sort(key=lambda row: row[:2])
        width = self._shape.kv_heads * self._shape.head_dim
        while decode:
            longest = decode[-1][0]
            count = 0
            shortest = longest * (1 - PAD_SHARE) - 16
            while count < len(decode) and decode[-1 - count][0] >= shortest:
                count += 1
                if (count + 1) * longest * width > self._limit:
                    break
            members = decode[-count:]
            del decode[-count:]
            if count == tokens:
                members.sort(key=lambda row: row[1])
            plan.groups.append(self._grouped(members, longest, count == tokens))

    def _grouped(self, members: list[tuple[int, int, npt.NDArray[np.int64]]], longest: int, whole: bool) -> _Group:
        slots = np.empty((len(members), longest), dtype=np.int64)
        lengths = np.array([context for context, _, _ in members])
        for line, (context, _, own) in zip(slots, members, strict=True):
            line[:context] = own
            line[context:] = own[0]
        mask = None
        if lengths.min() < longest:
            hidden = self._tensor(np.arange(longest) >= lengths[:, None])
            mask = torch.zeros((len(members), 1, 1, longest), device=self._device)
            mask.masked_fill_(hidden[:, None, None, :], float("-inf"))
        rows = None if whole else self._tensor(np.array([row for _, row, _ in members], dtype=np.int64))
        return _Group(rows, self._tensor(slots.reshape(-1)), longest, mask)

    # ---- attending --------------------------------------------------------------------------

    def attend(self, plan: object, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(plan, PagedPlan), "plan comes from this backend"
        result = torch.empty_like(queries)
        for span in plan.spans:
            self._attend_span(span, queries, keys, values, result)
        for group in plan.groups:
            self._attend_group(group, queries, keys, values, result)
        return result.view(result.shape[0], -1)

    def _attend_span(
        self, span: _Span, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, result: torch.Tensor
    ) -> None:
        if span.slots is None:
            key, value = keys[span.start : span.start + span.context], values[span.start : span.start + span.context]
        else:
            key, value = self._gather("k", keys, span.slots), self._gather("v", values, span.slots)
        key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]  # [1, kv_heads, context, head_dim]
        query = queries[span.first : span.last]
        if span.last - span.first == 1:
            # One new token sees everything: its heads of one group are queries of one key head.
            shaped = query.view(1, self._shape.kv_heads, self._group, self._shape.head_dim)
            answer = scaled_dot_product_attention(shaped, key, value)
            result[span.first : span.last] = answer.view(query.shape)
            return
        answer = scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            attn_mask=None if span.mask is None else span.mask.to(query.dtype),
            is_causal=span.causal,
            enable_gqa=self._group > 1,
        )
        result[span.first : span.last] = answer[0].transpose(0, 1)

    def _attend_group(
        self, group: _Group, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, result: torch.Tensor
    ) -> None:
        shape = self._shape
        chosen = queries if group.rows is None else queries.index_select(0, group.rows)
        count = chosen.shape[0]
        key = self._gather("k", keys, group.slots).view(count, group.longest, shape.kv_heads, shape.head_dim)
        value = self._gather("v", values, group.slots).view(count, group.longest, shape.kv_heads, shape.head_dim)
        answer = scaled_dot_product_attention(
            chosen.view(count, shape.kv_heads, self._group, shape.head_dim),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=None if group.mask is None else group.mask.to(queries.dtype),
        ).reshape(count, shape.heads, shape.head_dim)
        if group.rows is None:
            result.copy_(answer)
        else:
            result.index_copy_(0, group.rows, answer)

    def _gather(self, name: str, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Pool rows of these slots in a buffer that is reused, so that it stays in cache. [n, kv_heads, head_dim]"""
        count = slots.shape[0]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < count or buffer.dtype != pool.dtype:
            buffer = torch.empty((count, *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
            self._buffers[name] = buffer
        return torch.index_select(pool, 0, slots, out=buffer[:count])


def build(shape: AttentionShape, device: torch.device) -> PagedAttention:
    """Factory for the registry."""
    return PagedAttention(shape, device)
