"""A loop that keeps the device busy: the next decode step is queued before the results of the one before are read.

Built in the place of EngineLoop for executors that can queue (QueueExecutor). Steps whose successor depends on their
results (prompts under way, somebody to admit, constraints, penalties, guesses) run as they do without it. Output is
the same; a sequence that ends by a token or a string costs one row computed for nothing. See docs/adr/0047.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

from branchline.engine.loop import EngineLoop
from branchline.engine.loop_faults import isolate
from branchline.engine.scheduler.batch import Step
from branchline.engine.scheduler.pages import move_pages
from branchline.engine.types import QueueExecutor, RowResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was queued and is not read yet. `epoch`: frees of its pages wait until it is over."""

    step: Step
    handle: object
    epoch: int


class AheadLoop(EngineLoop):
    """An EngineLoop that is one step ahead where it can be."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._queue = cast("QueueExecutor", self._executor)
        self._flight: Flight | None = None
        self._epoch = 0
        self._read_s = 0.0  # when results were last read

    def step(self) -> bool:
        """See EngineLoop. A step in flight that nobody is left to wait for is over when this returns."""
        ran = super().step()
        self._settle()
        return ran

    def _settle(self) -> None:
        if self._flight is not None and all(row.sequence.finished for row in self._flight.step.rows):
            self._drop()

    def _schedule(self) -> Step | None:
        """The step in flight, if there is one: it was chosen a step ago."""
        self._settle()
        return super()._schedule() if self._flight is None else self._flight.step

    def _run_and_sample(self, step: Step) -> list[RowResult] | None:
        """Queue what follows, then read this step's results."""
        flight, self._flight = self._flight, None
        try:
            following = self._scheduler.ahead(step)
            if flight is None and following is None:
                return super()._run_and_sample(step)
            # One in flight began, as far as anybody can see, when the one before was read.
            started, self._running_step = self._clock() if flight is None else self._read_s, step
            try:
                flight = flight or self._launch(step)
                if following is not None:
                    self._scheduler.forecast.step()
                    self._flight = self._launch(following)
                results = self._queue.collect(flight.handle)
                if len(results) != len(step.plans):
                    raise RuntimeError(f"{len(results)} results for {len(step.plans)} plans")
            finally:
                self._running_step = None
        except Exception as error:
            logger.exception("the executor failed in step %d with %d sequences", self._steps, len(step.rows))
            self._drop()
            isolate(step, error, self._scheduler, lambda one: self._sample(self._run(one), one), self._commit)
            return None
        self._retire(flight)
        now = self._clock()
        self._scheduler.learn(step, now - started)
        self._read_s = now
        return results

    def _launch(self, step: Step) -> Flight:
        self._epoch += 1
        move_pages(self._cache, self._executor)  # of pages taken since the last launch
        flight = Flight(step, self._queue.launch(step.batch, step.plans), self._epoch)
        self._scheduler.pages.epoch = self._epoch
        return flight

    def _retire(self, flight: Flight) -> None:
        """A step is over: pages that were given back while it ran are free."""
        self._cache.retire(flight.epoch)
        self._scheduler.pages.epoch = 0 if self._flight is None else self._flight.epoch

    def _drop(self) -> None:
        """Wait for the step in flight and forget what it gave."""
        flight, self._flight = self._flight, None
        if flight is not None:
            try:
                self._queue.collect(flight.handle)
            except Exception as error:  # of a step that nobody wants any more; the next one will tell
                logger.warning("a step that was queued ahead failed: %s", error)
        self._cache.retire(self._epoch)
        self._scheduler.pages.epoch = 0
