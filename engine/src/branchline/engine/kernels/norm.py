"""RMSNorm, alone and fused with the residual sum: the oracles, and the choice of a form.

See `branchline.engine.kernels` for shapes. Called twice a layer.
"""

from __future__ import annotations

import torch

from branchline.engine.kernels import checks


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, [rows, width] in the dtype of `x`."""
    _check(x, weight)
    result = checks.result_like(out, x, *x.shape)
    if not checks.on_triton(x):
        return result.copy_(rms_norm_reference(x, weight, eps))
    from branchline.engine.kernels.compiled import norm

    return norm.rms_norm(x, None, weight, eps, result)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds `x` to `residual` in place and returns the norm of the sum, [rows, width] in the dtype of `x`."""
    _check(x, weight)
    checks.shaped("residual", residual, *x.shape)
    checks.dense_rows("residual", residual)
    if residual.dtype != x.dtype:
        raise ValueError(f"residual has dtype {residual.dtype}; use that of x, {x.dtype}")
    result = checks.result_like(out, x, *x.shape)
    if not checks.on_triton(x):
        return result.copy_(add_rms_norm_reference(x, residual, weight, eps))
    from branchline.engine.kernels.compiled import norm

    return norm.rms_norm(x, residual, weight, eps, result)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The oracle. Statistics are float32; the normed value is rounded to x's dtype before the weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The oracle: the sum is rounded to x's dtype before its norm is taken."""
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    checks.shaped("x", x, None, None)
    checks.float_kind("x", x)
    checks.dense_rows("x", x)
    checks.shaped("weight", weight, x.shape[1])
    if weight.dtype != x.dtype:
        raise ValueError(f"weight has dtype {weight.dtype}; use that of x, {x.dtype}")
