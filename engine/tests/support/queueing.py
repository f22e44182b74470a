"""The tiny model behind a queue: a launched step is computed when it is collected, or when a later call needs it.

So whatever the host changes meanwhile that a step in flight still reads (a page given away, a table rewritten) shows in
the answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from branchline.engine.types import ForwardBatch, PageMove, RowPlan, RowResult
from tiny import TinyExecutor


@dataclass(eq=False)
class Flight:
    """A launched step; `results` once it was computed."""

    batch: ForwardBatch
    plans: list[RowPlan]
    results: list[RowResult] | None = None
    error: Exception | None = None


class QueueTiny(TinyExecutor):
    """QueueExecutor over the tiny model."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(num_pages, page_size)
        self.queue: deque[Flight] = deque()
        self.tokens: list[int] = []
        self.launched = 0
        self.ahead = 0  # steps launched while another was in flight
        self.in_flight: list[Flight] = []

    def launch(self, batch: ForwardBatch, plans: list[RowPlan]) -> Flight:
        """See QueueExecutor."""
        assert len(self.in_flight) < 2, "at most two steps in flight"
        flight = Flight(batch, [replace(plan) for plan in plans])
        self.ahead += bool(self.in_flight)
        self.launched += 1
        self.queue.append(flight)
        self.in_flight.append(flight)
        return flight

    def collect(self, flight: Flight) -> list[RowResult]:
        """See QueueExecutor."""
        assert self.in_flight.pop(0) is flight, "collected in the order of launches"
        while flight.results is None and flight.error is None:
            self._compute(self.queue.popleft())
        if flight.error is not None:
            raise flight.error
        assert flight.results is not None
        return flight.results

    def _compute(self, flight: Flight) -> None:
        batch = flight.batch
        if batch.ahead is not None:
            known = [self.tokens[at] if at >= 0 else -1 for at in batch.ahead.tolist()]
            ids = np.where(batch.ahead >= 0, np.array(known, dtype=np.int32), batch.token_ids)
            batch = replace(batch, token_ids=ids.astype(np.int32))
        try:
            flight.results = super().sample(super().run(batch), flight.plans)
            self.tokens = [result.token_id for result in flight.results]
        except Exception as error:
            flight.error = error
            self.tokens = [0] * len(flight.plans)

    def _drain(self) -> None:
        while self.queue:
            self._compute(self.queue.popleft())

    def run(self, batch: ForwardBatch) -> object:  # type: ignore[override]
        """See Executor; whatever was launched comes first."""
        self._drain()
        return super().run(batch)

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """See HostExecutor; in its place among the steps."""
        self._drain()
        super().move_pages(moves)
