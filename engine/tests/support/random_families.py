"""Tiny random checkpoints of every family, made and saved by transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TOKENIZER = '{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"added_tokens":[]}'
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama3() -> PreTrainedModel:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=scaling, tie_word_embeddings=True))


def _linear() -> PreTrainedModel:
    scaling = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=scaling, attention_bias=True))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, use_sliding_window=False))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, use_sliding_window=False))


def _experts(**changes: Any) -> PreTrainedModel:
    shape = {"head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    config = Qwen3MoeConfig(**SHAPE, **shape, use_sliding_window=False, **changes)
    return Qwen3MoeForCausalLM(config)


def _mixed_experts() -> PreTrainedModel:
    return _experts(norm_topk_prob=True, mlp_only_layers=[1], tie_word_embeddings=True)


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, head_dim=8, sliding_window=None))


def _windowed() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=10))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama with llama3 scaling and a tied head": _llama3,
    "llama with linear scaling and biases": _linear,
    "qwen2": _qwen2,
    "qwen3 with its own head_dim": _qwen3,
    "qwen3 with experts": _experts,
    "qwen3 with experts in some layers": _mixed_experts,
    "mistral": _mistral,
    "mistral with a sliding window": _windowed,
}


def save(name: str, folder: Path) -> PreTrainedModel:
    """transformers' model of a family with random weights, saved to `folder`."""
    torch.manual_seed(7)
    theirs = FAMILIES[name]().float().eval()
    with torch.no_grad():
        for label, weight in theirs.named_parameters():
            # transformers starts norms at one and biases at zero; both must matter here.
            weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if "norm" in label else 0.0))
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(TOKENIZER)
    return theirs
