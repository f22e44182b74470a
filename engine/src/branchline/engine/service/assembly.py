"""Options → a ready loop and what the service says of it: load, plan, build, in this order.

The only place that wires model, executor, cache and loop. Must not open a port. Imports torch by way of the
executor it builds.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from branchline import _native, registry
from branchline.engine import hooks, overrides
from branchline.engine.cache import CacheContext, RadixCacheBackend, build_cache
from branchline.engine.config import EngineConfig
from branchline.engine.encoder import is_encoder
from branchline.engine.errors import EngineError, LoadError
from branchline.engine.grammar.base import GrammarContext
from branchline.engine.grammar.hearth import Bounds, Hearth
from branchline.engine.grammar.manager import Manager, ManagerOptions
from branchline.engine.grammar.pieces import lazily
from branchline.engine.grammar.testing import build_backend
from branchline.engine.handover import Handovers, TransferContext, build_backends
from branchline.engine.handover.rooms import PIECE_BYTES
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.loop_ahead import AheadLoop
from branchline.engine.loop_parts import Watch
from branchline.engine.model.spec import ModelSpec
from branchline.engine.quantization import QuantizationMethod, choose
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.service import components, hardware
from branchline.engine.service.adapters import AdapterBook, load_given
from branchline.engine.service.limits import ModelInfo
from branchline.engine.speculative import DraftContext, Drafter, build_drafter
from branchline.engine.types import Delta, Executor, HostExecutor, PageExecutor, QueueExecutor, Request, SamplingParams

if TYPE_CHECKING:
    from branchline.engine.model.source import LoadedModel
    from branchline.engine.service.embedding import Encoder
    from branchline.engine.service.metrics import Metrics
    from branchline.engine.service.tracing import Tracing

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
CLOSE_S = 5.0  # for the step that runs when everything is closed


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything that serves, built and not yet started."""

    config: EngineConfig
    loop: EngineLoop
    model: ModelInfo
    executor: Executor
    drafter: Drafter | None
    metrics: Metrics | None
    tracing: Tracing | None
    components: tuple[str, ...]
    grammars: Manager | None = None
    hooks: hooks.Chain = field(default_factory=hooks.Chain)
    adapters: AdapterBook | None = None

    def close(self) -> None:
        """Stop the loop and, unless a step does not end, release the models. Idempotent."""
        try:
            self.hooks.bind("engine.stop", Engine._release)(self)
        except EngineError as error:  # whatever a hook does, what is held is released
            logger.error("%s", error)
            self._release()

    def _release(self) -> None:
        if self.loop.close(step_s=CLOSE_S):
            self.executor.close()
            if self.drafter is not None:
                self.drafter.close()
        if self.tracing is not None:
            self.tracing.close()
        if self.grammars is not None:
            self.grammars.close()
        if self.loop.handovers is not None:
            self.loop.handovers.close()


def build(config: EngineConfig, progress: Progress, given: Collection[str] = ()) -> Engine | Encoder:
    """Load the model and build everything around it: an Encoder if it embeds or ranks. Raises LoadError, RegistryError.

    Options that are not `given` by the user may be decided by model overrides.
    """
    chain = hooks.assemble()
    return chain.bind("engine.start", lambda config: _build(config, progress, given, chain))(config)


def _build(config: EngineConfig, progress: Progress, given: Collection[str], chain: hooks.Chain) -> Engine | Encoder:
    plan = hardware.plan(config)  # what is wrong with the options is told before anything is fetched
    from branchline.engine.model.load import load_model, resolve

    path = resolve(config.model, progress)
    if is_encoder(path):
        from branchline.engine.service import embedding

        return embedding.build(config, path, progress, given)
    loaded = load_model(config.model, progress=progress, path=path)
    return _around(loaded, config, plan, progress, given, chain)


