"""A Hugging Face folder as a checkpoint: config.json, tokenizer.json and safetensors, single or sharded.

Everything is checked before the first tensor is read: each shard named by the index exists and is whole. Never
runs code of the checkpoint and never opens pickled weights.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from branchline.engine.errors import LoadError
from branchline.engine.model import unknown
from branchline.engine.model.safetensors_file import SafetensorsFile, ShardedTensors
from branchline.engine.model.spec import ModelSpec, SamplingDefaults, TokenizerFiles
from branchline.registry import RegistryError, models

INDEX = "model.safetensors.index.json"
JSON_LIMIT = 256 << 20


def read_folder(path: Path) -> tuple[ModelSpec, ShardedTensors, str, list[Path], dict[str, Any]]:
    """Spec, tensors, commonest dtype, weight files and quantisation settings of a folder. Raises LoadError."""
    config = read_json(path / "config.json", required=True)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise LoadError(f"{path / 'config.json'} names no architecture", field="model.architectures")
    try:
        family: Any = models.get(str(names[0]))
    except RegistryError as error:
        family = unknown.family(str(names[0]), str(error))
    files = weight_files(path)
    tensors = tensors_of(path)
    quantization = config.pop("quantization_config", None) or {}
    if not isinstance(quantization, dict):
        raise LoadError(f"{path / 'config.json'}: quantization_config must be an object", field="model")
    spec: ModelSpec = family(config)
    spec = dataclasses.replace(spec, **vocabulary(path, config))
    return spec, tensors, tensors.commonest(), files, quantization


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """A JSON object; empty if absent and not required. Raises LoadError with the position of a fault."""
    if not path.exists():
        if required:
            raise LoadError(f"{path.parent} has no {path.name}: it is not a Hugging Face model folder", field="model")
        return {}
    if path.stat().st_size > JSON_LIMIT:
        raise LoadError(f"{path} is larger than {JSON_LIMIT >> 20} MB: it is not a configuration", field="model")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not valid JSON: {error}", field="model") from error
    if not isinstance(document, dict):
        raise LoadError(f"{path} must hold a JSON object, not {type(document).__name__}", field="model")
    return document


def _index(path: Path) -> dict[str, str] | None:
    """Tensor name to shard name, or None for a folder without an index."""
    document = read_json(path / INDEX)
    if not document:
        return None
    mapping = document.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise LoadError(f"{path / INDEX} has no weight_map", field="model")
    return {str(name): str(shard) for name, shard in mapping.items()}


def tensors_of(path: Path) -> ShardedTensors:
    """The tensors of a folder's safetensors files. Raises LoadError."""
    return ShardedTensors([SafetensorsFile(file) for file in weight_files(path)], _index(path))


def weight_files(path: Path) -> list[Path]:
    """The safetensors files to load: those of the index, else the one file. Stray files are not loaded."""
    mapping = _index(path)
    if mapping is not None:
        shards = sorted(set(mapping.values()))
        unsafe = [shard for shard in shards if Path(shard).name != shard]
        if unsafe:
            raise LoadError(f"{path / INDEX} names a shard outside its folder: {unsafe[0]!r}", field="model")
        missing = [shard for shard in shards if not (path / shard).exists()]
        if missing:
            raise LoadError(
                f"weight file {', '.join(missing)} is named by {INDEX} but missing from {path}; download it again",
                field="model",
            )
        return [path / shard for shard in shards]
    found = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors") in found:
        return [path / "model.safetensors"]
    if len(found) == 1:
        return found
    if found:
        raise LoadError(
            f"{path} has {len(found)} safetensors files but no {INDEX} to say which belong together", field="model"
        )
    other = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(kind))
    if other:
        raise LoadError(
            f"no weights found in {path} that are safe to open: {other[0]} may hold code; convert it to safetensors",
            field="model",
        )
    raise LoadError(f"no weights found in {path}: it holds no *.safetensors file", field="model")


def vocabulary(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Spec fields that come from the tokenizer's and the generation files."""
    generation = read_json(path / "generation_config.json")
    settings = read_json(path / "tokenizer_config.json")
    if not (path / "tokenizer.json").exists():
        hint = (
            "; only tokenizer.model is there: convert it to tokenizer.json"
            if (path / "tokenizer.model").exists()
            else ""
        )
        raise LoadError(f"{path} has no tokenizer.json{hint}", field="model.tokenizer")
    tokenizer = read_json(path / "tokenizer.json")
    ids = token_ids(tokenizer)
    words = {name: _word(settings.get(f"{name}_token")) for name in ("bos", "eos", "pad")}
    ends = {*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
    if words["eos"] in ids:
        ends.add(ids[words["eos"]])
    begins = [*_ids(config.get("bos_token_id")), *_ids(generation.get("bos_token_id"))]
    return {
        "eos_ids": tuple(sorted(ends)),
        "bos_id": begins[0] if begins else ids.get(words["bos"] or ""),
        "sampling": _sampling(generation),
        "tokenizer": TokenizerFiles(
            (path / "tokenizer.json").read_bytes(),
            chat_template=_template(path, settings),
            bos_token=words["bos"],
            eos_token=words["eos"],
            pad_token=words["pad"],
        ),
    }


def token_ids(tokenizer: dict[str, Any]) -> dict[str | None, int]:
    """Text to id of a tokenizer.json: its vocabulary and its added tokens."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str | None, int] = {}
    if isinstance(vocabulary, dict):
        ids.update({text: number for text, number in vocabulary.items() if isinstance(number, int)})
    elif isinstance(vocabulary, list):  # Unigram: [[piece, score], …]
        ids.update({piece[0]: number for number, piece in enumerate(vocabulary) if isinstance(piece, list)})
    for added in tokenizer.get("added_tokens") or []:
        ids[added["content"]] = added["id"]
    return ids


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool)]


def _word(value: object) -> str | None:
    """A special token's text, given plainly or as an AddedToken object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template(path: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja if there is one, else tokenizer_config's template (the one named default of several)."""
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _sampling(generation: dict[str, Any]) -> SamplingDefaults:
    def real(name: str) -> float | None:
        value = generation.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    if generation.get("do_sample") is False:
        return SamplingDefaults(repetition_penalty=real("repetition_penalty"))
    top_k = generation.get("top_k")
    return SamplingDefaults(
        temperature=real("temperature"),
        top_p=real("top_p"),
        top_k=top_k if isinstance(top_k, int) and top_k > 0 else None,
        min_p=real("min_p"),
        repetition_penalty=real("repetition_penalty"),
    )
