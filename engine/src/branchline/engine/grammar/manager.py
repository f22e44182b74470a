"""Compiles constraints for requests without ever making the step loop wait.

Equal constraints that are asked for at once are compiled once; what is compiled or refused is remembered (`store`).
A child process compiles within limits, then the engine loads the result on a thread of its own. Whoever asks is
called back exactly once, or not at all after it cancelled. Knows nothing of sequences or steps.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from branchline.engine.errors import EngineError, InternalError, InvalidArgument, Unavailable
from branchline.engine.grammar.base import BaseGrammarBackend, BaseGrammarObject
from branchline.engine.grammar.hearth import Compiler, Report
from branchline.engine.grammar.least import Ways
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.grammar.store import Refusal, Store
from branchline.engine.types import GrammarAsk

logger = logging.getLogger(__name__)

Ready = Callable[["Compiled | EngineError"], None]

PER_ENTRY = 64 << 10  # bytes charged beside the text: a matcher's own state
PER_BYTE = 24  # bytes charged a byte of compiled text
INVALID_S = 600.0


@dataclass(frozen=True, slots=True)
class Compiled:
    """A constraint ready for sequences: each takes a copy.

    `compile_ms` is what this request waited for, or 0; `reason` why this backend enforces it; `way` a short run of
    tokens that is a whole text of it, if one is known; `least` a number of tokens that no text goes below.
    """

    grammar: BaseGrammarObject
    backend: str
    compile_ms: float
    reason: str = ""
    way: list[int] | None = None
    least: int = 0


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Seconds that a timeout is remembered, bytes of compiled constraints a tenant, and tenants."""

    retry_after_s: float = 60.0
    tenant_bytes: int = 64 << 20
    tenants: int = 64


@dataclass(slots=True)
class Counters:
    """Sums since start."""

    asked: int = 0
    compiled: int = 0
    hits: int = 0
    refused: int = 0
    timeouts: int = 0


@dataclass(slots=True, eq=False)
class _Flight:
    """One compilation and those who wait for it."""

    ask: GrammarAsk
    tenants: dict[int, str] = field(default_factory=dict)
    waiters: dict[int, Ready] = field(default_factory=dict)
    started_s: float = 0.0
    number: int | None = None
    over: bool = False
    backends: tuple[str, ...] = ()  # that may be asked, the first now
    refused: Report | None = None  # by the first one, if it was asked before