def _around(
    loaded: LoadedModel,
    config: EngineConfig,
    plan: hardware.Plan,
    progress: Progress,
    given: Collection[str],
    chain: hooks.Chain,
) -> Engine:
    """An engine for a model that generates."""
    changed = overrides.apply(config, overrides.facts_of(loaded), given)
    if changed is not config:
        config, plan = changed, hardware.plan(changed)
    plan = hardware.plan_for(loaded.spec, config, plan)
    method = choose(config.quantization, loaded)
    if method is not None:
        loaded = method.open(loaded)
    if config.tensor_parallel_size > 1 and chain.at("weights.loaded"):
        raise LoadError("hooks at weights.loaded see one rank's weights: lower it to 1", field="tensor_parallel_size")
    loaded = chain.bind("weights.loaded", _unchanged)(loaded)
    context_length = _context_length(config, loaded.spec)
    pages = hardware.pool_pages(config, loaded.spec, context_length, plan)
    progress("building the executor", 0, 0)
    executor = _build_executor(config, plan, loaded, pages, method, config.tensor_parallel_size)
    adapters = AdapterBook(
        executor, plan.executor, loaded.spec, limit=config.max_adapters, max_rank=config.max_adapter_rank
    )
    load_given(adapters, config.adapter)
    host_pages = _reserve_host(config, plan.executor, executor)
    vocabulary = _vocabulary(loaded.spec)
    grammars = build_grammars(config, loaded.spec, executor.vocab_size, vocabulary)
    backend = "none" if config.disable_radix_cache else config.radix_cache_backend
    cache = build_cache(backend, CacheContext(pages, config.page_size, config.eviction_policy, host_pages))
    drafter = _drafter(config, plan, loaded, executor, cache, progress)
    options = LoopOptions(
        _scheduler_options(config, context_length),
        loaded.spec.eos_ids,
        lease_budget=config.lease_budget,
        lease_tenant_budget=config.lease_tenant_budget,
    )
    handovers = build_handovers(config, plan.executor, executor, cache)
    watchers, metrics, tracing = _watchers(config, loaded)
    loop = _loop(chain, executor, ahead=config.overlap_schedule)(
        executor,
        cache,
        vocabulary,
        options,
        drafter=drafter,
        watch=watchers,
        grammars=grammars,
        handovers=handovers,
    )
    if metrics is not None:
        metrics.stats = loop.stats
        metrics.hooks = chain.hooks
    model = _describe(config, loaded, plan, executor, context_length, pages)
    if chain.mark:  # another worker must not continue what hooks have had a part in
        model = replace(model, numerics_id=model.numerics_id + chain.mark)
    used = components.used(config, plan, loaded.spec, backend, handovers, grammars)
    if method is not None:
        used["quantization_methods"] = method.name
    if drafter is not None:
        used["speculative_algorithms"] = config.speculative.algorithm
    return Engine(
        config,
        loop,
        model,
        executor,
        drafter,
        metrics,
        tracing,
        components.described([*used.items(), *(("hooks", one.name) for one in chain.hooks)]),
        grammars,
        chain,
        adapters,
    )


def _loop(chain: hooks.Chain, executor: Executor, *, ahead: bool) -> Callable[..., EngineLoop]:
    """The loop's class: with hooks in it only where there are some, else one step ahead where the executor can."""
    if not chain:
        return AheadLoop if ahead and isinstance(executor, QueueExecutor) else EngineLoop
    from branchline.engine.hooks.loop import HookedLoop

    return partial(HookedLoop, chain)


def _unchanged(loaded: LoadedModel) -> LoadedModel:
    return loaded


def _context_length(config: EngineConfig, spec: ModelSpec) -> int:
    length = config.context_length or spec.context_length
    if length > spec.context_length:
        raise LoadError(
            f"context-length {length} is above the checkpoint's {spec.context_length}: lower it", field="context_length"
        )
    return length


def _watchers(config: EngineConfig, loaded: LoadedModel) -> tuple[Watch | None, Metrics | None, Tracing | None]:
    """What sees the loop's news, with the metrics and the tracing among it."""
    metrics = tracing = None
    if config.metrics_port is not None:
        from branchline.engine.service.metrics import Metrics

        metrics = Metrics()
    if config.otlp_endpoint:
        from branchline.engine.service import tracing as spans

        tracing = spans.start(config.otlp_endpoint, default_names(config.model, loaded.path)[0])
    watchers: list[Watch] = [one.news for one in (metrics, tracing) if one is not None]
    if len(watchers) < 2:
        return (watchers[0] if watchers else None), metrics, tracing

    def both(request: Request, delta: Delta, now: float) -> None:
        for watcher in watchers:
            watcher(request, delta, now)

    return both, metrics, tracing


