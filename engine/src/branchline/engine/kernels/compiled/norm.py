"""RMSNorm in Triton. One program makes one row in one block: bits never depend on other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from branchline.engine.kernels.compiled.launch import block


@triton.jit
def norm_row(
    x, residual, weight, out, x_row, residual_row, width, eps, BLOCK: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    """(row): the norm of x, or of x + residual, which is then stored over residual."""
    row = tl.program_id(0).to(tl.int64)
    inside = tl.arange(0, BLOCK)
    real = inside < width
    kind = out.dtype.element_ty
    wide = tl.load(x + row * x_row + inside, mask=real, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_row + inside
        summed = (wide + tl.load(place, mask=real, other=0.0).to(tl.float32)).to(kind)
        tl.store(place, summed, mask=real)
        wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(kind).to(tl.float32)
    normed = normed * tl.load(weight + inside, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * width + inside, normed.to(kind), mask=real)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> torch.Tensor:
    """Fill `out` [rows, width]; arguments are checked."""
    rows, width = x.shape
    if not rows:
        return out
    beside = x if residual is None else residual
    size = block(width)
    norm_row[(rows,)](
        x, beside, weight, out, x.stride(0), beside.stride(0), width, eps,
        BLOCK=size, ADD=residual is not None, num_warps=max(1, min(16, size // 256)), enable_fp_fusion=True,
    )  # fmt: skip
    return out
