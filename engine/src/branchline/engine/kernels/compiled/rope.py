"""Rotary positions and the write into pages in Triton: one program a token and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from branchline.engine.kernels.checks import E4M3, E4M3_LARGEST
from branchline.engine.kernels.compiled.launch import block
from branchline.engine.kernels.rope import HeadNorms, Target


@triton.jit
def _put(place, wide, scale, real, E4M3: tl.constexpr, LARGEST: tl.constexpr):
    """Store a head's values, scaled and saturated where the pool is float8."""
    if E4M3:
        wide = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -LARGEST), LARGEST)
    tl.store(place, wide.to(place.dtype.element_ty), mask=real)


@triton.jit
def turn_head(
    projected, cos, sin, positions, slots, keys, values, out, query_norm, key_norm, row, cos_row, sin_row,
    key_slot, key_head, value_slot, value_head, width, eps, key_scale, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, E4M3: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """(token, head of queries, keys, values in this order): turned if it is no value, then stored where it belongs."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = width // 2
    inside = tl.arange(0, HALF)
    real = inside < half
    source = projected + token * row + head * width + inside
    kind = projected.dtype.element_ty
    low = tl.load(source, mask=real, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=real, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)
    if head >= HEADS + KV_HEADS:
        if slot >= 0:
            place = values + slot * value_slot + (head - HEADS - KV_HEADS) * value_head + inside
            _put(place, low, value_scale, real, E4M3, LARGEST)
            _put(place + half, high, value_scale, real, E4M3, LARGEST)
    else:
        if NORM:
            weight = query_norm + inside
            if head >= HEADS:
                weight = key_norm + inside
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / width + eps)
            low = (low * scale).to(kind).to(tl.float32) * tl.load(weight, mask=real, other=0.0).to(tl.float32)
            high = (high * scale).to(kind).to(tl.float32) * tl.load(weight + half, mask=real, other=0.0).to(tl.float32)
            low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
        position = tl.load(positions + token)
        cosine, sine = cos + position * cos_row + inside, sin + position * sin_row + inside
        turned = low * tl.load(cosine, mask=real, other=0.0).to(tl.float32)
        turned += high * tl.load(sine, mask=real, other=0.0).to(tl.float32)
        other = high * tl.load(cosine + half, mask=real, other=0.0).to(tl.float32)
        other += low * tl.load(sine + half, mask=real, other=0.0).to(tl.float32)
        turned, other = turned.to(kind), other.to(kind)
        if head < HEADS:
            place = out + (token * HEADS + head) * width + inside
            tl.store(place, turned, mask=real)
            tl.store(place + half, other, mask=real)
        elif slot >= 0:
            put = keys + slot * key_slot + (head - HEADS) * key_head + inside
            _put(put, turned.to(tl.float32), key_scale, real, E4M3, LARGEST)
            _put(put + half, other.to(tl.float32), key_scale, real, E4M3, LARGEST)


def rope_write(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    target: Target,
    norms: HeadNorms | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill `out` [T, heads, head_dim] and the pool; arguments are checked."""
    tokens, heads, width = out.shape
    keys, values = target.keys, target.values
    kv_heads = keys.shape[1]
    if not tokens:
        return out
    query_norm, key_norm, eps = (cos, cos, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    turn_head[(tokens, heads + 2 * kv_heads)](
        projected, cos, sin, positions, target.slots, keys, values, out, query_norm, key_norm, projected.stride(0),
        cos.stride(0), sin.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), width, eps,
        target.key_scale, target.value_scale,
        HEADS=heads, KV_HEADS=kv_heads, HALF=block(width // 2), NORM=norms is not None, E4M3=keys.dtype == E4M3,
        LARGEST=E4M3_LARGEST, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out
