"""What every attention backend must do: exact attention over pages, blind to what nobody owns. Imports torch late."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from branchline.engine.types import ForwardBatch

Make = Callable[..., object]
ROWS = ((1, 1), (1, 9), (5, 5), (3, 12), (1, 16), (7, 21))  # (new tokens, context with them) of a mixed step


def _batch(page_size: int) -> tuple[ForwardBatch, int]:
    """A step of ROWS on scattered pages, and how many pages there are."""
    tables, used = [], 0
    for _, context in ROWS:
        count = -(-context // page_size)
        tables.append([2 * page + 1 for page in range(used, used + count)][::-1])
        used += count
    positions = [place for new, context in ROWS for place in range(context - new, context)]
    owners = [row for row, (new, _) in enumerate(ROWS) for _ in range(new)]
    slots = [
        tables[row][place // page_size] * page_size + place % page_size
        for row, place in zip(owners, positions, strict=True)
    ]
    batch = ForwardBatch(
        token_ids=np.zeros(len(positions), dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slots=np.array(slots, dtype=np.int64),
        query_lens=np.array([new for new, _ in ROWS], dtype=np.int32),
        context_lens=np.array([context for _, context in ROWS], dtype=np.int32),
        page_tables=tables,
        logit_rows=np.zeros(0, dtype=np.int64),
    )
    return batch, 2 * used + 1


def _compare(make: Make, heads: int, kv_heads: int, page_size: int, window: int | None) -> None:
    import torch

    from branchline.engine.attention.base import AttentionShape, context_slots

    shape = AttentionShape(heads, kv_heads, 16, page_size, window)
    batch, pages = _batch(page_size)
    torch.manual_seed(1)
    pool = torch.full((2, pages * page_size, kv_heads, 16), float("nan"))
    for table, (_, context) in zip(batch.page_tables, ROWS, strict=True):
        owned = context_slots(table, 0, context, page_size)
        pool[:, owned] = torch.randn(2, context, kv_heads, 16)
    queries = torch.randn(len(batch.token_ids), heads, 16)
    backend = make(shape, torch.device("cpu"))
    found = backend.attend(backend.plan(batch), queries, pool[0], pool[1])  # type: ignore[attr-defined]
    assert found.shape == (len(queries), heads * 16) and found.dtype == queries.dtype
    row = 0
    for table, (new, context) in zip(batch.page_tables, ROWS, strict=True):
        for place in range(context - new, context):
            first = 0 if window is None else max(place + 1 - window, 0)
            seen = context_slots(table, first, place + 1, page_size)
            keys, values = (pool[which, seen].repeat_interleave(heads // kv_heads, dim=1).double() for which in (0, 1))
            scores = torch.einsum("hd,shd->hs", queries[row].double(), keys) / 4.0
            wanted = torch.einsum("hs,shd->hd", scores.softmax(-1), values).flatten()
            worst = (found[row].double() - wanted).abs().max().item()
            assert worst < 1e-4, f"token {row} at position {place}: {worst}"
            row += 1


def mixed_rows_on_scattered_pages_are_exact(make: Make) -> None:
    """Prefill and decode rows in one step, several heads a key head, pages of 1 and 4; slots of nobody hold NaN."""
    for heads, kv_heads, page_size in ((2, 2, 4), (6, 2, 1), (4, 1, 4)):
        _compare(make, heads, kv_heads, page_size, None)


def a_window_hides_what_is_older(make: Make) -> None:
    """The last positions only, the token's own included."""
    for window in (1, 4, 6):
        _compare(make, 4, 2, 4, window)


CHECKS = (mixed_rows_on_scattered_pages_are_exact, a_window_hides_what_is_older)
