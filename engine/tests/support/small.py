"""A random model of a few thousand weights, without a checkpoint: what the torch executors are compared on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from branchline.engine.model.source import LoadedModel, StoredTensor
from branchline.engine.model.spec import Experts, ModelSpec
from harness import tokenizer_json
from safetensors.torch import save_file
from tiny import VOCAB

SPEC = ModelSpec(
    "Qwen3ForCausalLM", hidden=48, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=64, vocab_size=VOCAB,
    context_length=256, norm_eps=1e-6, rope_theta=10000.0, qk_norm=True, qkv_bias=True, output_bias=True,
)  # fmt: skip
WINDOW = dataclasses.replace(SPEC, sliding_window=20, qk_norm=False)
EXPERTS = dataclasses.replace(SPEC, experts=Experts(count=5, chosen=2, intermediate=24, normalise=True), tied_head=True)


class RandomTensors:
    """TensorSource: the same name gives the same numbers, whoever asks."""

    def __init__(self, spec: ModelSpec) -> None:
        wide, inner = spec.hidden, spec.intermediate
        layer = {
            "input_layernorm.weight": (wide,), "post_attention_layernorm.weight": (wide,),
            "self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,),
            "self_attn.o_proj.weight": (wide, spec.query_size), "self_attn.o_proj.bias": (wide,),
        }  # fmt: skip
        for part, rows in (("q", spec.query_size), ("k", spec.kv_size), ("v", spec.kv_size)):
            layer |= {f"self_attn.{part}_proj.weight": (rows, wide), f"self_attn.{part}_proj.bias": (rows,)}
        mlps = {"mlp": inner}
        if spec.experts is not None:
            layer["mlp.gate.weight"] = (spec.experts.count, wide)
            mlps = {f"mlp.experts.{one}": spec.experts.intermediate for one in range(spec.experts.count)}
        for name, width in mlps.items():
            layer |= {f"{name}.{part}_proj.weight": (width, wide) for part in ("gate", "up")}
            layer[f"{name}.down_proj.weight"] = (wide, width)
        self._shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (wide,)}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self._shapes[name] = (spec.vocab_size, wide)
        for number in range(spec.layers):
            self._shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}

    def names(self) -> set[str]:
        """All names."""
        return set(self._shapes)

    def in_file_order(self) -> list[str]:
        """Any order."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._shapes[name]

    def read(self, name: str) -> torch.Tensor:
        """Random values; norms are near one."""
        chance = torch.Generator().manual_seed(sum(map(ord, name)))
        values = torch.randn(self._shapes[name], generator=chance) * 0.2
        return values + 1.0 if "norm" in name else values

    def stored(self, name: str) -> StoredTensor:
        """Nothing is stored."""
        raise NotImplementedError(name)


def loaded(spec: ModelSpec = SPEC) -> LoadedModel:
    """A checked model."""
    return LoadedModel("random", Path("random"), spec, RandomTensors(spec), "random", "F32")


def save(folder: Path) -> None:
    """SPEC's model without norms of heads, as a checkpoint folder."""
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": True, "hidden_size": SPEC.hidden,
        "num_hidden_layers": SPEC.layers,
        "num_attention_heads": SPEC.heads, "num_key_value_heads": SPEC.kv_heads, "head_dim": SPEC.head_dim,
        "intermediate_size": SPEC.intermediate, "vocab_size": SPEC.vocab_size, "rms_norm_eps": SPEC.norm_eps,
        "max_position_embeddings": SPEC.context_length, "rope_theta": SPEC.rope_theta, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    tensors = RandomTensors(SPEC)
    kept = [name for name in tensors.names() if not name.endswith(("q_norm.weight", "k_norm.weight"))]
    save_file({name: tensors.read(name) for name in kept}, folder / "model.safetensors")
