"""Matrix products whose bits do not depend on company, and products with float8 weights: oracles and choice of a form.

See `branchline.engine.kernels` for shapes. Where neither is asked for, torch's own product is used, not these.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from branchline.engine.kernels import checks


def linear_invariant(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, in] times weight [out, in] plus bias, [T, out] in the dtype of `x`; a row's bits depend on it alone."""
    _check(x, weight, bias)
    if weight.dtype != x.dtype:
        raise ValueError(f"weight has dtype {weight.dtype}; use that of x, {x.dtype}")
    result = checks.result_like(out, x, x.shape[0], weight.shape[0])
    if not checks.on_triton(x):
        return result.copy_(linear_invariant_reference(x, weight, bias))
    from branchline.engine.kernels.compiled import linear as compiled

    return compiled.multiply(x, weight, None, bias, result, invariant=True)


def quantize_e4m3(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 weights [out, in] and float32 scales [out]: weight ~ float8 * scale, each row's largest at 448."""
    checks.shaped("weight", weight, None, None)
    checks.float_kind("weight", weight)
    scales = (weight.abs().amax(dim=1).float() / checks.E4M3_LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    held = torch.empty(weight.shape, dtype=checks.E4M3, device=weight.device)
    step = max(1, (1 << 24) // max(1, weight.shape[1]))  # bounds the float32 copy
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        held[rows] = (weight[rows].float() / scales[rows, None]).clamp(-448.0, 448.0).to(checks.E4M3)
    return held, scales


def linear_e4m3(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, in] times float8 weight [out, in] times scales [out] plus bias, [T, out] in the dtype of `x`."""
    _check(x, weight, bias)
    checks.shaped("scales", scales, weight.shape[0])
    if weight.dtype != checks.E4M3 or scales.dtype != torch.float32:
        raise ValueError(f"weight is {weight.dtype}, scales {scales.dtype}; use {checks.E4M3} and torch.float32")
    result = checks.result_like(out, x, x.shape[0], weight.shape[0])
    if not checks.on_triton(x):
        return result.copy_(linear_e4m3_reference(x, weight, scales, bias))
    from branchline.engine.kernels.compiled import linear as compiled

    return compiled.multiply(x, weight, scales, bias, result, invariant=invariant)


def linear_invariant_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The oracle of values, in float32. On a CPU each row is a product of its own, so its bits are invariant too."""
    wide, matrix = x.float(), weight.float().t()
    rows = [row[None] @ matrix for row in wide]
    product = torch.cat(rows) if rows else wide @ matrix
    return (product if bias is None else product + bias.float()).to(x.dtype)


def linear_e4m3_reference(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The oracle, in float32."""
    product = linear(x.float(), weight.float()) * scales
    return (product if bias is None else product + bias.float()).to(x.dtype)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    checks.shaped("x", x, None, None)
    checks.float_kind("x", x)
    checks.shaped("weight", weight, None, x.shape[1])
    checks.dense_rows("x", x)
    checks.dense_rows("weight", weight)
    if bias is not None:
        checks.shaped("bias", bias, weight.shape[0])
