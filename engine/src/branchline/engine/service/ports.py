"""What the service needs of the step loop. The loop's own module implements it; nothing here runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from branchline.engine.types import Delta, Request

Event = tuple[object, ...]  # as PageCache.drain_events gives them


class Sink(Protocol):
    """Takes one step's news of the requests that were submitted with it.

    Called on the loop's thread, once a step at most; must not block nor raise.
    """

    def __call__(self, step: int, deltas: Sequence[Delta], /) -> None:
        """Take the deltas; the list is the sink's afterwards."""


class EventSink(Protocol):
    """Takes the cache's changes. Called on the loop's thread; must not block nor raise."""

    def __call__(self, events: Sequence[Event], snapshot: bool, /) -> None:
        """The first call of a subscription has `snapshot` true and all that is resident."""


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Counters and gauges of the loop; see CacheStats and GetLoadResponse in engine.proto."""

    running: int = 0
    waiting: int = 0
    waiting_uncached_tokens: int = 0
    queue_age_ms: float = 0.0
    step_age_ms: float = 0.0
    steps: int = 0
    scheduler_ms_per_step: float = 0.0
    pages_total: int = 0
    pages_free: int = 0
    pages_evictable: int = 0
    pages_protected: int = 0
    pages_private: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lookups: int = 0
    hits: int = 0
    evicted_pages: int = 0
    retractions: int = 0


class Loop(Protocol):
    """The step loop, seen from the service. Every method may be called from any thread."""

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Raises an EngineError at once if it can't be taken."""

    def abort(self, request_id: str) -> bool:
        """End a request by its exact id; its terminal delta still comes. Whether it was alive."""

    def abort_all(self) -> int:
        """End every request; how many there were."""

    def flush(self) -> tuple[int, int]:
        """Drop evictable pages: (dropped, still held)."""

    def stats(self) -> LoopStats:
        """Current counters; cheap."""

    def subscribe_events(self, sink: EventSink) -> object:
        """Start a subscription; the token ends it. The snapshot and later batches have no gap between them."""

    def unsubscribe_events(self, token: object) -> None:
        """End a subscription; idempotent."""

    def close(self) -> None:
        """Stop the loop; live requests get a terminal delta. Idempotent."""
