"""Quantisation methods by name: how a checkpoint's weights are read, held and multiplied.

Importing this package registers the built-in ones, imported when asked for. Imports no torch.
"""

from __future__ import annotations

from branchline.engine.quantization.base import QuantizationMethod, choose
from branchline.registry import quantization_methods

__all__ = ["QuantizationMethod", "choose"]

for _name, _target in (
    ("gguf", "stored:GgufWeights"),
    ("int8_weight_only", "online:Int8WeightOnly"),
    ("int8_dynamic", "online:Int8Dynamic"),
    ("fp8", "online:Fp8"),
    ("awq", "packed:Awq"),
    ("gptq", "packed:Gptq"),
):
    quantization_methods.register_lazy(_name, f"branchline.engine.quantization.{_target}", api_version=1)
