"""From a fused projection to turned queries and to keys and values in pages: the oracle, and the choice of a form.

See `branchline.engine.kernels` for shapes. Called once a layer, before attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from branchline.engine.kernels import checks
from branchline.engine.kernels.norm import rms_norm_reference


@dataclass(frozen=True, slots=True)
class Target:
    """One layer's pool [slots, kv_heads, head_dim] and where the T new tokens go in it."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    key_scale: float
    value_scale: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [head_dim] of the norms over each query's and each key's head, before they turn."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def rope_write(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries [T, heads, head_dim]; writes keys and values of the T tokens into the pool."""
    tokens, width = projected.shape[0], keys.shape[-1]
    checks.shaped("projected", projected, None, (heads + 2 * kv_heads) * width)
    checks.float_kind("projected", projected)
    for name, rows in (("cos", cos), ("sin", sin)):
        checks.shaped(name, rows, None, width)
        checks.float_kind(name, rows)
    for name, dense in (("projected", projected), ("cos", cos), ("sin", sin), ("keys", keys), ("values", values)):
        checks.dense_rows(name, dense)
    checks.integers("positions", positions, torch.int64, tokens)
    checks.integers("slots", slots, torch.int64, tokens)
    for name, pool in (("keys", keys), ("values", values)):
        checks.shaped(name, pool, None, kv_heads, width)
        if pool.dtype not in (projected.dtype, checks.E4M3):
            raise ValueError(f"{name} have dtype {pool.dtype}; use {projected.dtype} or {checks.E4M3}")
    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm and key_norm go together; pass both or neither")
    norms = None if query_norm is None or key_norm is None else HeadNorms(query_norm, key_norm, eps)
    target = Target(keys, values, slots, key_scale, value_scale)
    result = checks.result_like(out, projected, tokens, heads, width)
    if not checks.on_triton(projected):
        return result.copy_(rope_write_reference(projected, cos, sin, positions, target, heads, norms))
    from branchline.engine.kernels.compiled import rope

    return rope.rope_write(projected, cos, sin, positions, target, norms, result)


def rope_write_reference(
    projected: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    target: Target,
    heads: int,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """The oracle; heads turn in float32 and are rounded once."""
    kv_heads, width = target.keys.shape[1:]
    parts = projected.view(projected.shape[0], -1, width)
    query, key, value = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    if norms is not None:
        query = rms_norm_reference(query, norms.query, norms.eps)
        key = rms_norm_reference(key, norms.key, norms.eps)
    cosine, sine = cos[positions].float()[:, None], sin[positions].float()[:, None]
    kept = target.slots >= 0
    at = target.slots[kept]
    _store(target.keys, at, _turn(key, cosine, sine)[kept], target.key_scale)
    _store(target.values, at, value[kept], target.value_scale)
    return _turn(query, cosine, sine)


def _turn(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    wide, half = heads.float(), heads.shape[-1] // 2
    swapped = torch.cat((wide[..., half:], wide[..., :half]), dim=-1)
    return (wide * cosine + swapped * sine).to(heads.dtype)


def _store(pool: torch.Tensor, at: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
    if pool.dtype == checks.E4M3:
        wide = (rows.float() / scale).clamp(-checks.E4M3_LARGEST, checks.E4M3_LARGEST)
        # Indexed as bytes: torch has no index_put for float8 on every device.
        pool.view(torch.uint8)[at] = wide.to(checks.E4M3).view(torch.uint8)
    else:
        pool[at] = rows
