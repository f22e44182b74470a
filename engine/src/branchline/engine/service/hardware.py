"""Which platform, executor, dtype and pool size follow from the options and from what this machine has.

Owns the meaning of every `auto`; what is there is the platforms' to say. Used by the assembly and `doctor`.
"""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import dataclass, replace
from typing import Any, cast

from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.executor.cuda.choice import choose_attention
from branchline.engine.model.spec import ModelSpec
from branchline.engine.platforms import Platform
from branchline.engine.platforms.cpu import SHARE as CPU_SHARE
from branchline.engine.platforms.cuda import Cuda
from branchline.engine.platforms.memory import free_memory, total_memory
from branchline.registry import RegistryError, platforms, quantization_methods

__all__ = ["CPU_SHARE", "Plan", "free_memory", "gpus", "plan", "plan_for", "pool_pages", "total_memory"]

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2, "auto": 2}  # of the KV cache; weights take no more
WEIGHT_BYTES = {"int8": 2, "bf16": 2, "f32": 4}
CONTEXTS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """What `auto` comes to, each with its reason."""

    executor: str
    device: str
    dtype: str
    attention_backend: str
    why: tuple[str, ...]
    weight_dtype: str = "auto"
    platform: str = "cpu"
    deterministic: bool = False


def plan(config: EngineConfig) -> Plan:
    """Resolve platform, executor, dtype and attention backend. Raises LoadError if torch is missing."""
    why: list[str] = []
    platform = None if config.device == "auto" else _platform(config.device)
    executor = config.executor
    if executor == "auto":
        executor, reason = _choose(config, platform)
        why.append(f"executor {executor}: {reason}")
    if executor in ("torch", "torch-cuda") and importlib.util.find_spec("torch") is None:
        raise LoadError(
            f"the {executor} executor needs torch, which is not installed: run pip install 'branchline[torch]'"
        )
    _check_cuda_options(config, executor)
    if executor == "native":
        return _native_plan(config, platform, why)
    if config.weight_dtype != "auto":
        raise LoadError(
            f"weight-dtype {config.weight_dtype!r} is for the native executor and {executor} is to run: leave it out,"
            " or give --executor native",
            field="weight_dtype",
        )
    name = config.device
    if platform is None:
        name, platform, reason = _best(executor)
        why.append(f"device {platform.device}: {reason}")
    dtype = config.dtype
    if dtype == "auto":
        dtype = platform.dtype
        why.append(f"dtype {dtype}: the default on {name}")
    backend = config.attention_backend
    if backend == "auto" and executor == "torch-cuda":
        backend, reason = choose_attention(platform.device, dtype, config.page_size, deterministic=config.deterministic)
        why.append(f"attention backend {backend}: {reason}")
    elif backend == "auto":
        backend = "torch_paged"
        why.append("attention backend torch_paged: the built-in default")
    return Plan(
        executor, platform.device, dtype, backend, tuple(why), platform=name, deterministic=config.deterministic
    )


def _check_cuda_options(config: EngineConfig, executor: str) -> None:
    """Refuse what only the executor torch-cuda has where another one is to run."""
    if executor == "torch-cuda":
        return
    asked = {
        "kv_cache_dtype": config.kv_cache_dtype != "auto",
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "deterministic": config.deterministic and executor != "native",
    }
    for field, wanted in asked.items():
        if wanted:
            raise LoadError(
                f"{field.replace('_', '-')} is for the executor torch-cuda and {executor} is to run: leave it out, or "
                "give --executor torch-cuda",
                field=field,
            )


def _platform(name: str) -> Platform:
    """A platform, made and checked. Raises LoadError with the registry's words."""
    try:
        made = platforms.get(name)()
        platforms.verify(name, made)
    except RegistryError as error:
        raise LoadError(str(error), field="device") from None
    return cast("Platform", made)


def _best(executor: str) -> tuple[str, Platform, str]:
    """The highest platform with a device that runs the executor; any, if no platform says that it does."""
    made = {name: _platform(name) for name in platforms.names()}
    fit = {name: one for name, one in made.items() if executor in one.executors} or made
    for name, one in sorted(fit.items(), key=lambda pair: (-pair[1].rank, pair[0])):
        found = one.devices()
        if found:
            return name, one, f"{name} is here" if name == "cpu" else f"{name} finds {', '.join(found)}"
    raise LoadError(f"no platform has a device for the executor {executor}: give --device cpu", field="device")


