"""What this machine offers and which device, dtype and pool size follow from the options.

Owns the meaning of every `auto`. Imports torch only to ask for GPUs. Used by the assembly and by `branchline doctor`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.model.spec import ModelSpec
from branchline.registry import RegistryError, quantization_methods

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2, "auto": 2}  # of the KV cache; weights take no more
WEIGHT_BYTES = {"int8": 2, "bf16": 2, "f32": 4}
CPU_SHARE = 0.25
CUDA_SHARE = 0.8
CONTEXTS = 64
DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


@dataclass(frozen=True, slots=True)
class Plan:
    """What `auto` comes to, each with its reason."""

    executor: str
    device: str
    dtype: str
    attention_backend: str
    why: tuple[str, ...]
    weight_dtype: str = "auto"


def plan(config: EngineConfig) -> Plan:
    """Resolve executor, device, dtype and attention backend. Raises LoadError if torch is missing."""
    why: list[str] = []
    executor = config.executor
    if executor == "auto":
        executor, reason = _choose(config)
        why.append(f"executor {executor}: {reason}")
    if executor == "torch" and importlib.util.find_spec("torch") is None:
        raise LoadError("the torch executor needs torch, which is not installed: run pip install 'branchline[torch]'")
    if executor == "native":
        return _native_plan(config, why)
    if config.weight_dtype != "auto":
        raise LoadError(
            f"weight-dtype {config.weight_dtype!r} is for the native executor and {executor} is to run: leave it out,"
            " or give --executor native",
            field="weight_dtype",
        )
    device = config.device
    if device == "auto":
        device = "cuda" if gpus() else "cpu"
        why.append("device cuda: torch finds a GPU" if device == "cuda" else "device cpu: torch finds no GPU")
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
        why.append(f"dtype {dtype}: the default on {device}")
    backend = config.attention_backend
    if backend == "auto":
        backend = "torch_paged"
        why.append("attention backend torch_paged: the built-in default")
    return Plan(executor, device, dtype, backend, tuple(why))


def _choose(config: EngineConfig) -> tuple[str, str]:
    """torch where something asks for it (a GPU, an attention backend), else native, which needs no torch."""
    if config.device == "cuda":
        return "torch", "device cuda is asked for"
    if config.attention_backend != "auto":
        return "torch", f"attention backend {config.attention_backend} is asked for"
    method = _method_executors(config)
    if method and "native" not in method:
        return method[0], f"quantization {config.quantization} is run by it alone"
    if config.device == "auto" and gpus():
        return "torch", "torch finds a GPU"
    return "native", "no GPU is in use"


def _method_executors(config: EngineConfig) -> tuple[str, ...]:
    """Executors of the quantisation method that is asked for; empty if none is."""
    if config.quantization == "auto":
        return ()
    try:
        method: Any = quantization_methods.get(config.quantization)
    except RegistryError as error:
        raise LoadError(str(error), field="quantization") from None
    return tuple(method.executors)


def _native_plan(config: EngineConfig, why: list[str]) -> Plan:
    """The CPU, weights as they are stored unless a dtype is named, and the executor's own attention."""
    if config.device == "cuda":
        raise LoadError("the native executor runs on the cpu: give --device cpu, or --executor torch", field="device")
    why.append("device cpu: the native executor has no other")
    if config.weight_dtype != "auto":
        why.append(f"weight dtype {config.weight_dtype}: requantised while loading")
    elif config.dtype == "auto":
        why.append("dtype auto: weights are computed as the file stores them")
    return Plan("native", "cpu", config.dtype, "native", tuple(why), config.weight_dtype)


def gpus() -> list[str]:
    """Names of the GPUs that torch can use; empty without torch or without a driver's device.

    The device file is looked for first: importing torch takes seconds that a machine without a GPU need not spend.
    """
    if importlib.util.find_spec("torch") is None or not any(Path(path).exists() for path in DRIVER_FILES):
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def free_memory() -> int:
    """Bytes that this process may still take: the kernel's estimate, or less under a cgroup limit."""
    return min([_meminfo("MemAvailable"), *_cgroup_room()])


def total_memory() -> int:
    """Bytes of the machine."""
    return _meminfo("MemTotal")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise LoadError(f"/proc/meminfo has no {key}: give max-total-tokens")


def _cgroup_room() -> list[int]:
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text().strip(), int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return []
    return [max(0, int(limit) - used)] if limit.isdigit() else []


def pool_pages(config: EngineConfig, spec: ModelSpec, context_length: int, plan: Plan) -> int:
    """Pages of the KV pool. Raises LoadError if not even one context's page fits."""
    if config.max_total_tokens is not None:
        return config.max_total_tokens // config.page_size
    page_bytes = spec.page_bytes(config.page_size, ELEMENT_BYTES.get(plan.dtype, 4))
    room = _room(spec, plan)
    wanted = -(-CONTEXTS * context_length // config.page_size)
    pages = min(wanted, int(room // page_bytes))
    if pages < 1:
        raise LoadError(
            f"{room / 2**20:.0f} MiB of memory are left for the KV pool and a page needs {page_bytes / 2**20:.1f} MiB: "
            "free memory, or give max-total-tokens"
        )
    return pages


def _room(spec: ModelSpec, plan: Plan) -> float:
    element = WEIGHT_BYTES.get(plan.weight_dtype) or ELEMENT_BYTES.get(plan.dtype, 4)
    weights = spec.parameters() * element
    if plan.device == "cpu":
        return max(0.0, free_memory() - weights) * CPU_SHARE
    import torch

    free, _ = torch.cuda.mem_get_info(plan.device)
    return max(0.0, free * CUDA_SHARE - weights)
