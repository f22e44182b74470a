"""Methods that quantise an unquantised checkpoint while it is loaded: int8 and fp8, a scale an output row.

`int8_weight_only` multiplies in the activations' dtype; `int8_dynamic` also rounds each row of activations to
int8 and multiplies integers; `fp8` holds e4m3. The embedding and the norms keep their dtype. Imports torch.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import linear

from branchline.engine.model.source import LoadedModel
from branchline.engine.quantization.base import Matrix

INT8 = 127.0
FP8 = 448.0  # largest e4m3
TINY = 1e-12
MIN_INT_ROWS = 17  # torch's integer product wants more than 16 rows on cuda


def _rows(weight: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 rows scaled so that the largest value of each is `top`, and the scales [out] that undo it."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1).clamp_(min=TINY).div_(top)
    return wide.div_(scales[:, None]) if wide is not weight else wide / scales[:, None], scales


class Held:
    """Codes [out, in] and float32 scales [out]."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes = codes
        self.scales = scales
        self.shape = (codes.shape[0], codes.shape[1])

    def nbytes(self) -> int:
        """Bytes held."""
        return self.codes.nbytes + self.scales.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply by the codes in the dtype of x, then scale."""
        product = linear(x, self.codes.to(x.dtype)) * self.scales.to(x.dtype)
        return product if bias is None else product + bias


class _DynamicInt8(Held):
    """Integer products: each row of activations is rounded to int8 by its own largest value."""

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See Matrix."""
        flat = x.reshape(-1, x.shape[-1])
        wide = flat.float()
        scales = wide.abs().amax(dim=1, keepdim=True).clamp_(min=TINY).div_(INT8)
        codes = wide.div(scales).round_().to(torch.int8)
        rows = codes.shape[0]
        if rows < MIN_INT_ROWS:
            codes = torch.cat((codes, codes.new_zeros(MIN_INT_ROWS - rows, codes.shape[1])))
        product = torch._int_mm(codes, self.codes.t())[:rows].float()
        result = product.mul_(scales).mul_(self.scales).to(x.dtype).reshape(*x.shape[:-1], -1)
        return result if bias is None else result + bias


class _Online:
    """What the methods here share: nothing about the checkpoint changes."""

    api_version = 1
    name: ClassVar[str]
    executors: tuple[str, ...] = ("torch", "torch-cuda")
    native_dtype: str = ""
    of_checkpoint = False

    def open(self, model: LoadedModel) -> LoadedModel:
        """The model itself."""
        return model


class Int8WeightOnly(_Online):
    """QuantizationMethod: int8 codes, products in the activations' dtype. Torch only."""

    name = "int8_weight_only"

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """See QuantizationMethod."""
        scaled, scales = _rows(weight, INT8)
        return Held(scaled.round_().to(torch.int8), scales)


class Int8Dynamic(_Online):
    """QuantizationMethod: int8 weights and activations. Native (its own kernels) and torch."""

    name = "int8_dynamic"
    executors = ("native", "torch", "torch-cuda")
    native_dtype = "int8"

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """See QuantizationMethod."""
        scaled, scales = _rows(weight, INT8)
        return _DynamicInt8(scaled.round_().to(torch.int8), scales)


class Fp8(_Online):
    """QuantizationMethod: e4m3 weights, products in the activations' dtype. Torch only."""

    name = "fp8"

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """See QuantizationMethod."""
        scaled, scales = _rows(weight, FP8)
        return Held(scaled.to(torch.float8_e4m3fn), scales)
