"""Causal grouped-query attention over paged keys and values: what is asked for, the oracle, and the choice of a form.

See `branchline.engine.kernels` for shapes. Called by attention backends on a GPU once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.kernels import checks

SMALLEST_SPLIT = 256  # tokens of a part: enough work for one program, few parts for short contexts
MOST_SPLITS = 64  # parts of the longest context: bounds the workspace
INVARIANT_ROWS = 64  # rows of one tile in invariant mode: a tile's height must not depend on what is decoded beside it
PREFILL_ROWS = 128


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's paged keys and values and how to read them; `window` 0 means all earlier tokens."""

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    scale: float
    window: int
    key_scale: float
    value_scale: float


def split_size(max_context: int) -> int:
    """Default tokens a part: a power of two that cuts `max_context` into at most MOST_SPLITS parts."""
    size = SMALLEST_SPLIT
    while size * MOST_SPLITS < max_context:
        size *= 2
    return size


def decode_workspace(
    rows: int, heads: int, head_dim: int, max_context: int, split_tokens: int | None = None, *, device: torch.device
) -> torch.Tensor:
    """Float32 scratch of one decode call: per row, head and part the sum, the total and the maximum."""
    parts = -(-max_context // (split_tokens or split_size(max_context)))
    return torch.empty(rows * heads * parts * (head_dim + 2), dtype=torch.float32, device=device)


def prefill_tiles(
    query_lens: npt.NDArray[np.int32], heads: int, kv_heads: int, *, invariant: bool = False
) -> npt.NDArray[np.int32]:
    """(sequence, first new token in it) of each tile, int32 [N, 2], for these new tokens a sequence."""
    tokens = tile_tokens(heads // kv_heads, invariant)
    counts = -(-query_lens.astype(np.int64) // tokens)
    owners = np.repeat(np.arange(len(query_lens)), counts)
    firsts = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((owners, firsts * tokens), axis=1).astype(np.int32)


def tile_tokens(group: int, invariant: bool) -> int:
    """New tokens of one tile: its rows are tokens times the heads (padded to a power of two) of one key head."""
    rows = INVARIANT_ROWS if invariant else PREFILL_ROWS
    return max(1, rows // padded_group(group))


def padded_group(group: int) -> int:
    """Query heads a key head, rounded up to a power of two."""
    return 1 << (group - 1).bit_length()


def decode_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    page_size: int,
    scale: float | None = None,
    window: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    split_tokens: int | None = None,
    max_context: int | None = None,
    invariant: bool = False,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token a row, [R, heads, head_dim] in the dtype of `queries`; see the package's text."""
    pages = checked(queries, keys, values, page_table, page_size, scale, window, key_scale, value_scale)
    rows = queries.shape[0]
    checks.shaped("page_table", page_table, rows, None)
    checks.integers("context_lens", context_lens, torch.int32, rows)
    if split_tokens is not None:
        checks.power_of_two("split_tokens", split_tokens)
    result = checks.result_like(out, queries, *queries.shape)
    if not checks.on_triton(queries):
        return result.copy_(decode_attention_reference(queries, pages, context_lens))
    from branchline.engine.kernels.compiled import attention

    longest = max_context or page_table.shape[1] * page_size
    split = split_tokens or split_size(longest)
    return attention.decode_attention(queries, pages, context_lens, longest, split, invariant, workspace, result)


def prefill_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    *,
    page_size: int,
    scale: float | None = None,
    window: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    split_tokens: int | None = None,
    invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ragged new tokens, [T, heads, head_dim] in the dtype of `queries`; see the package's text."""
    pages = checked(queries, keys, values, page_table, page_size, scale, window, key_scale, value_scale)
    count = page_table.shape[0]
    checks.integers("query_starts", query_starts, torch.int32, count + 1)
    checks.integers("context_lens", context_lens, torch.int32, count)
    checks.integers("tiles", tiles, torch.int32, None, 2)
    if split_tokens is not None:
        checks.power_of_two("split_tokens", split_tokens)
    result = checks.result_like(out, queries, *queries.shape)
    if not checks.on_triton(queries):
        return result.copy_(prefill_attention_reference(queries, pages, query_starts, context_lens))
    from branchline.engine.kernels.compiled import attention

    split = split_tokens or split_size(page_table.shape[1] * page_size)
    return attention.prefill_attention(
        queries, pages, query_starts, context_lens, tiles, split if invariant else 0, result
    )


def checked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    scale: float | None,
    window: int | None,
    key_scale: float,
    value_scale: float,
) -> Pages:
    """The pages, once everything about them has been found to fit. Raises ValueError."""
    checks.shaped("queries", queries, None, None, None)
    heads, width = queries.shape[1:]
    checks.float_kind("queries", queries)
    for name, pool in (("keys", keys), ("values", values)):
        checks.shaped(name, pool, None, None, width)
        checks.float_kind(name, pool, e4m3=True)
        checks.dense_rows(name, pool)
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(f"values are {list(values.shape)} {values.dtype}; use keys' {list(keys.shape)} {keys.dtype}")
    if keys.dtype not in (queries.dtype, checks.E4M3):
        raise ValueError(f"keys have dtype {keys.dtype}; use {queries.dtype} or {checks.E4M3}")
    if heads % keys.shape[1]:
        raise ValueError(f"queries have {heads} heads; use a multiple of keys' {keys.shape[1]}")
    checks.power_of_two("page_size", page_size)
    checks.integers("page_table", page_table, torch.int32, None, None)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; use 1 or more, or None")
    root = width**-0.5 if scale is None else scale
    return Pages(keys, values, page_table, page_size, root, window or 0, key_scale, value_scale)


def decode_attention_reference(queries: torch.Tensor, pages: Pages, context_lens: torch.Tensor) -> torch.Tensor:
    """The oracle: float32 softmax over each row's context, gathered. A row without context gives zeros."""
    answers = [
        _attend(queries[row : row + 1], pages, row, context) for row, context in enumerate(context_lens.tolist())
    ]
    return torch.cat(answers) if answers else torch.empty_like(queries)


def prefill_attention_reference(
    queries: torch.Tensor, pages: Pages, query_starts: torch.Tensor, context_lens: torch.Tensor
) -> torch.Tensor:
    """The oracle of ragged new tokens."""
    answer = torch.zeros_like(queries)
    borders = query_starts.tolist()
    for row, (context, first, last) in enumerate(zip(context_lens.tolist(), borders, borders[1:], strict=False)):
        if last > first:
            answer[first:last] = _attend(queries[first:last], pages, row, context)
    return answer


def _attend(queries: torch.Tensor, pages: Pages, row: int, context: int) -> torch.Tensor:
    """The last len(queries) tokens of one sequence's context, each over what it may see."""
    count, heads, _ = queries.shape
    if context == 0:
        return torch.zeros_like(queries)
    size, device = pages.page_size, queries.device
    position = torch.arange(context, device=device)
    table = pages.page_table[row, : -(-context // size)].long()
    slots = table[position // size] * size + position % size
    group = heads // pages.keys.shape[1]
    key = pages.keys[slots].float().repeat_interleave(group, dim=1) * pages.key_scale
    value = pages.values[slots].float().repeat_interleave(group, dim=1) * pages.value_scale
    scores = torch.einsum("qhd,chd->hqc", queries.float(), key) * pages.scale
    own = torch.arange(context - count, context, device=device)[:, None]
    hidden = position > own
    if pages.window:
        hidden |= position <= own - pages.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqc,chd->qhd", weights, value).to(queries.dtype)
