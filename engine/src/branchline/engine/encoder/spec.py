"""What an encoder checkpoint says of itself: sizes, pooling, normalisation, its head and its tokenizer's files.

Reads a Hugging Face folder, with the files that Sentence Transformers puts beside the weights. What the arithmetic here
can't honour is refused by name, never passed over.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchline.engine.errors import LoadError
from branchline.engine.model.folder import read_json, tensors_of, vocabulary, weight_files
from branchline.engine.model.load import fingerprint
from branchline.engine.model.safetensors_file import ShardedTensors
from branchline.engine.model.spec import TokenizerFiles

# Architecture → family, and whether it ends in a classifier.
FAMILIES = {
    "BertModel": ("bert", False),
    "BertForSequenceClassification": ("bert", True),
    "RobertaModel": ("roberta", False),
    "RobertaForSequenceClassification": ("roberta", True),
    "XLMRobertaModel": ("roberta", False),
    "XLMRobertaForSequenceClassification": ("roberta", True),
    "CamembertModel": ("roberta", False),
    "CamembertForSequenceClassification": ("roberta", True),
}
# Names of pooling in Sentence Transformers' settings → ours.
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "silu", "tanh")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the vectors of a text's tokens become one: several ways are laid one after the other."""

    modes: tuple[str, ...] = ("mean",)
    normalise: bool = False  # to length 1


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Sizes and choices of one checkpoint. `labels` is 0 without a classifier."""

    architecture: str
    family: str  # bert or roberta
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    inner: int
    context_length: int  # tokens of an input, marks included
    first_position: int
    types: int
    eps: float
    activation: str
    labels: int
    pooling: Pooling
    sigmoid: bool  # scores are squeezed into [0, 1]

    @property
    def embedding_size(self) -> int:
        """Length of a vector; 0 for a classifier."""
        return 0 if self.labels else self.hidden * len(self.pooling.modes)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What it can be asked for."""
        return ("rank",) if self.labels else ("embed",)


@dataclass(frozen=True, slots=True)
class EncoderModel:
    """A checked checkpoint with its tensors still in the file."""

    path: Path
    spec: EncoderSpec
    tensors: ShardedTensors
    tokenizer: TokenizerFiles
    fingerprint: str


def is_encoder(path: Path) -> bool:
    """Whether a checkpoint is of a family here. Never raises: what can't be read is for the loader to refuse."""
    try:
        return path.is_dir() and _architecture(read_json(path / "config.json")) in FAMILIES
    except (LoadError, OSError):
        return False


def load_encoder(path: Path) -> EncoderModel:
    """Reads everything but the weights themselves. Raises LoadError."""
    config = read_json(path / "config.json", required=True)
    spec = _spec(path, config)
    return EncoderModel(
        path=path,
        spec=spec,
        tensors=tensors_of(path),
        tokenizer=vocabulary(path, config)["tokenizer"],
        fingerprint=fingerprint(weight_files(path)),
    )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _spec(path: Path, config: dict[str, Any]) -> EncoderSpec:
    architecture = _architecture(config)
    family, classifies = FAMILIES[architecture]
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise LoadError(
            f"position_embedding_type {kind!r} of {architecture} is not supported: only absolute is", field="model"
        )
    activation = str(config.get("hidden_act", "gelu"))
    if activation not in ACTIVATIONS:
        raise LoadError(
            f"hidden_act {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}", field="model"
        )
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if hidden % heads:
        raise LoadError(f"hidden_size {hidden} is no multiple of {heads} num_attention_heads", field="model")
    first = int(config.get("pad_token_id", 1)) + 1 if family == "roberta" else 0
    longest = _size(config, "max_position_embeddings") - first
    asked = read_json(path / "sentence_bert_config.json").get("max_seq_length")
    labels = _labels(config) if classifies else 0
    if labels > 1:
        raise LoadError(
            f"{architecture} here has {labels} labels: a model that ranks has one, and no other kind of classifier is "
            "served",
            field="model",
        )
    return EncoderSpec(
        architecture=architecture,
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden=hidden,
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        inner=_size(config, "intermediate_size"),
        context_length=min(longest, asked) if isinstance(asked, int) and asked > 0 else longest,
        first_position=first,
        types=_size(config, "type_vocab_size"),
        eps=float(config.get("layer_norm_eps", 1e-12)),
        activation=activation,
        labels=labels,
        pooling=Pooling() if classifies else _pooling(path),
        sigmoid=classifies and not _is_identity(config),
    )


def _size(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LoadError(f"config.json: {name} must be a positive integer, not {value!r}", field="model")
    return value


def _labels(config: dict[str, Any]) -> int:
    named = config.get("id2label")
    count = config.get("num_labels", len(named) if isinstance(named, dict) else 2)
    return count if isinstance(count, int) and count > 0 else 2


def _is_identity(config: dict[str, Any]) -> bool:
    """Whether the checkpoint asks for its raw scores; one that says nothing is squeezed, as its authors' tools do."""
    newer = config.get("sentence_transformers")
    asked = newer.get("activation_fn") if isinstance(newer, dict) else None
    asked = asked or config.get("sbert_ce_default_activation_function")
    if asked is None or str(asked).endswith("Sigmoid"):
        return False
    if str(asked).endswith("Identity"):
        return True
    raise LoadError(f"the activation {asked!r} of scores is not supported: Sigmoid and Identity are", field="model")


def _pooling(path: Path) -> Pooling:
    """From modules.json; a folder without one is pooled by the mean, as Sentence Transformers would."""
    modules = _modules(path)
    modes: tuple[str, ...] = ("mean",)
    normalise = False
    for module in modules:
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        if kind == "Pooling":
            modes = _modes(path / str(module.get("path", "")))
        elif kind == "Normalize":
            normalise = True
        elif kind != "Transformer":
            raise LoadError(f"{path / 'modules.json'} has a module {kind!r}, which is not supported", field="model")
    return Pooling(modes, normalise)


def _modules(path: Path) -> list[dict[str, Any]]:
    import json

    file = path / "modules.json"
    if not file.exists():
        return []
    try:
        modules = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file} is not valid JSON: {error}", field="model") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise LoadError(f"{file} must hold an array of objects", field="model")
    return modules


def _modes(folder: Path) -> tuple[str, ...]:
    settings = read_json(folder / "config.json", required=True)
    wanted = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    unknown = [name for name in wanted if name not in POOLINGS]
    if unknown:
        raise LoadError(f"{folder / 'config.json'} asks for {unknown[0]}, which is not supported", field="model")
    named = settings.get("pooling_mode")
    if isinstance(named, str) and not wanted:
        wanted = [name for name, mode in POOLINGS.items() if mode == named]
    if not wanted:
        raise LoadError(f"{folder / 'config.json'} asks for no pooling that is known", field="model")
    return tuple(mode for name, mode in POOLINGS.items() if name in wanted)  # in the order they are laid together
