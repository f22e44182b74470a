"""Small random encoders in Hugging Face form, made by transformers, with a tokenizer of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from branchline.engine.encoder import Network, load_encoder
from harness import tokenizer_json
from tiny import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.4,
    "attn_implementation": "eager",
}


def save(folder: Path, model: Any, **settings: Any) -> Path:
    """A folder as a hub has it; `settings` are put into its config."""
    model.eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    change(folder, **settings)
    return folder


def change(folder: Path, **settings: Any) -> None:
    """Change config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


def bert(**changes: Any) -> Any:
    """A bare encoder with random biases and norms too."""
    return _random(transformers.BertModel(transformers.BertConfig(max_position_embeddings=40, **SIZES | changes)))


def roberta(**changes: Any) -> Any:
    """The same with RoBERTa's positions."""
    config = transformers.RobertaConfig(
        max_position_embeddings=40, type_vocab_size=1, pad_token_id=1, **SIZES | changes
    )
    return _random(transformers.RobertaModel(config))


def classifier(family: str, labels: int = 1) -> Any:
    """One with a head that scores pairs."""
    if family == "bert":
        config: Any = transformers.BertConfig(max_position_embeddings=40, num_labels=labels, **SIZES)
        return _random(transformers.BertForSequenceClassification(config))
    config = transformers.XLMRobertaConfig(
        max_position_embeddings=40, type_vocab_size=1, pad_token_id=1, num_labels=labels, **SIZES
    )
    return _random(transformers.XLMRobertaForSequenceClassification(config))


def _random(model: Any) -> Any:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def pooled(folder: Path, *modes: str, normalise: bool = False) -> Path:
    """Write the files of Sentence Transformers that say how to pool."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    modules = [
        {"idx": at, "name": str(at), "path": "1_Pooling" if kind == "Pooling" else "",
         "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(dict.fromkeys(modes, True)))
    return folder


def network(folder: Path) -> Network:
    """Loaded."""
    return Network(load_encoder(folder))
