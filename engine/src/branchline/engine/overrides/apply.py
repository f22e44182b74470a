"""Runs the writers in order, checks what they wrote, and keeps who wrote what."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from branchline import registry
from branchline.engine import options
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.overrides import builtin
from branchline.engine.overrides.base import ModelFacts, ModelOverride

logger = logging.getLogger(__name__)

FIXED = frozenset(
    {
        "model", "plugin", "plugins_disable", "parent_pid", "log_level", "host", "port", "token", "tls_cert", "tls_key",
        "tls_client_ca", "metrics_port", "otlp_endpoint",
    }
)  # fmt: skip
"""Options that no checkpoint may decide: they are used before it is known, or are none of its business."""


@dataclass(frozen=True, slots=True)
class Writer:
    """One value of an option and where it comes from."""

    source: str
    value: object


def written(
    facts: ModelFacts, constants: Mapping[str, Mapping[str, object]] | None = None
) -> Iterator[tuple[str, Writer]]:
    """(option, writer) of everything written for a checkpoint, in order. Raises LoadError for a faulty provider."""
    table = builtin.CONSTANTS if constants is None else constants
    for name, value in table.get(facts.architecture, {}).items():
        yield _checked(name, Writer(f"constant table ({facts.architecture})", value))
    exact, predicates = _providers()
    for name, origin, provider in exact:
        if facts.architecture in provider.architectures:
            yield from _of(name, origin, provider, facts)
    for name, origin, provider in predicates:
        yield from _of(name, origin, provider, facts)


def _providers() -> tuple[list[tuple[str, str, ModelOverride]], list[tuple[str, str, ModelOverride]]]:
    """Exact and predicate providers, each in the order of registration."""
    exact: list[tuple[str, str, ModelOverride]] = []
    predicates: list[tuple[str, str, ModelOverride]] = []
    for entry in registry.model_overrides.in_order():
        if entry.failure:
            continue  # reported at the start and by `branchline plugins`; named plugins end the start before this
        try:
            made = cast("ModelOverride", registry.model_overrides.get(entry.name)())
            registry.model_overrides.verify(entry.name, made)
        except registry.RegistryError as error:
            logger.error("%s; it is left out", error)
            continue
        (exact if made.architectures else predicates).append((entry.name, str(entry.origin), made))
    return exact, predicates


def _of(name: str, origin: str, provider: ModelOverride, facts: ModelFacts) -> Iterator[tuple[str, Writer]]:
    kind = "exact" if provider.architectures else "predicate"
    try:
        values = dict(provider.options(facts)) if provider.applies(facts) else {}
    except Exception as error:
        raise LoadError(f"model override {name!r} of {origin} failed: {type(error).__name__}: {error}") from error
    for option, value in values.items():
        yield _checked(option, Writer(f"{kind} provider {name} ({origin})", value))


def _checked(name: str, writer: Writer) -> tuple[str, Writer]:
    rows = {row.name: row for row in options.table(EngineConfig)}
    if name not in rows or name in FIXED:
        reason = "no checkpoint may decide it" if name in FIXED else "there is no such option"
        raise LoadError(f"{writer.source} writes option {name!r}: {reason}")
    faults = options.value_faults(rows[name], writer.value)
    if faults:
        raise LoadError(f"{writer.source} writes a wrong value: {faults[0]}")
    return name, writer


def apply(config: EngineConfig, facts: ModelFacts, given: Collection[str]) -> EngineConfig:
    """The options with every override that the user did not decide. Raises LoadError if they contradict."""
    values: dict[str, Writer] = {}
    for name, writer in written(facts):
        if name not in given:
            values[name] = writer
    if not values:
        return config
    for name, writer in values.items():
        logger.info("option %s = %r by %s", name, writer.value, writer.source)
    changes: dict[str, Any] = {name: writer.value for name, writer in values.items()}
    made = dataclasses.replace(config, **changes)
    faults = made.faults()
    if faults:
        sources = ", ".join(sorted({writer.source for writer in values.values()}))
        raise LoadError(f"model overrides of {sources} contradict the options: {'; '.join(faults)}")
    return made


def explain(facts: ModelFacts, user: Mapping[str, Sequence[Writer]]) -> dict[str, list[Writer]]:
    """Every option's writers in order, the winner last: default, overrides, the user's file, environment, flags."""
    found = {row.name: [Writer("default", row.default)] for row in options.table(EngineConfig)}
    for name, writer in written(facts):
        found[name].append(writer)
    for name, writers in user.items():
        found[name].extend(writers)
    return found
