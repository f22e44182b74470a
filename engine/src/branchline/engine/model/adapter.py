"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

Checks both against the base model's shapes before any weight is read, and refuses by name what is not plain LoRA on
the projections of attention and MLP. Executors that run adapters are `AdapterExecutor`s. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from branchline.engine.errors import LoadError
from branchline.engine.model.safetensors_file import SafetensorsFile
from branchline.engine.model.spec import ModelSpec

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FIELD = "path"
CONFIG_LIMIT = 1 << 20  # bytes
PATTERN_LIMIT = 256  # characters of a regular expression

# What changes nothing about how a saved adapter is applied.
_NEUTRAL = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora", "bias",
})  # fmt: skip
_REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the base's weights too
_TENSOR = re.compile(r"base_model\.model\.(model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+))\.lora_([AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoraPart:
    """What one linear layer gets: y += scaling * B (A x). Names of tensors of the adapter's file."""

    down: str  # A: [rank, in]
    up: str  # B: [out, rank]
    rank: int
    scaling: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter. `parts` by (layer, projection), such as (0, "q_proj"); `rank` is the largest of them.

    `digest` covers its configuration and every byte of its weights: adapters of one digest give the same bits.
    """

    path: Path
    digest: str
    rank: int
    parts: Mapping[tuple[int, str], LoraPart]
    tensors: SafetensorsFile


@runtime_checkable
class AdapterExecutor(Protocol):
    """What an executor offers besides `Executor` if it runs adapters: `ForwardBatch.adapters` names their numbers."""

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Make an adapter ready under a number above 0 that was never used. Any thread. Raises LoadError."""

    def unload_adapter(self, number: int) -> None:
        """Free it. No batch names the number any more. Any thread; unknown numbers are no error."""


def read_adapter(path: str | Path, spec: ModelSpec) -> Adapter:
    """The adapter of a folder, checked against the base model. Raises LoadError naming what is wrong with it."""
    folder = Path(path).expanduser()
    config = _config(folder)
    _refuse_others(config, folder)
    tensors = _open(folder)
    shapes = base_shapes(spec)
    parts = _parts(config, tensors, shapes, folder)
    _complete(config, parts, shapes, folder)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    with (folder / WEIGHTS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return Adapter(folder, digest.hexdigest()[:32], max(part.rank for part in parts.values()), parts, tensors)


def base_shapes(spec: ModelSpec) -> dict[tuple[int, str], tuple[str, int, int]]:
    """(layer, projection) → (module's name, out, in) of every linear layer that an adapter may change."""
    attention = {
        "q_proj": (spec.query_size, spec.hidden),
        "k_proj": (spec.kv_size, spec.hidden),
        "v_proj": (spec.kv_size, spec.hidden),
        "o_proj": (spec.hidden, spec.query_size),
    }
    mlp = {
        "gate_proj": (spec.intermediate, spec.hidden),
        "up_proj": (spec.intermediate, spec.hidden),
        "down_proj": (spec.hidden, spec.intermediate),
    }
    shapes: dict[tuple[int, str], tuple[str, int, int]] = {}
    for layer in range(spec.layers):
        dense = spec.experts is None or layer in spec.experts.dense
        for block, linears in (("self_attn", attention), ("mlp", mlp if dense else {})):
            for name, (out, width) in linears.items():
                shapes[layer, name] = (f"model.layers.{layer}.{block}.{name}", out, width)
    return shapes


# ---- the configuration ---------------------------------------------------------------------------


def _fault(folder: Path, words: str) -> LoadError:
    return LoadError(f"adapter {folder}: {words}", field=FIELD)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise _fault(folder, f"there is no {CONFIG} in it: give the folder that PEFT's save_pretrained wrote")
    try:
        if path.stat().st_size > CONFIG_LIMIT:
            raise ValueError(f"it has more than {CONFIG_LIMIT} bytes")
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        raise _fault(folder, f"{CONFIG} can't be read: {error}") from error
    return config


def _refuse_others(config: Mapping[str, Any], folder: Path) -> None:
    """Everything but plain LoRA."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _fault(folder, f"peft_type is {kind!r}: only LORA is implemented")
    if config.get("bias", "none") != "none":
        raise _fault(folder, f"bias is {config['bias']!r}: trained biases are not implemented, only 'none'")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REWRITES_BASE):
        raise _fault(
            folder,
            f"init_lora_weights is {start!r}, which changes the base model's weights: convert it to plain LoRA with "
            "path_initial_model_for_weight_conversion when saving",
        )
    for name, value in config.items():
        if name not in _NEUTRAL and value not in (None, False, "", 0) and value != [] and value != {}:
            raise _fault(folder, f"{name} is {value!r}, which is not implemented: train without it")


def _number(config: Mapping[str, Any], name: str, folder: Path, value: Any = None) -> float:
    found = config.get(name) if value is None else value
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found) or found <= 0:
        raise _fault(folder, f"{name} is {found!r}: it must be a number above 0")
    return float(found)


def _pattern(config: Mapping[str, Any], name: str, module: str, folder: Path) -> Any:
    """The value of a pattern table for a module: PEFT takes the first key that its name ends with; None if none."""
    table = config.get(name) or {}
    if not isinstance(table, dict):
        raise _fault(folder, f"{name} is {table!r}: it must be an object")
    for key, value in table.items():
        if _matches(rf"(.*\.)?({key})$", module, name, folder):
            return value
    return None


def _matches(pattern: str, module: str, name: str, folder: Path) -> bool:
    if len(pattern) > PATTERN_LIMIT:
        raise _fault(folder, f"{name} has a pattern of more than {PATTERN_LIMIT} characters")
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise _fault(folder, f"{name} has the pattern {pattern!r}, which is none: {error}") from error


# ---- the tensors ---------------------------------------------------------------------------------


def _open(folder: Path) -> SafetensorsFile:
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / PICKLED).exists():
            raise _fault(folder, f"it has {PICKLED}, which can run code: save it with safe_serialization=True")
        raise _fault(folder, f"there is no {WEIGHTS} in it")
    return SafetensorsFile(path)


def _parts(
    config: Mapping[str, Any],
    tensors: SafetensorsFile,
    shapes: Mapping[tuple[int, str], tuple[str, int, int]],
    folder: Path,
) -> dict[tuple[int, str], LoraPart]:
    """Every pair of the file with its scaling; each tensor is known, paired and of the right shape."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for name in sorted(tensors.entries):
        matched = _TENSOR.fullmatch(name)
        at = (int(matched[2]), str(matched[4])) if matched else (-1, "")
        if matched is None or at not in shapes or shapes[at][0] != matched[1]:
            raise _fault(
                folder,
                f"tensor {name} is not LoRA on a projection that the base model has: only q, k, v, o, gate, up and "
                "down projections of its layers are implemented, no embeddings, heads, experts, biases or magnitudes",
            )
        found.setdefault(at, {})[matched[5]] = name
    if not found:
        raise _fault(folder, f"{WEIGHTS} has no tensors")
    return {at: _part(config, tensors, pair, shapes[at], folder) for at, pair in found.items()}


def _part(
    config: Mapping[str, Any],
    tensors: SafetensorsFile,
    pair: Mapping[str, str],
    base: tuple[str, int, int],
    folder: Path,
) -> LoraPart:
    module, out, width = base
    for half in "AB":
        if half not in pair:
            raise _fault(folder, f"tensor base_model.model.{module}.lora_{half}.weight is missing: it is incomplete")
    rank = _number(config, "r", folder, _pattern(config, "rank_pattern", module, folder))
    alpha = _number(config, "lora_alpha", folder, _pattern(config, "alpha_pattern", module, folder))
    if rank != int(rank):
        raise _fault(folder, f"the rank of {module} is {rank:g}: it must be a whole number")
    for half, wanted in (("A", (int(rank), width)), ("B", (out, int(rank)))):
        shape = tensors.entries[pair[half]].shape
        if shape != wanted:
            raise _fault(
                folder,
                f"tensor {pair[half]} has shape {list(shape)}, and rank {int(rank)} on the base model asks for "
                f"{list(wanted)}: is it an adapter of this model?",
            )
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return LoraPart(pair["A"], pair["B"], int(rank), scaling)


def _complete(
    config: Mapping[str, Any],
    parts: Mapping[tuple[int, str], LoraPart],
    shapes: Mapping[tuple[int, str], tuple[str, int, int]],
    folder: Path,
) -> None:
    """Each layer that the configuration targets has its pair: a file cut short is not taken for a smaller adapter."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not targets or not isinstance(targets, str | list):
        raise _fault(folder, f"target_modules is {targets!r}: it must name projections, or be a pattern")
    if isinstance(targets, list):
        for target in targets:
            if not any(_targets([target], at, module, folder) for at, (module, *_) in shapes.items()):
                raise _fault(folder, f"target_modules names {target!r}, which is no projection of the base model")
    layers = config.get("layers_to_transform")
    chosen = None if layers is None else set(layers if isinstance(layers, list) else [layers])
    for at, (module, *_) in shapes.items():
        wanted = (
            _targets(targets, at, module, folder)
            and not (excluded and _targets(excluded, at, module, folder))
            and (chosen is None or at[0] in chosen)
        )
        if wanted and at not in parts:
            name = f"base_model.model.{module}.lora_A.weight"
            raise _fault(folder, f"target_modules asks for tensor {name}, which is missing: it is incomplete")


def _targets(targets: str | Iterable[Any], at: tuple[int, str], module: str, folder: Path) -> bool:
    if isinstance(targets, str):
        if targets == "all-linear":
            return True
        return _matches(rf"(?:{targets})\Z", module, "target_modules", folder)
    return any(module == one or module.endswith(f".{one}") for one in targets)