class Manager:
    """Thread-safe. Callbacks may run on the caller's thread (what is remembered) or on one of the manager's."""

    def __init__(
        self,
        compiler: Compiler,
        backends: Mapping[str, BaseGrammarBackend],
        options: ManagerOptions = ManagerOptions(),
        *,
        clock: Callable[[], float] = time.monotonic,
        pieces: Callable[[], Pieces] | None = None,
    ) -> None:
        self._ways = None if pieces is None else Ways(pieces)
        self.counters = Counters()
        self._compiler = compiler
        self._backends = backends
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._store: Store[Compiled] = Store(options.tenant_bytes, options.tenants)
        self._flights: dict[Any, _Flight] = {}
        self._numbers = 0
        self._loader = ThreadPoolExecutor(2, thread_name_prefix="grammar-load")

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of the backends, the default first."""
        return tuple(self._backends)

    def request(self, ask: GrammarAsk, tenant: str, ready: Ready) -> Callable[[], None]:
        """Ask for a constraint. `ready` gets it or its refusal; the function returned cancels."""
        backends = self._choose(ask)
        if isinstance(backends, EngineError):
            ready(backends)
            return _nothing
        key = (backends, ask.kind, hashlib.sha256(ask.text.encode("utf-8", "surrogatepass")).digest())
        with self._lock:
            self.counters.asked += 1
            now = self._clock()
            known = self._store.get(key, tenant, now)
            if known is None:
                return self._join(key, backends, ask, tenant, ready)
            self.counters.hits += 1
        ready(known.error if isinstance(known, Refusal) else replace(known, compile_ms=0.0))
        return _nothing

    def check(self, schema: str, text: str, ready: Callable[[bool | None], None]) -> None:
        """Tell whether a text is a value of a JSON schema; None if that can't be told. Never on the caller's thread."""

        def done(report: Report) -> None:
            valid = report.get("valid")
            if valid is None:
                logger.warning("a best-effort answer could not be checked: %s", report)
            ready(valid if isinstance(valid, bool) else None)

        self._loader.submit(self._compiler.check, schema, text, done)

    def close(self) -> None:
        """Stop compiling; whoever still waits is told. Idempotent."""
        self._compiler.close()
        self._loader.shutdown(wait=True, cancel_futures=True)

    def _choose(self, ask: GrammarAsk) -> tuple[str, ...] | EngineError:
        """The backends that may enforce a constraint, in their order."""
        if ask.backend in ("", "auto"):
            able = tuple(name for name, backend in self._backends.items() if ask.kind in backend.kinds)
            return able or GrammarUnsupported(ask.kind.value, "this worker has no grammar backend for it")
        if ask.backend not in self._backends:
            known = ", ".join(self._backends) or "none"
            return InvalidArgument(
                f"grammar backend {ask.backend!r} is not in use here: use one of {known}", field="grammar.backend"
            )
        if ask.kind not in self._backends[ask.backend].kinds:
            return GrammarUnsupported(ask.kind.value, "it has no such constraint", backend=ask.backend)
        return (ask.backend,)

    def _reason(self, flight: _Flight, backend: str) -> str:
        """Why a backend enforces a constraint."""
        if flight.ask.backend not in ("", "auto"):
            return "the request names it"
        if flight.refused is not None:
            return f"the first that enforces it exactly: {flight.refused['unsupported']}"
        return f"the first in use for {flight.ask.kind.value}"

    def _join(
        self, key: Any, backends: tuple[str, ...], ask: GrammarAsk, tenant: str, ready: Ready
    ) -> Callable[[], None]:
        """Wait with others for one compilation. Called with the lock held."""
        self._numbers += 1
        waiter = self._numbers
        flight = self._flights.get(key)
        fresh = flight is None
        if flight is None:
            flight = self._flights[key] = _Flight(ask, started_s=self._clock(), backends=backends)
        flight.waiters[waiter], flight.tenants[waiter] = ready, tenant
        if fresh:
            self.counters.compiled += 1
            # Off this thread: the loop calls, and writing to the process may wait.
            self._loader.submit(self._begin, key, flight, backends[0])
        return lambda: self._cancel(key, flight, waiter)

    def _begin(self, key: Any, flight: _Flight, backend: str) -> None:
        number = self._compiler.submit(
            backend, flight.ask.kind, flight.ask.text, lambda report: self._reported(key, flight, backend, report)
        )
        with self._lock:
            flight.number = number
            unwanted = not flight.waiters and not flight.over
        if unwanted:
            self._compiler.cancel(number)

    def _cancel(self, key: Any, flight: _Flight, waiter: int) -> None:
        with self._lock:
            if flight.waiters.pop(waiter, None) is None or flight.waiters:
                return
            number = flight.number
            flight.over = number is not None
            if self._flights.get(key) is flight:
                del self._flights[key]
        if number is not None:
            self._loader.submit(self._compiler.cancel, number)

    def _reported(self, key: Any, flight: _Flight, backend: str, report: Report) -> None:
        """The child's report: load what it made, or tell why there is nothing. On the compiler's thread."""
        if "unsupported" in report and self._further(key, flight, report):
            return
        if "compiled" not in report:
            if "unsupported" in report and flight.refused is not None:
                report = flight.refused
            self._settle(key, flight, _error(report, backend, self._options.retry_after_s), 0)
            return
        self._loader.submit(self._load, key, flight, backend, str(report["compiled"]))

    def _further(self, key: Any, flight: _Flight, refusal: Report) -> bool:
        """Ask the next backend, if there is one and anybody still waits."""
        with self._lock:
            if flight.over or len(flight.backends) < 2:
                return False
            flight.backends = flight.backends[1:]
            flight.refused = flight.refused or refusal  # the first one's words: it is asked for most
            flight.number = None
        self._loader.submit(self._begin, key, flight, flight.backends[0])
        return True

    def _load(self, key: Any, flight: _Flight, backend: str, compiled: str) -> None:
        try:
            grammar = self._backends[backend].load(flight.ask.kind, compiled)
            grammar.fill_vocab_mask(grammar.allocate_vocab_mask(1, grammar.vocab_size), 0)  # copies inherit it
        except EngineError as error:
            self._settle(key, flight, error, 0)
        except Exception as error:
            failure = InternalError(f"grammar backend {backend!r} failed: {type(error).__name__}: {error}")
            self._settle(key, flight, failure, 0)
        else:
            way, least = (None, 0) if self._ways is None else self._ways.of(flight.ask, grammar)
            waited_ms = (self._clock() - flight.started_s) * 1e3
            made = Compiled(grammar, backend, waited_ms, self._reason(flight, backend), way, least)
            self._settle(key, flight, made, PER_ENTRY + PER_BYTE * len(compiled))

    def _settle(self, key: Any, flight: _Flight, outcome: Compiled | EngineError, size: int) -> None:
        """Remember and tell everybody who still waits."""
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.over = True
            waiters, tenants = flight.waiters, flight.tenants
            flight.waiters = {}
            now = self._clock()
            remembered: Compiled | Refusal | None = None
            if isinstance(outcome, Compiled):
                remembered = outcome
            elif isinstance(outcome, InvalidArgument):
                self.counters.refused += 1
                remembered, size = Refusal(outcome, now + INVALID_S), 1024 + 2 * len(outcome.message)
            elif isinstance(outcome, Unavailable):
                self.counters.timeouts += 1
                remembered, size = Refusal(outcome, now + self._options.retry_after_s), 1024
            if remembered is not None:
                for waiter in waiters or list(tenants)[:1]:
                    if self._store.get(key, tenants[waiter], now) is None:
                        self._store.put(key, tenants[waiter], remembered, size)
        for ready in waiters.values():
            ready(outcome)


def _error(report: Report, backend: str, retry_after_s: float) -> EngineError:
    """A child's report as a refusal."""
    if "unsupported" in report:
        error = GrammarUnsupported(str(report["keyword"]), "", backend=backend)
        error.message, error.pointer = str(report["unsupported"]), report["pointer"]
        error.args = (error.message,)
        return error
    if "invalid" in report:
        invalid = GrammarInvalid(str(report["invalid"]))
        invalid.pointer = report["pointer"]
        return invalid
    if "limit" in report and report["limit"] in ("time", "memory"):
        return Unavailable(
            f"the constraint was not compiled within the limit of {report['limit']}: simplify it, or try again in "
            f"{retry_after_s:g} s",
            field="grammar",
            retry_after_ms=int(retry_after_s * 1e3),
        )
    return InternalError(f"the constraint can't be compiled: {report.get('fault', report.get('limit', 'no report'))}")


def _nothing() -> None:
    """Cancels what has its answer."""
