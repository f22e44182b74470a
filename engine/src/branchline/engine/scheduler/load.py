"""The picture of the loop that other threads read: cache, queue and step figures between two steps."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from branchline.engine.speculative.controller import DraftCounts

if TYPE_CHECKING:
    from branchline.engine.scheduler.scheduler import Scheduler

STEP_SAMPLES = 1024  # steps over which the scheduler's own time is averaged
END_SAMPLES = 32  # request ends over which the pace is measured


class LoopStats(NamedTuple):
    """A consistent picture between two steps. Pages: the four states sum to `pages_total`.

    A tuple, as one is made in every step.
    """

    page_size: int = 0
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
    preemptions: int = 0
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    running: int = 0
    waiting: int = 0
    waiting_uncached_tokens: int = 0
    queue_age_ms: float = 0.0
    step_age_ms: float = 0.0
    steps: int = 0
    scheduler_ms_per_step: float = 0.0
    pages_leased: int = 0
    leases: int = 0
    lease_budget_pages: int = 0
    host_pages_total: int = 0
    host_pages_used: int = 0
    host_stored_pages: int = 0
    host_fetched_pages: int = 0


class OwnTime:
    """Running mean of the scheduler's own milliseconds a step."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=STEP_SAMPLES)
        self._sum = 0.0

    def add(self, milliseconds: float) -> None:
        """Count one step."""
        if len(self._samples) == STEP_SAMPLES:
            self._sum -= self._samples[0]
        self._samples.append(milliseconds)
        self._sum += milliseconds

    def mean(self) -> float:
        """Over the latest STEP_SAMPLES steps; 0 before the first."""
        return self._sum / len(self._samples) if self._samples else 0.0


class Pace:
    """How fast requests end; tells a refused one when a place may be free."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=END_SAMPLES)

    def end(self, now: float) -> None:
        """One request ended."""
        self._ends.append(now)

    def retry_after_ms(self) -> int:
        """Mean time between ends, in [50, 30,000] ms; 1,000 if unknown."""
        if len(self._ends) < 2:
            return 1000
        between = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(max(int(between * 1e3), 50), 30_000)


def picture(
    scheduler: Scheduler, pages: tuple[int, int, int, int], now: float, evicted: int, steps: int, own: OwnTime
) -> LoopStats:
    """The state between two steps. `pages`: free, evictable, protected, private."""
    counters, tables = scheduler.counters, scheduler.pages
    host = tables.cache.host_counters()
    oldest, leases = scheduler.waiting.oldest_s(), scheduler.leasing.book
    drafts = DraftCounts() if scheduler.drafter is None else scheduler.drafter.counts
    return LoopStats(
        page_size=tables.page_size,
        pages_total=tables.num_pages,
        pages_free=pages[0],
        pages_evictable=pages[1],
        pages_protected=pages[2],
        pages_private=pages[3],
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        lookups=counters.lookups,
        hits=counters.hits,
        evicted_pages=evicted,
        retractions=counters.retractions,
        preemptions=counters.preemptions,
        draft_steps=drafts.steps,
        drafted_tokens=drafts.drafted,
        accepted_tokens=drafts.accepted,
        running=scheduler.running,
        waiting=len(scheduler.waiting),
        waiting_uncached_tokens=scheduler.waiting_uncached_tokens(),
        queue_age_ms=0.0 if oldest is None else (now - oldest) * 1e3,
        pages_leased=leases.pages,
        leases=len(leases),
        lease_budget_pages=leases.budgets.worker,
        host_pages_total=host[0],
        host_pages_used=host[1],
        host_stored_pages=host[2],
        host_fetched_pages=host[3],
        steps=steps,
        scheduler_ms_per_step=own.mean(),
    )
