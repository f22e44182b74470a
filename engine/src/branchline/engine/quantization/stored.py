"""`gguf`: weights in the block formats of a GGUF file, which the native executor multiplies as they are.

The torch executor dequantises them while loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from branchline.engine.model.source import LoadedModel
from branchline.engine.quantization.base import Matrix

if TYPE_CHECKING:
    import torch


class GgufWeights:
    """QuantizationMethod of GGUF files: nothing is changed."""

    api_version = 1
    name = "gguf"
    executors = ("native", "torch", "torch-cuda")
    native_dtype = ""
    of_checkpoint = True

    def open(self, model: LoadedModel) -> LoadedModel:
        """The model itself: its reader knows the formats."""
        return model

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """Kept as dequantised."""
        return None
