"""A GGUF file as a checkpoint: metadata to ModelSpec, tensor names and row orders to canonical ones.

Knows llama.cpp's conventions (key names, tied heads, permuted query and key rows, stored rope factors) and
nothing about executors.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from branchline.engine.errors import LoadError
from branchline.engine.model import tokenizer
from branchline.engine.model.gguf_file import GgufFile
from branchline.engine.model.source import StoredTensor
from branchline.engine.model.spec import ModelSpec, TokenizerFiles
from branchline.registry import RegistryError, models

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PERMUTED = {"llama"}  # converters reorder q and k rows of these for interleaved rotary positions

_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FACTORS = "rope_freqs.weight"


def canonical(name: str) -> str | None:
    """Canonical name of a GGUF tensor; None if it has none."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return None
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def restore_rows(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo the converter's order: hf[h*d + j*d/2 + i] = gguf[h*d + i*2 + j] for j in 0..1."""
    half = rows.shape[0] // heads // 2
    split = rows.reshape(heads, half, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


class GgufTensors:
    """TensorSource over a GGUF file."""

    def __init__(self, file: GgufFile, spec: ModelSpec, permuted: bool) -> None:
        self._file = file
        self._names = {canonical(name): name for name in file.tensors if canonical(name)}
        self._heads = {"self_attn.q_proj": spec.heads, "self_attn.k_proj": spec.kv_heads} if permuted else {}

    def names(self) -> set[str]:
        """Canonical names present."""
        return {name for name in self._names if name is not None}

    def in_file_order(self) -> list[str]:
        """Canonical names by the offset of their bytes."""
        return sorted(self.names(), key=lambda name: self._file.tensors[self._names[name]].offset)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data."""
        return self._file.tensors[self._names[name]].shape

    def stored(self, name: str) -> StoredTensor:
        """The tensor's bytes as the file has them."""
        info = self._file.tensors[self._names[name]]
        heads = next((heads for part, heads in self._heads.items() if part in name), 0)
        return StoredTensor(info.type_name, info.shape, self._file.raw(info.name), heads)

    def read(self, name: str) -> torch.Tensor:
        """Dequantised to float32, rows in the canonical order."""
        import torch

        rows = self._file.read(self._names[name])
        for part, heads in self._heads.items():
            if part in name:
                rows = restore_rows(rows, heads)
        # A mapped F32 tensor is read-only, which torch.from_numpy warns about; a copy is cheap beside dequantising.
        return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


def read_gguf(path: Path) -> tuple[ModelSpec, GgufTensors, str]:
    """Spec, tensors and the commonest tensor type of a GGUF file. Raises LoadError."""
    file = GgufFile(path)
    file.check_types()
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise LoadError(
            f"gguf architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}",
            field="model.architecture",
        )
    stray = sorted(name for name in file.tensors if canonical(name) is None and name != _FACTORS)
    if stray:
        raise LoadError(
            f"gguf tensor {stray[0]} is not known for {arch}: the model needs more than this engine implements",
            field="model",
        )
    config = _config(file, str(arch))
    try:
        family: Any = models.get(config["architectures"][0])
    except RegistryError as error:
        raise LoadError(str(error), field="model.architecture") from error
    spec = dataclasses.replace(family(config), **_vocabulary(file))
    kinds = [info.type_name for info in file.tensors.values()]
    return spec, GgufTensors(file, spec, arch in PERMUTED), max(set(kinds), key=kinds.count)


def _config(file: GgufFile, arch: str) -> dict[str, Any]:
    """The file's metadata under config.json's names, so that families are written once."""
    meta = file.metadata

    def key(name: str) -> Any:
        return meta.get(f"{arch}.{name}")

    tokens = meta.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise LoadError(f"gguf file {file.path} has no tensor token_embd.weight", field="model")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "hidden_size": key("embedding_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "head_dim": key("attention.key_length"),
        "intermediate_size": key("feed_forward_length"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0] if embedding.shape else len(tokens or []),  # type: ignore[arg-type]
        "rope_theta": key("rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }
    if key("attention.sliding_window"):
        if arch != "llama":
            raise LoadError(f"gguf key {arch}.attention.sliding_window is not supported", field="model")
        # Converters write Mistral as llama; only the window tells them apart.
        config.update(architectures=["MistralForCausalLM"], sliding_window=key("attention.sliding_window"))
    if key("expert_count"):
        raise LoadError(
            f"gguf key {arch}.expert_count is not supported: mixtures of experts are not implemented", field="model"
        )
    heads = config["num_attention_heads"]
    width = config["head_dim"] or (config["hidden_size"] // heads if heads else 0)
    rotary = key("rope.dimension_count")
    if rotary not in (None, width):
        raise LoadError(
            f"gguf key {arch}.rope.dimension_count={rotary} is not supported: heads have {width}", field="model"
        )
    config["rope_scaling"] = _rope_scaling(file, arch)
    return config


def _rope_scaling(file: GgufFile, arch: str) -> dict[str, Any] | None:
    if _FACTORS in file.tensors:
        return {"rope_type": "factors", "factors": file.read(_FACTORS).reshape(-1).tolist()}
    kind = file.metadata.get(f"{arch}.rope.scaling.type")
    if kind in (None, "none"):
        return None
    return {"rope_type": kind, "factor": file.metadata.get(f"{arch}.rope.scaling.factor")}


def _vocabulary(file: GgufFile) -> dict[str, Any]:
    """Spec fields that come from the tokenizer's keys."""
    meta: dict[str, Any] = file.metadata
    tokens = meta.get("tokenizer.ggml.tokens") or []

    def text(name: str) -> str | None:
        number = meta.get(f"tokenizer.ggml.{name}_token_id")
        return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None

    names = ("eos", "eot", "eom")
    ends = {meta.get(f"tokenizer.ggml.{name}_token_id") for name in names}
    template = meta.get("tokenizer.chat_template")
    files = TokenizerFiles(
        tokenizer.rebuild(meta),
        chat_template=template if isinstance(template, str) else None,
        bos_token=text("bos"),
        eos_token=text("eos"),
        pad_token=text("padding"),
    )
    bos = meta.get("tokenizer.ggml.bos_token_id")
    return {
        "tokenizer": files,
        "eos_ids": tuple(sorted(number for number in ends if isinstance(number, int))),
        "bos_id": bos if isinstance(bos, int) else None,
    }
