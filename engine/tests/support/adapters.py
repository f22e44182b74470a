"""A tiny random Llama, adapters for it as PEFT saves them, and the checkpoint that merging one by hand gives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 32, 2, 4, 2, 64  # those of tests/e2e/tiny.py too
SIZES = {
    "q_proj": ("self_attn", HIDDEN, HIDDEN),
    "k_proj": ("self_attn", HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "v_proj": ("self_attn", HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "o_proj": ("self_attn", HIDDEN, HIDDEN),
    "gate_proj": ("mlp", INNER, HIDDEN),
    "up_proj": ("mlp", INNER, HIDDEN),
    "down_proj": ("mlp", HIDDEN, INNER),
}


def _normal(draw: np.random.Generator, scale: float, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (draw.standard_normal(shape) * scale).astype(np.float32)


def save_llama(folder: Path, tokenizer: bytes, vocab: int, eos: int, *, seed: int = 3) -> Path:
    """A base model with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(tokenizer)
    draw = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": _normal(draw, 0.5, vocab, HIDDEN)}
    for layer in range(LAYERS):
        for name, (block, out, width) in SIZES.items():
            tensors[f"model.layers.{layer}.{block}.{name}.weight"] = _normal(draw, 0.25, out, width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + _normal(draw, 0.1, HIDDEN)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_adapter(
    folder: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: Iterable[str] = tuple(SIZES),
    seed: int = 11,
    ranks: dict[str, int] | None = None,
    **config: Any,
) -> Path:
    """An adapter whose effect is large; `ranks` are those of projections that differ, `config` further settings."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = list(targets)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "lora_dropout": 0.05,
        "rank_pattern": ranks or {},
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    draw = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name in targets:
            block, out, width = SIZES[name]
            own = (ranks or {}).get(name, rank)
            at = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{at}.lora_A.weight"] = _normal(draw, 0.3, own, width)
            tensors[f"{at}.lora_B.weight"] = _normal(draw, 0.3, out, own)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """The base with an adapter's products added to its weights: what the adapter must be equal to."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in base.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, parts = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in parts.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        short = module.rpartition(".")[2]
        alpha = (config.get("alpha_pattern") or {}).get(short, config["lora_alpha"])
        rank = down.shape[0]
        scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        weights[f"{module}.weight"] += np.float32(scaling) * (parts[name.replace("lora_A", "lora_B")] @ down)
    save_file(weights, folder / "model.safetensors")
    return folder
