"""Model families: how each architecture's config.json maps to a ModelSpec.

A family is a factory `(config) -> ModelSpec` registered under its architecture name, and is written once:
GGUF metadata is first turned into the same configuration keys. Values that change the mathematics and are
not implemented are refused here by name, so no model runs wrongly in silence. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from branchline.engine.errors import LoadError
from branchline.engine.model.spec import Experts, ModelSpec, RopeScaling
from branchline.registry import models

Config = Mapping[str, Any]


def refuse(name: str, value: object, remedy: str) -> LoadError:
    """The error for a configuration value that cannot be honoured."""
    return LoadError(f"config value {name}={value!r} is not supported: {remedy}", field=f"model.{name}")


def integer(config: Config, name: str, default: int | None = None) -> int:
    """A positive integer of the configuration; LoadError if absent without default, or of another kind."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"config value {name} must be a positive integer, not {value!r}", field=f"model.{name}")
    return value


def number(config: Config, name: str, default: float) -> float:
    """A positive finite number of the configuration."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise LoadError(f"config value {name} must be a positive number, not {value!r}", field=f"model.{name}")
    return float(value)


def rope(config: Config) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise refuse("rope_scaling", scaling, "it must be an object")
    theta = number(scaling, "rope_theta", number(config, "rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=number(scaling, "factor", 1.0))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=number(scaling, "factor", 8.0),
            low_freq_factor=number(scaling, "low_freq_factor", 1.0),
            high_freq_factor=number(scaling, "high_freq_factor", 4.0),
            original_context=integer(scaling, "original_max_position_embeddings", 8192),
        )
    if kind == "factors":
        return theta, RopeScaling("factors", factors=tuple(float(one) for one in scaling["factors"]))
    raise refuse("rope_scaling.rope_type", kind, "use a model with default, linear or llama3 scaling")


def _check_common(config: Config) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise refuse("hidden_act", activation, "only silu is implemented")
    if config.get("mlp_bias"):
        raise refuse("mlp_bias", True, "biases in the MLP are not implemented")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise refuse("quantization_config.quant_method", method, "use the unquantised checkpoint or a GGUF file")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise refuse(
            "partial_rotary_factor", config["partial_rotary_factor"], "rotation of part of a head is not implemented"
        )


def decoder(config: Config, architecture: str, **features: Any) -> ModelSpec:
    """The spec shared by all families here; `features` override what a family adds or leaves out."""
    _check_common(config)
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", heads)
    head_dim = integer(config, "head_dim", max(hidden // heads, 1))
    if heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"it must divide num_attention_heads, which is {heads}")
    if head_dim % 2:
        raise refuse("head_dim", head_dim, "it must be even, rotary positions turn pairs")
    theta, scaling = rope(config)
    if scaling is not None and scaling.factors and len(scaling.factors) != head_dim // 2:
        raise refuse("rope factors", len(scaling.factors), f"{head_dim // 2} are needed")
    values: dict[str, Any] = {
        "architecture": architecture,
        "hidden": hidden,
        "layers": integer(config, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate": integer(config, "intermediate_size"),
        "vocab_size": integer(config, "vocab_size"),
        "context_length": integer(config, "max_position_embeddings", 2048),
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied_head": bool(config.get("tie_word_embeddings", False)),
    }
    return ModelSpec(**{**values, **features})


@models.register("LlamaForCausalLM", api_version=1)
def llama(config: Config) -> ModelSpec:
    """Llama 1 to 3 and the many models of their shape."""
    bias = bool(config.get("attention_bias"))
    return decoder(config, "LlamaForCausalLM", qkv_bias=bias, output_bias=bias)


@models.register("MistralForCausalLM", api_version=1)
def mistral(config: Config) -> ModelSpec:
    """Llama's shape with an optional sliding window in every layer."""
    window = config.get("sliding_window", 4096)  # absent means the family's default, null means none
    return decoder(
        config,
        "MistralForCausalLM",
        sliding_window=None if window is None else integer(config, "sliding_window", 4096),
    )


def _refuse_mixed_window(config: Config) -> None:
    """Qwen can put a window on some layers only; that needs a per-layer cache and is refused if it would matter."""
    window = config.get("sliding_window")
    if config.get("use_sliding_window") and window and window < config.get("max_position_embeddings", 0):
        raise refuse("use_sliding_window", True, "a window on some layers only is not implemented; set it to false")


@models.register("Qwen2ForCausalLM", api_version=1)
def qwen2(config: Config) -> ModelSpec:
    """Qwen 2 and 2.5: biases on query, key and value."""
    _refuse_mixed_window(config)
    return decoder(config, "Qwen2ForCausalLM", qkv_bias=True)


@models.register("Qwen3ForCausalLM", api_version=1)
def qwen3(config: Config) -> ModelSpec:
    """Qwen 3 dense: every query and key head is normalised before rotation."""
    _refuse_mixed_window(config)
    bias = bool(config.get("attention_bias"))
    head_dim = integer(config, "head_dim", 128)
    return decoder(config, "Qwen3ForCausalLM", qk_norm=True, qkv_bias=bias, output_bias=bias, head_dim=head_dim)


@models.register("Qwen3MoeForCausalLM", api_version=1)
def qwen3_moe(config: Config) -> ModelSpec:
    """Qwen 3 with experts: some of many small MLPs a token, in all layers but those that the config names."""
    _refuse_mixed_window(config)
    bias = bool(config.get("attention_bias"))
    return decoder(
        config,
        "Qwen3MoeForCausalLM",
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        experts=_experts(config, integer(config, "num_hidden_layers")),
    )


def _experts(config: Config, layers: int) -> Experts:
    newer = "num_local_experts" if "num_experts" not in config and "num_local_experts" in config else "num_experts"
    count, chosen = integer(config, newer), integer(config, "num_experts_per_tok")
    if chosen > count:
        raise refuse("num_experts_per_tok", chosen, f"there are {count} experts")
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(one, int) and 0 <= one < layers for one in named):
        raise refuse("mlp_only_layers", named, f"it must list layers below {layers}")
    step = integer(config, "decoder_sparse_step", 1)
    return Experts(
        count=count,
        chosen=chosen,
        intermediate=integer(config, "moe_intermediate_size"),
        normalise=bool(config.get("norm_topk_prob", False)),
        dense=frozenset(one for one in range(layers) if one in named or (one + 1) % step),
    )
