"""Puts the registered hooks around the functions of their points, measures them, and words their failures.

Owns order, the one REPLACE of a point, and cost. A point without hooks gets its own function back, untouched. Must
not know what a point does.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from branchline import registry
from branchline.engine.errors import EngineError, InternalError, LoadError
from branchline.engine.hooks.points import POINTS, Fault, Mode, Point
from branchline.registry import Entry, RegistryError

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Cost:
    """What one hook has cost so far, without what it called. `seconds` is wall time."""

    calls: int = 0
    seconds: float = 0.0
    failures: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, seconds: float, failed: bool) -> None:
        """One call, from any thread."""
        with self.lock:
            self.calls += 1
            self.seconds += seconds
            self.failures += failed


@dataclass(frozen=True, slots=True)
class Placed:
    """One hook at its point."""

    name: str
    origin: str
    point: Point
    mode: Mode
    priority: int
    function: Callable[..., Any]
    cost: Cost = field(default_factory=Cost)

    def call(self, *given: Any) -> Any:
        """Run it, measured. Its own exceptions are worded by the point; an EngineError stays as it is."""
        begun = time.perf_counter()
        inner: list[float] = []
        passed: list[Exception] = []
        if self.mode is Mode.AROUND:
            given = (_proceed(given[0], inner, passed), *given[1:])
        failed = True
        try:
            result = self.function(*given)
            failed = False
        except EngineError:
            raise
        except Exception as error:
            if error in passed:
                failed = False
                raise
            raise self._failure(error) from error
        finally:
            self.cost.add(time.perf_counter() - begun - sum(inner), failed)
        return result

    def _failure(self, error: Exception) -> EngineError:
        words = f"hook {self.name!r} of {self.origin} failed at {self.point.name}: {type(error).__name__}: {error}"
        if self.point.fault is Fault.START:
            return LoadError(f"{words}; repair it, or leave it out by --plugins-disable {self.name}")
        return InternalError(words)


def _proceed(function: Callable[..., Any], inner: list[float], passed: list[Exception]) -> Callable[..., Any]:
    """What an AROUND hook goes on with; its time and its exceptions are not the hook's."""

    def proceed(*given: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*given)
        except Exception as error:
            passed.append(error)
            raise
        finally:
            inner.append(time.perf_counter() - begun)

    return proceed


class Chain:
    """The hooks of one engine, in order. Immutable but for the costs."""

    def __init__(self, placed: Iterable[Placed] = ()) -> None:
        ordered = sorted(placed, key=lambda one: -one.priority)  # stable: then as registered
        self.hooks = tuple(ordered)
        self._by_point: dict[str, list[Placed]] = {}
        for one in ordered:
            self._by_point.setdefault(one.point.name, []).append(one)
        for here in self._by_point.values():
            _check_replace(here)

    def __bool__(self) -> bool:
        return bool(self.hooks)

    def at(self, point: str) -> list[Placed]:
        """The hooks of a point, in order."""
        return list(self._by_point.get(point, ()))

    @property
    def mark(self) -> str:
        """Tells apart engines whose hooks may change what is computed; empty if none can."""
        names = [
            f"{one.name} {one.origin}"
            for one in self.hooks
            if one.point.name in ("scheduler.step", "sampling", "weights.loaded")
            and one.mode in (Mode.AROUND, Mode.REPLACE)
        ]
        return "+hooks:" + hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest() if names else ""

    def bind(self, point: str, function: F) -> F:
        """The function with the point's hooks around it; the very same function if there are none."""
        here = self.at(point)
        if not here:
            return function
        before, after, around, replace = (
            [one for one in here if one.mode is mode] for mode in (Mode.BEFORE, Mode.AFTER, Mode.AROUND, Mode.REPLACE)
        )
        core: Callable[..., Any] = replace[0].call if replace else function
        for one in reversed(around):  # the first one stands outermost
            core = _around(one, core)

        def run(*given: Any) -> Any:
            for one in before:
                one.call(*given)
            result = core(*given)
            for one in after:
                one.call(result, *given)
            return result

        return cast("F", run)


def _around(hook: Placed, core: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: hook.call(core, *given)


def _check_replace(here: list[Placed]) -> None:
    replacing = [one for one in here if one.mode is Mode.REPLACE]
    if len(replacing) > 1:
        both = " and ".join(f"{one.name!r} of {one.origin}" for one in replacing)
        raise LoadError(
            f"hooks {both} all replace {here[0].point.name}: load only one of them, or leave one out by "
            "--plugins-disable"
        )


def assemble() -> Chain:
    """All registered hooks, made and checked. Raises LoadError if one does not fit its point.

    One that can't be imported is logged and shown by `branchline plugins`; if the user named it, the start has ended.
    """
    placed: list[Placed] = []
    for entry in registry.hooks.in_order():
        try:
            factory: Callable[..., Any] = registry.hooks.get(entry.name)
        except RegistryError as error:
            logger.error("%s", error)
            continue
        placed.append(_place(entry, factory))
    return Chain(placed)


def _place(entry: Entry[Callable[..., object]], factory: Callable[..., Any]) -> Placed:
    words = f"hook {entry.name!r} of {entry.origin}"
    way_out = f"; repair it, or leave it out by --plugins-disable {entry.name}"
    try:
        hook = factory()
        registry.hooks.verify(entry.name, hook)
    except Exception as error:
        raise LoadError(f"{words} can't be made: {type(error).__name__}: {error}{way_out}") from error
    found = faults(hook)
    if found:
        raise LoadError(f"{words} {'; '.join(found)}{way_out}")
    return Placed(entry.name, str(entry.origin), POINTS[hook.point], Mode(hook.mode), hook.priority, hook)


def faults(hook: Any) -> list[str]:
    """What is wrong with a made hook, one sentence each."""
    point = POINTS.get(hook.point)
    if point is None:
        return [f"stands at {hook.point!r}, which is no hook point; there are: {', '.join(POINTS)}"]
    if hook.point_version != point.version:
        return [f"is written for {point.name} version {hook.point_version!r} and this is version {point.version}"]
    if hook.mode not in point.modes:
        return [f"has mode {hook.mode!r}; {point.name} takes: {', '.join(point.modes)}"]
    if not isinstance(hook.priority, int):
        return [f"has priority {hook.priority!r}, which is no integer"]
    if not callable(hook):
        return ["can't be called: give it __call__"]
    given = point.arguments(Mode(hook.mode))
    try:
        inspect.signature(hook).bind(*given)
    except (TypeError, ValueError):
        return [f"must take ({', '.join(given)}) as the {hook.mode} hook of {point.name}"]
    return []
