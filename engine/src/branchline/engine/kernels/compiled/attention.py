"""Paged attention in Triton: one body for decode rows and prefill tiles, so that both can give the same bits.

A tile is up to ROWS rows, each a (new token, head of one key head). Contexts are read in blocks of KEYS positions
aligned to 0. In decode, and in prefill with SPLIT > 0, softmax starts anew every SPLIT positions and the parts are
merged in order; then a row's bits depend on neither the tile's other rows nor on how the context came to be. The
online softmax is Milakov and Gimelshein's (2018), the split along the context that of Flash-Decoding (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from branchline.engine.kernels.attention import INVARIANT_ROWS, Pages, padded_group, tile_tokens
from branchline.engine.kernels.compiled.launch import block, is_wide, lanes

LOG2_E = 1.4426950408889634
DECODE_ROWS = 16  # the least that a matrix unit takes
KEYS = 64


@triton.jit
def _blocks(
    query, best, total, sums, low, high, own, key_base, value_base, table, scale,
    key_slot, value_slot, width, WIDTH: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Online softmax of a tile over positions low..high-1; `own` is each row's position. Returns the new state."""
    inside = tl.arange(0, WIDTH)
    for start in range(low, high, KEYS):
        position = start + tl.arange(0, KEYS)
        held = position < high
        page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
        slot = page * PAGE + position % PAGE
        dense = inside < width
        key = tl.load(
            key_base + slot[None, :] * key_slot + inside[:, None], mask=held[None, :] & dense[:, None], other=0.0
        )
        value = tl.load(
            value_base + slot[:, None] * value_slot + inside[None, :], mask=held[:, None] & dense[None, :], other=0.0
        )
        if WIDE:
            key = key.to(tl.float32)
            value = value.to(tl.float32)
            scores = tl.dot(query, key, input_precision="ieee")
        else:
            key = key.to(query.dtype)
            value = value.to(query.dtype)
            scores = tl.dot(query, key)
        scores = scores * scale
        if MASKED:
            seen = held[None, :] & (position[None, :] <= own[:, None])
            if WINDOW > 0:
                seen = seen & (position[None, :] > own[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None]
        if WIDE:
            sums = tl.dot(weights, value, sums, input_precision="ieee")
        else:
            sums = tl.dot(weights.to(value.dtype), value, sums)
        best = higher
    return best, total, sums


@triton.jit
def _span(
    query, best, total, sums, low, high, own, first_own, key_base, value_base, table, scale,
    key_slot, value_slot, width, WIDTH: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Positions low..high-1: without a mask as far as every row sees them all, masked from there."""
    clear = low
    if WINDOW == 0:
        clear = tl.maximum(low, tl.minimum(high, first_own + 1) // KEYS * KEYS)
        best, total, sums = _blocks(
            query, best, total, sums, low, clear, own, key_base, value_base, table, scale,
            key_slot, value_slot, width, WIDTH, PAGE, WINDOW, KEYS, False, WIDE,
        )  # fmt: skip
    return _blocks(
        query, best, total, sums, clear, high, own, key_base, value_base, table, scale,
        key_slot, value_slot, width, WIDTH, PAGE, WINDOW, KEYS, True, WIDE,
    )  # fmt: skip


@triton.jit
def _join(best, total, sums, other_best, other_total, other_sums):
    """Two parts' states as one. Fused steps are spelt out: decode and prefill must round alike."""
    higher = tl.maximum(best, other_best)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, add = tl.exp2(best - base), tl.exp2(other_best - base)
    total = tl.fma(total, shrink, other_total * add)
    sums = tl.fma(sums, shrink[:, None] + tl.zeros_like(sums), other_sums * add[:, None])
    return higher, total, sums


@triton.jit
def _finish(total, sums, value_scale):
    """Normalised sums; a row that saw nothing gives zeros."""
    return sums * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]


@triton.jit
def decode_part(
    queries, keys, values, table, contexts, out, parts, query_row, query_head, key_slot, key_head, value_slot,
    value_head, table_row, scale, value_scale, most_parts, heads, width,
    GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, ONE_PART: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(row, key head, lane): every lanes-th part of one row's context, into `parts`, or the answer if it is one."""
    row, head, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    line, inside = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = (line < GROUP)[:, None] & (inside < width)[None, :]
    query_head_of = head * GROUP + line
    query = tl.load(
        queries + row.to(tl.int64) * query_row + query_head_of[:, None] * query_head + inside[None, :],
        mask=real,
        other=0.0,
    )
    if WIDE:
        query = query.to(tl.float32)
    own = tl.zeros([ROWS], tl.int32) + (context - 1)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(context - WINDOW, 0) // KEYS * KEYS
    for part in range(lowest // SPLIT + lane, (context + SPLIT - 1) // SPLIT, tl.num_programs(2)):
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
        best, total, sums = _span(
            query, best, total, sums, tl.maximum(part * SPLIT, lowest), tl.minimum((part + 1) * SPLIT, context), own,
            context - 1, keys + head * key_head, values + head * value_head, table + row.to(tl.int64) * table_row,
            scale,
            key_slot, value_slot, width, WIDTH, PAGE, WINDOW, KEYS, WIDE,
        )  # fmt: skip
        if ONE_PART:
            answer = _finish(total, sums, value_scale)
            at = (row.to(tl.int64) * heads + query_head_of[:, None]) * width + inside[None, :]
            tl.store(out + at, answer.to(out.dtype.element_ty), mask=real)
        else:
            place = ((row.to(tl.int64) * heads + query_head_of) * most_parts + part) * (width + 2)
            tl.store(parts + place[:, None] + inside[None, :], sums, mask=real)
            tl.store(parts + place + width, total, mask=line < GROUP)
            tl.store(parts + place + width + 1, best, mask=line < GROUP)
    if ONE_PART and context == 0:
        at = (row.to(tl.int64) * heads + query_head_of[:, None]) * width + inside[None, :]
        tl.store(out + at, tl.zeros([ROWS, WIDTH], out.dtype.element_ty), mask=real)


@triton.jit
def decode_join(
    parts, contexts, out, value_scale, most_parts, heads, width,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """(row, head): the answer from its parts, in order."""
    row, head = tl.program_id(0), tl.program_id(1)
    context = tl.load(contexts + row)
    inside = tl.arange(0, WIDTH)
    dense = (inside < width)[None, :]
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(context - WINDOW, 0) // KEYS * KEYS
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, WIDTH], tl.float32)
    one = tl.arange(0, 1)
    for part in range(lowest // SPLIT, (context + SPLIT - 1) // SPLIT):
        place = parts + ((row.to(tl.int64) * heads + head) * most_parts + part) * (width + 2)
        other_sums = tl.load(place + inside[None, :], mask=dense, other=0.0)
        best, total, sums = _join(
            best, total, sums, tl.load(place + width + 1 + one), tl.load(place + width + one), other_sums
        )
    answer = _finish(total, sums, value_scale)
    place = out + (row.to(tl.int64) * heads + head) * width + inside[None, :]
    tl.store(place, answer.to(out.dtype.element_ty), mask=dense)


@triton.jit
def prefill_tile(
    queries, keys, values, table, starts, contexts, tiles, out, query_row, query_head, key_slot, key_head, value_slot,
    value_head, table_row, scale, value_scale, heads, width,
    GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(tile, key head): the answers of ROWS / PADDED new tokens of one sequence."""
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence, offset = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    start, end, context = tl.load(starts + sequence), tl.load(starts + sequence + 1), tl.load(contexts + sequence)
    line, inside = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token = start + offset + line // PADDED
    query_head_of = head * GROUP + line % PADDED
    real = ((token < end) & (line % PADDED < GROUP))[:, None] & (inside < width)[None, :]
    query = tl.load(
        queries + token.to(tl.int64)[:, None] * query_row + query_head_of[:, None] * query_head + inside[None, :],
        mask=real,
        other=0.0,
    )
    if WIDE:
        query = query.to(tl.float32)
    shift = context - end  # a token's position is its place among the new tokens plus this
    own = token + shift
    first = start + offset + shift
    high = tl.minimum(first + ROWS // PADDED, context)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(first + 1 - WINDOW, 0) // KEYS * KEYS
    key_base, value_base = keys + head * key_head, values + head * value_head
    lines = table + sequence.to(tl.int64) * table_row
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    if SPLIT == 0:
        best, total, sums = _span(
            query, best, total, sums, low, high, own, first, key_base, value_base, lines, scale,
            key_slot, value_slot, width, WIDTH, PAGE, WINDOW, KEYS, WIDE,
        )  # fmt: skip
    else:
        for part in range(low // SPLIT, (high + SPLIT - 1) // SPLIT):
            other_best = tl.full([ROWS], float("-inf"), tl.float32)
            other_total = tl.zeros([ROWS], tl.float32)
            other_sums = tl.zeros([ROWS, WIDTH], tl.float32)
            other_best, other_total, other_sums = _span(
                query, other_best, other_total, other_sums, tl.maximum(part * SPLIT, low),
                tl.minimum((part + 1) * SPLIT, high), own, first, key_base, value_base, lines, scale,
                key_slot, value_slot, width, WIDTH, PAGE, WINDOW, KEYS, WIDE,
            )  # fmt: skip
            best, total, sums = _join(best, total, sums, other_best, other_total, other_sums)
    answer = _finish(total, sums, value_scale)
    place = out + (token.to(tl.int64)[:, None] * heads + query_head_of[:, None]) * width + inside[None, :]
    tl.store(place, answer.to(out.dtype.element_ty), mask=real)


def decode_attention(
    queries: torch.Tensor,
    pages: Pages,
    context_lens: torch.Tensor,
    longest: int,
    split: int,
    invariant: bool,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` [R, heads, head_dim]; arguments are checked. Raises ValueError for a workspace that is too small."""
    rows, heads, width = queries.shape
    kv_heads = pages.keys.shape[1]
    group = heads // kv_heads
    most = -(-longest // split)
    one_part = most == 1
    needed = rows * heads * most * (width + 2)
    if one_part:
        workspace = out  # not touched
    elif workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=queries.device)
    elif workspace.dtype != torch.float32 or workspace.numel() < needed:
        raise ValueError(f"workspace has {workspace.numel()} {workspace.dtype}; use {needed} float32 or more")
    if rows == 0:
        return out
    tile_rows = INVARIANT_ROWS if invariant else DECODE_ROWS
    scale = pages.scale * pages.key_scale * LOG2_E
    wide = is_wide(queries)
    shared = {"WIDTH": block(width, 16), "WINDOW": pages.window, "KEYS": KEYS, "SPLIT": split}
    decode_part[(rows, kv_heads, lanes(queries.device, rows * kv_heads, most))](
        queries, pages.keys, pages.values, pages.page_table, context_lens, out, workspace,
        queries.stride(0), queries.stride(1), *_strides(pages), scale, pages.value_scale, most, heads, width,
        GROUP=group, ROWS=max(tile_rows, padded_group(group)), PAGE=pages.page_size, ONE_PART=one_part, WIDE=wide,
        **shared, **_options(width, 4, wide, invariant),
    )  # fmt: skip
    if not one_part:
        decode_join[(rows, heads)](
            workspace,
            context_lens,
            out,
            pages.value_scale,
            most,
            heads,
            width,
            **shared,
            num_warps=1,
            enable_fp_fusion=not invariant,
        )
    return out


def prefill_attention(
    queries: torch.Tensor,
    pages: Pages,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    tiles: torch.Tensor,
    split: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` [T, heads, head_dim]; arguments are checked. `split` above 0 is invariant mode's."""
    heads, width = queries.shape[1:]
    kv_heads = pages.keys.shape[1]
    group = heads // kv_heads
    if not tiles.shape[0]:
        return out
    wide = is_wide(queries)
    prefill_tile[(tiles.shape[0], kv_heads)](
        queries, pages.keys, pages.values, pages.page_table, query_starts, context_lens, tiles, out,
        queries.stride(0), queries.stride(1), *_strides(pages), pages.scale * pages.key_scale * LOG2_E,
        pages.value_scale, heads, width,
        GROUP=group, PADDED=padded_group(group), ROWS=tile_tokens(group, split > 0) * padded_group(group),
        WIDTH=block(width, 16), PAGE=pages.page_size, WINDOW=pages.window, KEYS=KEYS, SPLIT=split, WIDE=wide,
        **_options(width, 4 if split else 8, wide, split > 0),
    )  # fmt: skip
    return out


def _strides(pages: Pages) -> tuple[int, ...]:
    return (
        pages.keys.stride(0), pages.keys.stride(1), pages.values.stride(0), pages.values.stride(1),
        pages.page_table.stride(0),
    )  # fmt: skip


def _options(width: int, warps: int, wide: bool, invariant: bool) -> dict[str, int | bool]:
    """Launch options: fewer stages where float32 tiles or wide heads would not fit in shared memory."""
    stages = 1 if wide and width > 64 else 2 if wide or width > 128 else 3
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": not invariant}
