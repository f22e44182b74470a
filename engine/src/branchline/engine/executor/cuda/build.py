"""Builds the executor `torch-cuda` from a checked model and options."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from branchline.engine.attention.base import AttentionBackend, AttentionShape
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.executor.cuda.choice import INVARIANT, choose_attention
from branchline.engine.executor.cuda.decoder import PagedDecoder
from branchline.engine.executor.cuda.device import Device, open_device
from branchline.engine.executor.cuda.engine import CudaExecutor, CudaSteps, GraphOptions
from branchline.engine.executor.cuda.group import Alone, Group
from branchline.engine.executor.cuda.lead import LeadingSteps
from branchline.engine.executor.cuda.ops import ops_for
from branchline.engine.executor.cuda.parallel import gather, leave
from branchline.engine.executor.cuda.shard import share_of, split_head, window_of
from branchline.engine.executor.cuda.step import graph_sizes
from branchline.engine.executor.on_torch import device_of, dtype_of
from branchline.engine.executor.weights import load_weights
from branchline.engine.model.source import LoadedModel
from branchline.engine.quantization.base import QuantizationMethod
from branchline.registry import attention_backends

KERNELS = 1  # counts up when kernels change the bits
INVARIANT_WEIGHTS = ("", "gguf", "awq", "gptq", "fp8")  # methods whose products can be invariant: plain ones and e4m3
POOL_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn}


@dataclasses.dataclass(frozen=True, slots=True)
class CudaOptions:
    """What this executor has options for beyond what all have; see the rows of these names in the option table."""

    deterministic: bool = False
    kv_cache_dtype: str = "auto"
    graph_rows: int = 0  # 0: no graphs
    context_length: int | None = None  # of the longest sequence; None: the model's

    @staticmethod
    def of(config: EngineConfig) -> CudaOptions:
        """As the option table says."""
        return CudaOptions(
            deterministic=config.deterministic,
            kv_cache_dtype=config.kv_cache_dtype,
            graph_rows=min(config.cuda_graph_rows, config.max_running_requests),
            context_length=config.context_length,
        )


def build_executor(
    model: LoadedModel,
    *,
    device: str,
    dtype: str,
    num_pages: int,
    page_size: int,
    threads: int | None,
    attention_backend: str,
    quantization: QuantizationMethod | None = None,
    options: CudaOptions = CudaOptions(),
    group: Group | None = None,
    runtime: Device | None = None,
) -> CudaSteps:
    """Convert this rank's share of the weights, reserve the KV pool, capture graphs and return a ready executor.

    `attention_backend` auto is what `choose_attention` says. Raises LoadError for an unknown
    device or dtype, options that contradict each other, faulty weights, or a pool that does not fit.
    """
    group = group or Alone()
    target = device_of(device)
    kind = dtype_of(dtype, target)
    if threads is not None:
        torch.set_num_threads(threads)
    name = attention_backend
    if name == "auto":
        short = str(kind).removeprefix("torch.")
        name, _ = choose_attention(target.type, short, page_size, deterministic=options.deterministic)
    pool_dtype = _pool_dtype(options.kv_cache_dtype, kind, name)
    _check(options, name, quantization)
    share = share_of(model, group)
    spec = share.spec
    shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, page_size, window_of(spec))
    attention: AttentionBackend = attention_backends.get(name)(shape, target)  # type: ignore[assignment]
    weights = split_head(load_weights(share, target, kind, quantization), group)
    ops = ops_for(target, spec.norm_eps, invariant=options.deterministic)
    try:
        decoder = PagedDecoder(
            spec, weights, attention, ops, group,
            slots=num_pages * page_size, page_size=page_size, pool_dtype=pool_dtype,
        )  # fmt: skip
    except (RuntimeError, MemoryError) as error:
        size = spec.page_bytes(page_size, pool_dtype.itemsize) * num_pages
        raise LoadError(
            f"kv pool of {num_pages} pages ({size / 2**30:.1f} GiB) does not fit on {device}; lower the page count",
            field="num_pages",
        ) from error
    longest = min(options.context_length or spec.context_length, num_pages * page_size)
    sizes = tuple(graph_sizes(options.graph_rows)) if options.graph_rows else ()
    kind_of_steps = CudaExecutor if group.size == 1 else LeadingSteps if group.rank == 0 else CudaSteps
    return kind_of_steps(
        runtime or open_device(target),
        decoder,
        attention,
        GraphOptions(sizes, -(-longest // page_size), at_start=target.type == "cuda"),
        num_pages=num_pages,
        page_size=page_size,
        numerics_id=numerics_id(
            model, target, kind, name, quantization.name if quantization else "", options, group.size
        ),
    )


def on_ranks(size: int, env: Mapping[str, str]) -> Callable[..., CudaSteps]:
    """`build_executor` for a model on several ranks. `env` is the environment: torchrun's ranks are in it."""

    def build(model: LoadedModel, **named: Any) -> CudaSteps:
        return build_on_ranks(model, size, env, **named)

    return build


