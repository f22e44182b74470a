"""The spec of an architecture that no family of ours describes, for the executor `transformers`.

Only the facts that every causal model's config has under one of a few names. Imports transformers, and only to ask
whether it knows the architecture.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from branchline.engine.errors import LoadError
from branchline.engine.model.spec import ModelSpec
from branchline.registry import models

_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
}
_LENGTH = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
DEFAULT_LENGTH = 2048


def family(architecture: str, refusal: str) -> Callable[[dict[str, Any]], ModelSpec]:
    """What reads the config. Raises LoadError with `refusal` if nothing here can run the architecture."""
    registered = any(entry.name == architecture for entry in models.entries())  # and can't be imported
    if registered or not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise LoadError(refusal, field="model.architecture")
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        raise LoadError(
            f"{refusal}; if the package transformers has it, it runs slowly after pip install "
            "'branchline[transformers]'",
            field="model.architecture",
        )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if architecture not in set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise LoadError(f"{refusal}; the package transformers does not have it either", field="model.architecture")
    return lambda config: _spec(architecture, config)


def _spec(architecture: str, config: dict[str, Any]) -> ModelSpec:
    found = {name: _integer(config, keys, architecture) for name, keys in _NAMES.items()}
    hidden, heads = found["hidden"], found["heads"]
    lengths = [config[key] for key in _LENGTH if isinstance(config.get(key), int) and config[key] > 0]
    return ModelSpec(
        architecture=architecture,
        hidden=hidden,
        layers=found["layers"],
        heads=heads,
        kv_heads=heads,
        head_dim=max(hidden // heads, 1),
        intermediate=4 * hidden,
        vocab_size=found["vocab_size"],
        context_length=lengths[0] if lengths else DEFAULT_LENGTH,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        fallback=True,
    )


def _integer(config: dict[str, Any], keys: tuple[str, ...], architecture: str) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise LoadError(
        f"config.json of {architecture} has none of {', '.join(keys)}, or not as a positive integer: the executor "
        "transformers needs it",
        field=f"model.{keys[0]}",
    )
