"""Masks of a step's constrained rows, filled while the forward pass runs; sampling waits for them to a deadline.

Rows are found by their plan, never by place; rows without a constraint get no mask at all. A row whose mask can't be
filled is marked with its fault and loses its request, never its constraint. A row whose mask was not begun in time is
sampled without one and verified; one whose mask is late waits a step. Owns the masks and one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import IntEnum

from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.scheduler.batch import Row, Step
from branchline.engine.scheduler.faults import fault
from branchline.engine.scheduler.verifying import Sample, Verifier
from branchline.engine.types import I32, RowResult


class State(IntEnum):
    """Of one fill."""

    NEW = 0
    RUNNING = 1
    DONE = 2
    DROPPED = 3  # its row goes without


class Fill:
    """The masks of one row: its own token's and one after each draft token. `masks` is int32 [places, width]."""

    def __init__(self, row: Row, vocab_size: int) -> None:
        self.row = row
        self.masks: I32 = masks.allocate(1 + len(row.draft), vocab_size)
        self.state = State.NEW
        self.error: Exception | None = None
        self.ms = 0.0
        self._lock = threading.Lock()

    def turn(self, before: State, after: State) -> bool:
        """Go from one state to another; False if it is in neither."""
        with self._lock:
            if self.state is not before:
                return False
            self.state = after
            return True

    def run(self) -> None:
        """Fill, unless the row goes without."""
        if not self.turn(State.NEW, State.RUNNING):
            return
        begun = time.perf_counter()
        try:
            self._fill()
        except Exception as error:
            self.error = error
        self.ms = (time.perf_counter() - begun) * 1e3 / len(self.masks)
        self.turn(State.RUNNING, State.DONE)

    def _fill(self) -> None:
        """The mask of the row's own token and of each draft token's successor; the state is left as it was."""
        grammar = self.row.sequence.grammar
        assert grammar is not None, "only constrained rows come here"
        grammar.fill_vocab_mask(self.masks, 0)
        taken = 0
        try:
            for place, token in enumerate(self.row.draft, 1):
                taken += grammar.accept_token(token)
                grammar.fill_vocab_mask(self.masks, place)
        finally:
            grammar.rollback(taken)


class Masker:
    """`begin` before the forward pass, `finish` before sampling. The loop's thread calls.

    `patience_s` is how long `finish` waits after the forward pass; None for as long as it takes.
    """

    def __init__(self, vocab_size: int, patience_s: float | None, pieces: Callable[[], Pieces]) -> None:
        self._vocab_size = vocab_size
        self._verifier = Verifier(pieces)
        self._patience_s = patience_s
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None
        self._fills: list[Fill] = []
        self._constrained = False  # whether the step has rows to look at

    def begin(self, step: Step) -> None:
        """Start filling the masks of a step."""
        self._fills = []
        fresh: list[Fill] = []
        constrained = [row for row in step.rows if row.sampled and row.sequence.grammar is not None]
        self._constrained = bool(constrained)
        for row in constrained:
            how = row.sequence.enforcing
            fill = None if how is None else how.late
            if fill is None:
                fill = Fill(row, self._vocab_size)
                fresh.append(fill)
            fill.row = row
            self._fills.append(fill)
        if not fresh:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")
        self._filling = self._thread.submit(_run, fresh)

    def finish(self, step: Step) -> None:
        """Wait until they are filled, or time is up; tell each row's plans what there is."""
        if self._filling is not None:
            filling, self._filling = self._filling, None
            wait([filling], self._patience_s)
        fills, self._fills = self._fills, []
        for fill in fills:
            self._settle(fill, step)

    def verify(self, step: Step, results: list[RowResult], sample: Sample) -> None:
        """Look at what was sampled; see `verifying`. Called after `finish`."""
        if self._constrained:
            self._verifier.check(step, results, sample)

    def close(self) -> None:
        """End the thread; idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _settle(self, fill: Fill, step: Step) -> None:
        row, sequence = fill.row, fill.row.sequence
        how = sequence.enforcing
        plans = step.plans[row.first_plan + row.scores : row.first_plan + row.plans]
        if how is not None and not how.needs_mask and _may_verify(row) and fill.turn(State.NEW, State.DROPPED):
            row.verified = True
        if fill.state is State.DONE:
            if how is not None:
                how.late, how.needs_mask = None, False
                how.masked(fill.ms)
            if fill.error is not None:
                sequence.fault = fault(sequence, fill.error)
                fill.masks[:] = 0
        elif not row.verified:
            row.waits = True
            if how is not None:
                how.late = fill
        for place, plan in enumerate(plans):
            plan.mask = fill.masks[place] if fill.state is State.DONE else None


def _run(fills: list[Fill]) -> None:
    for fill in fills:
        fill.run()


def _may_verify(row: Row) -> bool:
    """Whether sampling first and looking afterwards gives what a mask would: not if filters see what it hides."""
    params = row.sequence.group.request.sampling
    if params.temperature <= 0:
        return True
    return params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0
