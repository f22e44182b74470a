"""Masks of a step's constrained rows, filled while the forward pass runs.

Rows are found by their plan, never by place; rows without a constraint get no mask at all. A row whose mask can't be
filled is marked with its fault and loses its request, never its constraint. Owns the masks and one thread.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from branchline.engine.errors import EngineError, InternalError
from branchline.engine.grammar import mask as masks
from branchline.engine.scheduler.batch import Row, Step
from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.types import I32

logger = logging.getLogger(__name__)


class Masker:
    """`begin` before the forward pass, `finish` before sampling. The loop's thread calls."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._masks: I32 = masks.allocate(0, vocab_size)
        self._thread: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None

    def begin(self, step: Step) -> None:
        """Start filling the masks of a step."""
        rows = [row for row in step.rows if row.sampled and row.sequence.grammar is not None]
        if not rows:
            return
        places = sum(1 + len(row.draft) for row in rows)
        if len(self._masks) < places:
            self._masks = masks.allocate(2 * places, self._vocab_size)
        at = 0
        for row in rows:
            for plan in step.plans[row.first_plan + row.scores : row.first_plan + row.plans]:
                plan.mask = self._masks[at]
                at += 1
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-mask")
        self._filling = self._thread.submit(self._fill, rows)

    def finish(self) -> None:
        """Wait until they are filled."""
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.result()

    def close(self) -> None:
        """End the thread; idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _fill(self, rows: list[Row]) -> None:
        at = 0
        for row in rows:
            sequence, end = row.sequence, at + 1 + len(row.draft)
            try:
                self._fill_row(row, at)
            except Exception as error:
                sequence.fault = fault(sequence, error)
                self._masks[at:end] = 0
            at = end

    def _fill_row(self, row: Row, at: int) -> None:
        """The mask of the row's own token and of each draft token's successor; the state is left as it was."""
        grammar = row.sequence.grammar
        assert grammar is not None, "only constrained rows come here"
        grammar.fill_vocab_mask(self._masks, at)
        taken = 0
        try:
            for place, token in enumerate(row.draft, at + 1):
                taken += grammar.accept_token(token)
                grammar.fill_vocab_mask(self._masks, place)
        finally:
            grammar.rollback(taken)


def fault(sequence: Sequence, error: Exception) -> EngineError:
    """What a backend raised, as the reason why the sequence's row may not be used."""
    if isinstance(error, EngineError):
        return error
    logger.error("the constraint of request %s failed", sequence.group.request.request_id, exc_info=error)
    return InternalError(f"the grammar backend failed: {type(error).__name__}: {error}")