def build_on_ranks(
    model: LoadedModel, size: int, env: Mapping[str, str], on_loss: Callable[[str], None] = leave, **named: Any
) -> CudaSteps:
    """`build_executor` on `size` ranks, of which this process is the first; `named` are its options.

    Each rank reads the checkpoint that `model.reference` names. Raises LoadError as build_executor does, or if ranks
    can't meet or one of them can't build its share.
    """
    options: CudaOptions = named["options"]
    gpu = device_of(named["device"]).type == "cuda"
    ranks = gather(size, gpu=gpu, fixed_order=options.deterministic, env=env, on_loss=on_loss)
    method = named.get("quantization")
    facts = {name: named[name] for name in ("dtype", "num_pages", "page_size", "threads", "attention_backend")}
    facts |= {"model": model.reference, "fingerprint": model.fingerprint, "options": dataclasses.asdict(options)}
    facts["quantization"] = "" if method is None else method.name
    try:
        ranks.tell("build", facts)
        made = build_executor(model, group=ranks, **named)
    except BaseException:
        ranks.close()
        raise
    assert isinstance(made, LeadingSteps), "rank 0 of several leads"
    made.lead(ranks, on_loss)
    return made


def _pool_dtype(name: str, kind: torch.dtype, attention: str) -> torch.dtype:
    if name not in POOL_DTYPES:
        raise LoadError(f"kv-cache-dtype {name!r} is unknown; use {', '.join(POOL_DTYPES)}", field="kv_cache_dtype")
    if name == "fp8" and attention in ("torch_paged", "reference"):
        raise LoadError(
            f"kv-cache-dtype fp8 is not read by attention-backend {attention}: use triton, flashinfer or fixed",
            field="kv_cache_dtype",
        )
    return POOL_DTYPES[name] or kind


def _check(options: CudaOptions, attention: str, quantization: QuantizationMethod | None) -> None:
    if not options.deterministic:
        return
    if attention not in INVARIANT:
        raise LoadError(
            f"attention-backend {attention} splits by the whole batch, which deterministic forbids: leave it out, or "
            f"use {' or '.join(INVARIANT)}",
            field="attention_backend",
        )
    if quantization is not None and quantization.name not in INVARIANT_WEIGHTS:
        raise LoadError(
            f"quantization {quantization.name!r} has no product that is the same in any batch: leave deterministic "
            "out, or use another",
            field="quantization",
        )


def numerics_id(
    model: LoadedModel,
    device: torch.device,
    dtype: torch.dtype,
    attention: str,
    quantization: str,
    options: CudaOptions,
    ranks: int,
) -> str:
    """Hash of everything known to change the bits: weights, dtypes, device, library, kernels and ranks."""
    if device.type == "cuda":
        unit = torch.cuda.get_device_name(device)
    else:
        unit = f"{torch.backends.cpu.get_cpu_capability()}/{torch.get_num_threads()}"
    parts = (
        "torch-cuda", str(KERNELS), torch.__version__, str(dtype), options.kv_cache_dtype, device.type, unit, attention,
        quantization, str(options.deterministic), str(ranks), model.fingerprint,
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
