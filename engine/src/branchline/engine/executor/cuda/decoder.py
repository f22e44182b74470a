"""The forward pass of `torch-cuda`: queues a step's work and never waits for the device, so that it can be captured.

Owns weights, rotary table and pool. The last page of the pool belongs to nobody: padded rows live there. Works on one
rank's share of the heads and of each MLP; `group` adds the shares up. Called by the engine under inference mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, softmax

from branchline.engine.attention.base import AttentionBackend
from branchline.engine.executor.cuda.group import Group
from branchline.engine.executor.cuda.ops import Ops, gate
from branchline.engine.executor.cuda.step import StepInputs
from branchline.engine.executor.rope import RotaryTable
from branchline.engine.executor.weights import DecoderWeights, LayerWeights
from branchline.engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Output:
    """What a step leaves behind, valid until the next one on the same memory."""

    logits: torch.Tensor  # float32 [R, vocab]
    hidden: torch.Tensor  # [R, hidden] normed last states


class PagedDecoder:
    """Runs steps. `spec` is this rank's share; the pool is [layers, 2, slots + page_size, kv_heads, head_dim]."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        attention: AttentionBackend,
        ops: Ops,
        group: Group,
        *,
        slots: int,
        page_size: int,
        pool_dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self._attention = attention
        self._ops = ops
        self._group = group
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self._table = RotaryTable(spec, device, dtype).whole()
        shape = (spec.layers, 2, slots + page_size, spec.kv_heads, spec.head_dim)
        # Not cleared: attention reads no slot that was not written, and untouched memory costs nothing.
        self.pool = torch.empty(shape, dtype=pool_dtype, device=device)
        self.pool[:, :, slots:].zero_()
        self._layers = [(layer, *self.pool[number]) for number, layer in enumerate(weights.layers)]

    @property
    def can_be_captured(self) -> bool:
        """Whether a step of it never looks at values on the host: the choice of experts does."""
        return self.spec.experts is None

    def forward(self, inputs: StepInputs, tokens: torch.Tensor, plan: object) -> Output:
        """Queue a step. `tokens` int64 are those chosen by the plans of the step before, on the device."""
        ops, weights = self._ops, self.weights
        ids = torch.where(inputs.source < 0, inputs.ids, tokens.index_select(0, inputs.source.clamp(min=0)))
        residual = embedding(ids, weights.embedding)
        normed = ops.norm(residual, weights.layers[0].input_norm)
        following = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        for (layer, keys, values), norm in zip(self._layers, following, strict=True):
            attended = self._group.add_up(self._attend(layer, normed, keys, values, inputs, plan))
            normed = ops.add_norm(attended, residual, layer.mlp_norm)
            normed = ops.add_norm(self._group.add_up(self._mlp(layer, normed)), residual, norm)
        if inputs.rows is not None:
            normed = normed.index_select(0, inputs.rows)
        logits = self._group.join(ops.linear(normed, weights.head), self.spec.vocab_size)
        return Output(logits.float(), normed)

    def _attend(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        inputs: StepInputs,
        plan: object,
    ) -> torch.Tensor:
        projected = self._ops.linear(normed, layer.qkv, layer.qkv_bias)
        queries = self._ops.rope_write(
            projected, self._table, inputs.positions, inputs.slots, (keys, values), (layer.query_norm, layer.key_norm)
        )
        return self._ops.linear(self._attention.attend(plan, queries, keys, values), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        ops = self._ops
        if layer.router is None:
            mlp = layer.mlps[0]
            return ops.linear(gate(ops.linear(normed, mlp.gate_up)), mlp.down)
        experts = self.spec.experts
        assert experts is not None, "a router is read only where there are experts"
        shares = softmax(ops.linear(normed, layer.router).float(), dim=-1)
        shares, chosen = torch.topk(shares, experts.chosen, dim=-1)
        if experts.normalise:
            shares = shares / shares.sum(-1, keepdim=True)
        shares = shares.to(normed.dtype)
        result = torch.zeros_like(normed)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            mlp = layer.mlps[number]
            part = ops.linear(gate(ops.linear(normed[rows], mlp.gate_up)), mlp.down)
            result.index_add_(0, rows, part * shares[rows, places, None])
        return result
