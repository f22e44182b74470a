"""The scheduler's parts without a loop: what makes sequences, and the pages under them."""

from __future__ import annotations

from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.scheduler import SchedulerOptions, Sequence
from branchline.engine.scheduler.intake import Intake
from branchline.engine.scheduler.pages import PageTables
from branchline.engine.types import LogprobParams, Request, SamplingParams
from harness import EOS, vocabulary
from tiny import TinyExecutor


class Parts:
    """A cache, page tables over it and an intake that makes sequences for them."""

    def __init__(self, pages: int = 8, page_size: int = 4) -> None:
        self.cache = build_cache("reference", CacheContext(pages, page_size))
        self.tables = PageTables(self.cache, pages, page_size)
        executor = TinyExecutor(pages, page_size)
        self.intake = Intake(executor, self.cache, vocabulary(), SchedulerOptions(), (EOS,), lambda: 1)

    def sequence(self, prompt: list[int], start: int | None = None, priority: int = 0, **sampling: object) -> Sequence:
        """Sequence 0 of a new request."""
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        request = Request("r", tuple(prompt), params, LogprobParams(input_start=start), priority=priority)
        return self.intake.admit(request, lambda step, deltas: None, 0.0).sequences[0]
