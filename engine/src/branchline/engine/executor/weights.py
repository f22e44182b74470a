"""Weights in the layout the decoder runs on: fused projections, one tensor shared by a tied head.

Owns conversion from a TensorSource (names, shapes, dtype, device), tensor by tensor, so that the peak is the
model plus one tensor. Refuses missing and misshapen tensors by name before any arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import linear

from branchline.engine.errors import LoadError
from branchline.engine.model.source import LoadedModel
from branchline.engine.quantization.base import Matrix, QuantizationMethod

Weight: TypeAlias = torch.Tensor | Matrix


def project(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] through a linear weight of either form."""
    return linear(x, weight, bias) if isinstance(weight, torch.Tensor) else weight.linear(x, bias)


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP."""

    gate_up: Weight  # [2 intermediate, hidden], gate first
    down: Weight  # [hidden, intermediate]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Matrices are [out, in] as torch.nn.functional.linear wants them, or held by a quantisation method."""

    input_norm: torch.Tensor  # [hidden]
    qkv: Weight  # [query + 2 kv, hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim]
    key_norm: torch.Tensor | None  # [head_dim]
    output: Weight  # [hidden, query]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    router: torch.Tensor | None  # [experts, hidden]; None where the layer has one MLP
    mlps: tuple[MlpWeights, ...]  # the experts, or that one


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights. `head` is `embedding` itself when tied."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden]
    head: Weight  # [vocab, hidden]


class _Reader:
    """Reads, checks and converts; counts bytes for the progress callback."""

    def __init__(
        self, model: LoadedModel, device: torch.device, dtype: torch.dtype, method: QuantizationMethod | None
    ) -> None:
        self.model = model
        self.method = method
        self.device = device
        self.dtype = dtype
        self.present = model.tensors.names()
        self.total = len(self.present)
        self.done = 0

    def stack(self, names: Sequence[str], rows: Sequence[int], *tail: int) -> torch.Tensor:
        """Tensors of `rows[i]` rows each under one another, in the executor's dtype and device."""
        result = torch.empty((sum(rows), *tail), dtype=self.dtype, device=self.device)
        start = 0
        for name, count in zip(names, rows, strict=True):
            self._check(name, (count, *tail))
            result[start : start + count].copy_(self.model.tensors.read(name))
            start += count
            self.done += 1
            self.model.progress("converting weights", self.done, self.total)
        return result

    def held(self, weight: torch.Tensor) -> Weight:
        """The matrix as the quantisation method keeps it."""
        made = None if self.method is None else self.method.matrix(weight)
        return weight if made is None else made

    def one(self, name: str, *shape: int) -> torch.Tensor:
        """A single tensor of exactly this shape."""
        return self.stack([name], [shape[0]], *shape[1:])

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.present:
            raise LoadError(
                f"tensor {name} is missing from {self.model.path}: the checkpoint is incomplete", field="model"
            )
        found = tuple(self.model.tensors.shape(name))
        if found != shape:
            raise LoadError(
                f"tensor {name} has shape {list(found)}, the configuration asks for {list(shape)}", field="model"
            )


def load_weights(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, method: QuantizationMethod | None = None
) -> DecoderWeights:
    """Convert every weight. Raises LoadError naming the first tensor that is missing or has a wrong shape."""
    spec, reader = model.spec, _Reader(model, device, dtype, method)
    embedding = reader.one("model.embed_tokens.weight", spec.vocab_size, spec.hidden)
    layers = tuple(_layer(reader, number) for number in range(spec.layers))
    norm = reader.one("model.norm.weight", spec.hidden)
    head: Weight = embedding
    if not spec.tied_head:
        head = reader.held(reader.one("lm_head.weight", spec.vocab_size, spec.hidden))
    return DecoderWeights(embedding, layers, norm, head)


def _layer(reader: _Reader, number: int) -> LayerWeights:
    spec = reader.model.spec
    at = f"model.layers.{number}"
    attention = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
    rows = (spec.query_size, spec.kv_size, spec.kv_size)
    experts = spec.experts if spec.experts is not None and number not in spec.experts.dense else None
    router = None
    if experts is None:
        mlps: tuple[MlpWeights, ...] = (_mlp(reader, f"{at}.mlp", spec.intermediate),)
    else:
        router = reader.one(f"{at}.mlp.gate.weight", experts.count, spec.hidden)
        mlps = tuple(_mlp(reader, f"{at}.mlp.experts.{one}", experts.intermediate) for one in range(experts.count))
    return LayerWeights(
        input_norm=reader.one(f"{at}.input_layernorm.weight", spec.hidden),
        qkv=reader.held(reader.stack([f"{name}.weight" for name in attention], rows, spec.hidden)),
        qkv_bias=reader.stack([f"{name}.bias" for name in attention], rows) if spec.qkv_bias else None,
        query_norm=reader.one(f"{at}.self_attn.q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        key_norm=reader.one(f"{at}.self_attn.k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        output=reader.held(reader.one(f"{at}.self_attn.o_proj.weight", spec.hidden, spec.query_size)),
        output_bias=reader.one(f"{at}.self_attn.o_proj.bias", spec.hidden) if spec.output_bias else None,
        mlp_norm=reader.one(f"{at}.post_attention_layernorm.weight", spec.hidden),
        router=router,
        mlps=mlps,
    )


def _mlp(reader: _Reader, at: str, intermediate: int) -> MlpWeights:
    hidden = reader.model.spec.hidden
    names = [f"{at}.{part}_proj.weight" for part in ("gate", "up")]
    return MlpWeights(
        gate_up=reader.held(reader.stack(names, (intermediate, intermediate), hidden)),
        down=reader.held(reader.one(f"{at}.down_proj.weight", hidden, intermediate)),
    )
