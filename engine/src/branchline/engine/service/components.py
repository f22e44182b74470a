"""What an engine is made of, by kind, name and origin, as server info and `plugins` tell it."""

from __future__ import annotations

from collections.abc import Iterable

from branchline import registry
from branchline.engine.config import EngineConfig
from branchline.engine.grammar.manager import Manager
from branchline.engine.handover import Handovers
from branchline.engine.model.spec import ModelSpec
from branchline.engine.service.hardware import Plan


def used(
    config: EngineConfig,
    plan: Plan,
    spec: ModelSpec,
    cache: str,
    handovers: Handovers | None,
    grammars: Manager | None,
) -> dict[str, str]:
    """Kind → name of what every engine has; `cache` is the radix cache backend's."""
    names = {
        "models": spec.architecture,
        "executors": plan.executor,
        "attention_backends": plan.attention_backend,
        "radix_cache_backends": cache,
        "eviction_policies": config.eviction_policy,
    }
    if handovers is not None:
        names["kv_transfer_backends"] = next(iter(handovers.backends))
    if grammars is not None:
        names["grammar_backends"] = grammars.backends[0]
    if spec.fallback:
        del names["models"]  # none is registered
    if plan.executor in ("native", "transformers"):
        del names["attention_backends"]  # they have their own
    return names


def described(names: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Each as `kind=name (origin)`, with what it stands in place of."""
    return tuple(_described(kind, name) for kind, name in names)


def _described(kind: str, name: str) -> str:
    entry = next(one for one in registry.all_registries() if one.kind == kind).entry(name)
    replaced = f", in place of {entry.replaced}" if entry.replaced else ""
    return f"{kind}={name} ({entry.origin}{replaced})"
