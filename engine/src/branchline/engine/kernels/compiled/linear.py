"""Matrix products in Triton: weights as x, or float8 with a scale a row.

The inner dimension is cut into parts that follow from the weight's shape alone. A part is summed by one loop; parts
are added in order, by one program or, where rows are few and processors idle, by programs of their own whose sums a
second kernel adds. Both ways do the same additions, so the choice between them cannot be seen in a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from branchline.engine.kernels.compiled.launch import is_wide

WANTED_PROGRAMS = 264  # two a processor of the GPUs in mind; a constant, since parts must not depend on the machine
LEAST_PART = 512
BESIDE = 8  # row tiles whose programs run one after another, so that weights are read from cache


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes of one launch."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


INVARIANT = Tile(64, 64, 64, 4, 4)


@triton.jit
def _scaled(total, scales, bias, column, real, SCALED: tl.constexpr, BIASED: tl.constexpr):
    """The sums with scale and bias; the fused step is spelt out, so that both ways round alike."""
    factor = tl.full([1], 1.0, tl.float32) + tl.zeros_like(total)
    if SCALED:
        factor = tl.load(scales + column, mask=real, other=0.0)[None, :] + tl.zeros_like(total)
    if BIASED:
        add = tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :] + tl.zeros_like(total)
        return tl.fma(total, factor, add)
    return total * factor


@triton.jit
def product_tile(
    x, weight, scales, bias, out, parts, rows, columns, inner, x_row, weight_row, part_size, count,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BESIDE: tl.constexpr, SPREAD: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(tile, part): a tile of the result, or with SPREAD one part of its sums."""
    tile, lane = tl.program_id(0), tl.program_id(1)
    down, across = (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
    group = tile // (BESIDE * across)
    beside = tl.minimum(BESIDE, down - group * BESIDE)
    place = tile % (BESIDE * across)
    row = (group * BESIDE + place % beside) * ROWS + tl.arange(0, ROWS)
    column = (place // beside) * COLUMNS + tl.arange(0, COLUMNS)
    real_row, real_column = row < rows, column < columns
    x_base = x + row.to(tl.int64)[:, None] * x_row
    weight_base = weight + column.to(tl.int64)[None, :] * weight_row
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first, last = 0, count
    if SPREAD:
        first, last = lane, lane + 1
    for part in range(first, last):
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(part * part_size, tl.minimum((part + 1) * part_size, inner), INNER):
            at = start + tl.arange(0, INNER)
            real = at < inner
            left = tl.load(x_base + at[None, :], mask=real_row[:, None] & real[None, :], other=0.0)
            right = tl.load(weight_base + at[:, None], mask=real[:, None] & real_column[None, :], other=0.0)
            if WIDE:
                sums = tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")
            else:
                sums = tl.dot(left, right.to(left.dtype), sums)
        total += sums
    where = row.to(tl.int64)[:, None] * columns + column[None, :]
    real_tile = real_row[:, None] & real_column[None, :]
    if SPREAD:
        tl.store(parts + lane.to(tl.int64) * rows * columns + where, total, mask=real_tile)
    else:
        answer = _scaled(total, scales, bias, column, real_column, SCALED, BIASED)
        tl.store(out + where, answer.to(out.dtype.element_ty), mask=real_tile)


@triton.jit
def product_join(
    scales, bias, out, parts, rows, columns, count,
    COLUMNS: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """(row, block of columns): the result from its parts, in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < columns
    total = tl.zeros([1, COLUMNS], tl.float32)
    for part in range(0, count):
        place = parts + (tl.zeros([1], tl.int64) + part)[:, None] * rows * columns + row * columns + column[None, :]
        total += tl.load(place, mask=real[None, :], other=0.0)
    answer = _scaled(total, scales, bias, column, real, SCALED, BIASED)
    tl.store(out + row * columns + column[None, :], answer.to(out.dtype.element_ty), mask=real[None, :])


def part_of(columns: int, inner: int) -> int:
    """Length of a part: enough parts to occupy a GPU where rows are few, from the weight's shape alone."""
    tiles = -(-columns // INVARIANT.columns)
    count = max(1, min(WANTED_PROGRAMS // tiles, inner // LEAST_PART))
    size = -(-inner // count)
    return -(-size // INVARIANT.inner) * INVARIANT.inner


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    invariant: bool,
    spread: bool | None = None,
) -> torch.Tensor:
    """Fill `out` [T, out]; arguments are checked. `spread` sets where parts are summed; None chooses."""
    rows, inner = x.shape
    columns = weight.shape[0]
    if not rows or not columns:
        return out
    tile = INVARIANT if invariant else _tile(rows, x.dtype)
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    part = part_of(columns, inner)
    count = -(-inner // part)
    if spread is None:
        spread = count > 1 and tiles < WANTED_PROGRAMS
    parts = torch.empty((count, rows, columns), dtype=torch.float32, device=x.device) if spread else out
    given = {"SCALED": scales is not None, "BIASED": bias is not None}
    scales, bias = x if scales is None else scales, x if bias is None else bias
    product_tile[(tiles, count if spread else 1)](
        x, weight, scales, bias, out, parts, rows, columns, inner, x.stride(0), weight.stride(0), part, count,
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, BESIDE=BESIDE, SPREAD=spread, WIDE=is_wide(x), **given,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if spread:
        product_join[(rows, -(-columns // 1024))](
            scales, bias, out, parts, rows, columns, count, COLUMNS=1024, **given, num_warps=4, enable_fp_fusion=False
        )
    return out


def _tile(rows: int, dtype: torch.dtype) -> Tile:
    """Blocks that suit the number of rows; float32 tiles are small for the sake of registers."""
    if dtype == torch.float32:
        return Tile(16 if rows <= 16 else 32, 64, 32, 4, 2)
    if rows <= 16:
        return Tile(16, 64, 128, 4, 4)
    if rows <= 64:
        return Tile(64, 64, 128, 4, 3)
    return Tile(128, 128, 64, 8, 3)