def _choose(config: EngineConfig, platform: Platform | None) -> tuple[str, str]:
    """What something asks for (an attention backend, a quantisation), else the platform's first executor."""
    if config.attention_backend != "auto":
        on_gpu = config.device == "cuda" or (platform is None and bool(Cuda().devices()))
        return ("torch-cuda" if on_gpu else "torch"), f"attention backend {config.attention_backend} is asked for"
    method = _method_executors(config)
    if platform is not None:
        fit = [one for one in platform.executors if not method or one in method]
        if not fit and not {"native", "torch"} & set(method):  # an executor of a plugin, which no platform lists
            return method[0], f"quantization {config.quantization} is run by it alone"
        if not fit:
            raise LoadError(
                f"quantization {config.quantization} is run by {' and '.join(method)}, and device {config.device} by "
                f"{' and '.join(platform.executors)}: change one",
                field="quantization",
            )
        return fit[0], f"device {config.device} is asked for"
    made = {name: _platform(name) for name in platforms.names()}
    for name, one in sorted(made.items(), key=lambda pair: (-pair[1].rank, pair[0])):
        fit = [executor for executor in one.executors if not method or executor in method]
        if name != "cpu" and fit and one.devices():
            return fit[0], f"{name} finds {', '.join(one.devices())}"
    if method and "native" not in method:
        return method[0], f"quantization {config.quantization} is run by it alone"
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


def _native_plan(config: EngineConfig, platform: Platform | None, why: list[str]) -> Plan:
    """A CPU, weights as they are stored unless a dtype is named, and the executor's own attention."""
    if platform is not None and "native" not in platform.executors:
        raise LoadError("the native executor runs on the cpu: give --device cpu, or --executor torch", field="device")
    name = "cpu" if platform is None else config.device
    why.append(f"device {name}: the native executor has no other")
    if config.weight_dtype != "auto":
        why.append(f"weight dtype {config.weight_dtype}: requantised while loading")
    elif config.dtype == "auto":
        why.append("dtype auto: weights are computed as the file stores them")
    return Plan("native", "cpu", config.dtype, "native", tuple(why), config.weight_dtype, name)


def gpus() -> list[str]:
    """Names of the GPUs that torch can use; empty without torch or without a driver's device."""
    return Cuda().devices()


def reachable(host: str) -> str:
    """An address at which other machines reach a server that listens on `host`."""
    if host not in ("0.0.0.0", "::", ""):
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def plan_for(spec: ModelSpec, config: EngineConfig, usual: Plan) -> Plan:
    """The plan, once it is known what the model needs."""
    if spec.fallback:
        return _fallback_plan(config, spec)
    if spec.experts is not None and usual.executor == "native" and config.executor == "auto":
        return plan(replace(config, executor="torch"))  # the one that runs experts on a CPU
    if config.adapter and config.executor == "auto":
        return plan(replace(config, executor="torch"))  # the only one that runs adapters
    return usual


def _fallback_plan(config: EngineConfig, spec: ModelSpec) -> Plan:
    """The one executor that runs an architecture without a family of ours."""
    if config.executor not in ("auto", "transformers"):
        raise LoadError(
            f"the executor {config.executor} has no family for {spec.architecture}: leave --executor out; the executor "
            "transformers runs it, slowly",
            field="executor",
        )
    return plan(replace(config, executor="transformers"))


def pool_pages(config: EngineConfig, spec: ModelSpec, context_length: int, plan: Plan) -> int:
    """Pages of the KV pool. Raises LoadError if not even one context's page fits."""
    if config.max_total_tokens is not None:
        return config.max_total_tokens // config.page_size
    element = 1 if config.kv_cache_dtype == "fp8" else ELEMENT_BYTES.get(plan.dtype, 4)
    page_bytes = spec.page_bytes(config.page_size, element) // config.tensor_parallel_size
    room = _room(spec, plan, config.tensor_parallel_size)
    wanted = -(-CONTEXTS * context_length // config.page_size)
    pages = min(wanted, int(room // page_bytes))
    if pages < 1:
        raise LoadError(
            f"{room / 2**20:.0f} MiB of memory are left for the KV pool and a page needs {page_bytes / 2**20:.1f} MiB: "
            "free memory, or give max-total-tokens"
        )
    return pages


def _room(spec: ModelSpec, plan: Plan, ranks: int = 1) -> float:
    element = WEIGHT_BYTES.get(plan.weight_dtype) or ELEMENT_BYTES.get(plan.dtype, 4)
    return _platform(plan.platform).room(spec.parameters() * element // ranks)
