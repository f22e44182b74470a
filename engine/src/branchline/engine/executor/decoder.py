"""The forward pass of a dense decoder over a paged KV pool, on torch.

Owns weights, rotary table and pool; knows nothing of sampling, requests or scheduling. Called by the
executor under inference mode.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear, silu, softmax

from branchline.engine.attention.base import AttentionBackend
from branchline.engine.executor.lora import LoraBank, Share, adapt
from branchline.engine.executor.rope import RotaryTable
from branchline.engine.executor.weights import DecoderWeights, LayerWeights, MlpWeights, project
from branchline.engine.model.spec import ModelSpec
from branchline.engine.types import ForwardBatch


class Decoder:
    """Runs batches. The pool is [layers, 2, slots, kv_heads, head_dim] with slot = page * page_size + offset."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, attention: AttentionBackend, slots: int) -> None:
        self._spec = spec
        self.weights = weights
        self._attention = attention
        self._device = weights.embedding.device
        dtype = weights.embedding.dtype
        self._rotary = RotaryTable(spec, self._device, dtype)
        # Not cleared: attention reads no slot that was not written, and untouched memory costs nothing.
        shape = (spec.layers, 2, slots, spec.kv_heads, spec.head_dim)
        self.pool = torch.empty(shape, dtype=dtype, device=self._device)
        self.adapters = LoraBank(spec, self._device, dtype)
        self.hidden: torch.Tensor | None = None  # normed states of the latest logits rows
        self._layers = [(number, layer, *self.pool[number]) for number, layer in enumerate(weights.layers)]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits float32 [R, vocab] of `batch.logit_rows`; writes keys and values of all T new tokens."""
        plan = self._attention.plan(batch)
        slots = self._index(batch.slots)
        cos, sin = self._rotary.at(self._index(batch.positions), int(batch.positions.max()))
        shares = self.adapters.shares(batch)
        hidden = embedding(self._index(batch.token_ids), self.weights.embedding)
        for number, layer, keys, values in self._layers:
            own = _Own(number, shares)
            normed = self._norm(hidden, layer.input_norm)
            hidden = hidden + self._attend(layer, own, normed, keys, values, slots, cos, sin, plan)
            hidden = hidden + self._mlp(layer, own, self._norm(hidden, layer.mlp_norm))
        if len(batch.logit_rows) != len(batch.token_ids):
            hidden = hidden.index_select(0, self._index(batch.logit_rows))
        self.hidden = self._norm(hidden, self.weights.norm)
        return project(self.hidden, self.weights.head).float()

    def _index(self, values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension; the statistics are float32 whatever the dtype."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self._spec.norm_eps))
        return (wide * scale).to(hidden.dtype) * weight

    def _attend(
        self,
        layer: LayerWeights,
        own: _Own,
        hidden: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: object,
    ) -> torch.Tensor:
        spec = self._spec
        projected = own(project(hidden, layer.qkv, layer.qkv_bias), hidden, "qkv")
        projected = projected.view(hidden.shape[0], -1, spec.head_dim)
        turning = spec.heads + spec.kv_heads
        heads = projected[:, :turning]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = self._norm(heads[:, : spec.heads], layer.query_norm)
            heads = torch.cat((query, self._norm(heads[:, spec.heads :], layer.key_norm)), dim=1)
        heads = self._rotary.rotate(heads, cos, sin)
        keys.index_copy_(0, slots, heads[:, spec.heads :])
        values.index_copy_(0, slots, projected[:, turning:])
        query = heads[:, : spec.heads].contiguous()
        mixed = self._attention.attend(plan, query, keys, values)
        return own(project(mixed, layer.output, layer.output_bias), mixed, "output")

    def _mlp(self, layer: LayerWeights, own: _Own, hidden: torch.Tensor) -> torch.Tensor:
        if layer.router is None:
            return _gated(layer.mlps[0], hidden, own)
        experts = self._spec.experts
        assert experts is not None, "a router is read only where there are experts"
        weights = softmax(linear(hidden, layer.router).float(), dim=-1)
        weights, chosen = torch.topk(weights, experts.chosen, dim=-1)
        if experts.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(hidden.dtype)
        out = torch.zeros_like(hidden)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            part = _gated(layer.mlps[number], hidden[rows], _NONE) * weights[rows, places, None]
            out.index_add_(0, rows, part)
        return out


class _Own:
    """What the adapters of a step add in one layer."""

    __slots__ = ("_layer", "_shares")

    def __init__(self, layer: int, shares: tuple[Share, ...]) -> None:
        self._layer = layer
        self._shares = shares

    def __call__(self, out: torch.Tensor, x: torch.Tensor, projection: str) -> torch.Tensor:
        """`out` [T, out], made of `x` [T, in] by a projection, with their parts."""
        return adapt(out, x, self._shares, self._layer, projection) if self._shares else out


_NONE = _Own(0, ())  # experts have no adapters


def _gated(mlp: MlpWeights, hidden: torch.Tensor, own: _Own) -> torch.Tensor:
    gate, up = own(project(hidden, mlp.gate_up), hidden, "gate_up").chunk(2, dim=-1)
    inner = silu(gate).mul_(up)
    return own(project(inner, mlp.down), inner, "down")