def _drafter(
    config: EngineConfig,
    plan: hardware.Plan,
    loaded: LoadedModel,
    executor: Executor,
    cache: RadixCacheBackend,
    progress: Progress,
) -> Drafter | None:
    """What guesses tokens, with its own model if it needs one."""
    options = config.speculative
    if not options.algorithm:
        return None

    def draft_executor() -> Executor:
        from branchline.engine.model.load import load_model

        draft = load_model(options.draft_model, progress=progress)
        method = choose("auto", draft)
        draft = draft if method is None else method.open(draft)
        tokens = config.speculative_draft_tokens or executor.num_pages * config.page_size
        return _build_executor(config, plan, draft, max(tokens // config.page_size, 1), method)

    drafter = build_drafter(
        options.algorithm,
        DraftContext(
            options,
            page_size=config.page_size,
            num_pages=executor.num_pages,
            vocab_size=executor.vocab_size,
            block_hashes=cache.block_hashes,
            draft_executor=draft_executor if options.draft_model else None,
            hidden_size=loaded.spec.hidden,
        ),
    )
    if drafter.wants_hidden and not hasattr(executor, "hidden"):
        drafter.close()
        raise LoadError(
            f"speculative-algorithm {options.algorithm!r} needs hidden states, which the executor {plan.executor!r} "
            "does not give: use --executor torch",
            field="speculative_algorithm",
        )
    return drafter


def _build_executor(
    config: EngineConfig,
    plan: hardware.Plan,
    loaded: LoadedModel,
    pages: int,
    method: QuantizationMethod | None,
    ranks: int = 1,
) -> Executor:
    if (
        method is not None
        and plan.executor not in method.executors
        and plan.executor in ("native", "torch", "torch-cuda")
    ):
        raise LoadError(
            f"quantization {method.name!r} is not run by the executor {plan.executor!r}: use --executor "
            f"{method.executors[0]}",
            field="quantization",
        )
    extra = {} if method is None else {"quantization": method}
    factory = registry.executors.get(plan.executor)
    own: dict[str, object] = {"weight_dtype": plan.weight_dtype} if plan.executor == "native" else {}
    if plan.executor == "torch-cuda":
        from branchline.engine.executor.cuda.build import CudaOptions, on_ranks

        own["options"] = CudaOptions.of(config)
        if ranks > 1:
            factory = on_ranks(ranks, os.environ)
    executor = factory(
        loaded,
        device=plan.device,
        dtype=plan.dtype,
        num_pages=pages,
        page_size=config.page_size,
        threads=config.threads or None,
        attention_backend=plan.attention_backend,
        **extra,
        **own,
    )
    registry.executors.verify(plan.executor, executor)
    return executor  # type: ignore[return-value]


def _reserve_host(config: EngineConfig, name: str, executor: Executor) -> int:
    """Pages of the host tier, their memory reserved."""
    if not config.host_cache_gib:
        return 0
    if not isinstance(executor, HostExecutor):
        raise LoadError(f"executor {name} has no host tier: leave host-cache-gib out", field="host_cache_gib")
    size, room = config.host_cache_gib * 2**30, hardware.free_memory()
    if size > room:
        raise LoadError(
            f"host-cache-gib {config.host_cache_gib:g} is above the {room / 2**30:.1f} GiB that are free: lower it",
            field="host_cache_gib",
        )
    pages = int(size // executor.page_bytes)
    if pages < 1:
        raise LoadError(
            f"host-cache-gib {config.host_cache_gib:g} holds no page of {executor.page_bytes} bytes: raise it, or "
            "leave it out",
            field="host_cache_gib",
        )
    executor.reserve_host(pages)
    return pages


def build_handovers(config: EngineConfig, name: str, executor: Executor, cache: RadixCacheBackend) -> Handovers | None:
    """What hands pages over to other workers and takes theirs; None where nothing is shared or nothing can be copied.

    Raises LoadError for a role that the executor can't have, or a transfer backend that does not work here.
    """
    if not cache.shares:
        return None
    if not isinstance(executor, PageExecutor):
        if config.role != "both":
            raise LoadError(f"executor {name} can't copy its pages out: leave role out", field="role")
        return None
    chosen = config.kv_transfer_backend
    if config.role == "both" and chosen == "auto":
        chosen = "stream"  # costs nothing until somebody pulls
    context = TransferContext(
        host=hardware.reachable(config.host),
        held_bytes=config.kv_transfer_buffer << 20,
        piece_bytes=max(PIECE_BYTES, executor.page_bytes),
        timeout_s=config.kv_transfer_timeout,
        protocol=config.kv_transfer_protocol,
    )
    return Handovers(cache, executor, build_backends(chosen, context), config.kv_transfer_timeout)


def build_grammars(
    config: EngineConfig, spec: ModelSpec, vocab_size: int, vocabulary: _native.Vocabulary
) -> Manager | None:
    """What compiles constraints, its process started; None if constraints are switched off.

    Raises LoadError if a backend does not work with this model.
    """
    if config.grammar_backend == "none":
        return None
    chosen = registry.grammar_backends.names() if config.grammar_backend == "auto" else (config.grammar_backend,)
    context = GrammarContext(spec.tokenizer.json, vocab_size, spec.eos_ids)
    if config.grammar_backend == "auto":
        chosen = tuple(name for name in chosen if _is_installed(name))
    backends = {name: build_backend(name, context) for name in chosen}
    bounds = Bounds(wall_s=config.grammar_timeout, memory_bytes=config.grammar_memory << 20)
    hearth = Hearth(context, chosen, bounds, config.plugin, config.plugins_disable)
    try:
        hearth.start()
    except OSError as error:
        hearth.close()
        raise LoadError(
            f"the process that compiles constraints can't be started: {error}; --grammar-backend none goes without it",
            field="grammar_backend",
        ) from error
    kept = ManagerOptions(tenant_bytes=config.grammar_cache << 20)
    return Manager(hearth, backends, kept, pieces=lazily(vocabulary, vocab_size))


def _is_installed(name: str) -> bool:
    """Whether what a grammar backend is made of is there: `auto` does without those that are not."""
    try:
        registry.grammar_backends.get(name)
    except registry.RegistryError as error:
        logger.info("grammar backend %s is left out: %s", name, error)
        return False
    return True


def _vocabulary(spec: ModelSpec) -> _native.Vocabulary:
    try:
        return _native.Vocabulary.from_tokenizer_json(spec.tokenizer.json)
    except ValueError as error:
        raise LoadError(f"the model's tokenizer can't be used: {error}", field="model") from None


def _scheduler_options(config: EngineConfig, context_length: int) -> SchedulerOptions:
    target = config.itl_target_ms
    return SchedulerOptions(
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        max_step_tokens=config.max_step_tokens,
        prefill_chunk=config.prefill_chunk or None,
        mixed_prefill_tokens=config.mixed_prefill_tokens or None,
        itl_target_s=None if target is None else target / 1e3 or math.inf,
        context_length=context_length,
        priority_aging_seconds=config.priority_aging,
        preemption=config.priority_preemption,
        forced_tokens=config.grammar_forced_tokens,
        mask_patience_s=config.grammar_patience_ms / 1e3,
    )


def _describe(
    config: EngineConfig, loaded: LoadedModel, plan: hardware.Plan, executor: Executor, context_length: int, pages: int
) -> ModelInfo:
    spec = loaded.spec
    return ModelInfo(
        model_path=config.model,
        served_names=config.served_model_name or default_names(config.model, loaded.path),
        architecture=spec.architecture,
        vocab_size=executor.vocab_size,
        context_length=context_length,
        page_size=config.page_size,
        dtype=plan.dtype,
        numerics_id=executor.numerics_id,
        weight_version=config.weight_version,
        max_request_tokens=min(pages * config.page_size, context_length),
        executor=plan.executor,
        output_promise=output_promise(plan),
        role=config.role,
        eos_ids=spec.eos_ids,
        bos_id=spec.bos_id,
        default_sampling=_sampling(spec),
        tokenizer_json=spec.tokenizer.json,
        chat_template=spec.tokenizer.chat_template,
        bos_token=spec.tokenizer.bos_token,
        eos_token=spec.tokenizer.eos_token,
        pad_token=spec.tokenizer.pad_token,
    )


def output_promise(plan: hardware.Plan) -> str:
    """What a repeated request may rely on, whatever else the worker does; see docs/determinism.md."""
    if plan.executor == "native" or (plan.executor == "torch-cuda" and plan.deterministic):
        return "bitwise"
    if plan.executor in ("torch", "torch-cuda") and plan.device == "cpu" and plan.dtype == "float32":
        return "near-ties"
    return "seed"


def _sampling(spec: ModelSpec) -> SamplingParams:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: getattr(spec.sampling, name) for name in names}
    return replace(SamplingParams(), **{name: value for name, value in given.items() if value is not None})


def default_names(reference: str, path: Path) -> tuple[str, ...]:
    """The name to list, then the reference itself: a hub id as it is, else the file's or folder's name."""
    is_hub = not reference.startswith("pypi:") and not Path(reference).expanduser().exists()
    if is_hub:
        return (reference,)
    stem = path.stem if path.suffix == ".gguf" else path.name
    if reference.startswith("pypi:") and path.is_dir():
        stem = reference.removeprefix("pypi:")  # a folder in a wheel has any name
    name = re.sub(r"[._-](?:[IQ]*Q\d\w*|F16|F32|BF16)$", "", stem, flags=re.IGNORECASE) or stem
    return tuple(dict.fromkeys((name, stem, reference)))
