"""Rank 0 of several: a CudaSteps that tells the others what it is about to do. See parallel.py and follow.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from branchline.engine.errors import InternalError
from branchline.engine.executor.cuda.engine import CudaSteps
from branchline.engine.executor.cuda.parallel import Arrays, Ranks
from branchline.engine.types import ForwardBatch, PageMove, RowPlan

FIELDS = ("token_ids", "positions", "slots", "query_lens", "context_lens", "logit_rows")


class LeadingSteps(CudaSteps):
    """Executor, QueueExecutor and HostExecutor of a model on several ranks. Each has its heads of the pages, which
    therefore can't be handed to other workers."""

    def lead(self, ranks: Ranks, on_loss: Callable[[str], None]) -> None:
        """Lead these ranks, all of which have built their share."""
        self._ranks = ranks
        self._on_loss = on_loss

    def run(self, batch: ForwardBatch) -> object:
        """See CudaSteps."""
        return self._led(lambda: super(LeadingSteps, self).run(batch), batch, 0)

    def launch(self, batch: ForwardBatch, plans: list[RowPlan]) -> object:
        """See QueueExecutor. The tokens that were chosen go to every rank, for the next step to read."""

        def step() -> object:
            flight = super(LeadingSteps, self).launch(batch, plans)
            self._ranks.share(self._tokens[: len(plans)])
            return flight

        return self._led(step, batch, len(plans))

    def _led(self, step: Callable[[], object], batch: ForwardBatch, tokens: int) -> object:
        """Run a step that all ranks take part in. If it fails the engine ends, and InternalError is raised: the others
        may be anywhere in it, and can't be brought in line again."""
        try:
            self._ranks.tell("step", {"tokens": tokens}, told(batch))
            return step()
        except Exception as error:
            self._ranks.lose(f"a step failed: {error}", self._on_loss)
            raise InternalError(self._ranks.reason or str(error)) from error

    def reserve_host(self, slots: int) -> None:
        """See HostExecutor; each rank for its heads."""
        self._ranks.tell("reserve", {"slots": slots})
        super().reserve_host(slots)

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """See HostExecutor; each rank for its heads."""
        self._ranks.tell("move", arrays={"moves": np.array(moves, dtype=np.int64).reshape(-1, 3)})
        super().move_pages(moves)

    def close(self) -> None:
        """Let the others go; idempotent."""
        if self._decoder is not None:
            self._ranks.close()
        super().close()


def told(batch: ForwardBatch) -> Arrays:
    """A batch as arrays."""
    lengths = np.array([len(pages) for pages in batch.page_tables], dtype=np.int64)
    flat = [page for pages in batch.page_tables for page in pages]
    made: dict[str, npt.NDArray[np.generic]] = {name: getattr(batch, name) for name in FIELDS}
    made |= {"table_lens": lengths, "pages": np.array(flat, dtype=np.int64)}
    if batch.ahead is not None:
        made["ahead"] = batch.ahead
    return made


def heard(arrays: Arrays) -> ForwardBatch:
    """The batch that `told` was given."""
    ends = np.cumsum(arrays["table_lens"])
    tables = [piece.tolist() for piece in np.split(arrays["pages"], ends[:-1])]
    named: dict[str, Any] = {name: arrays[name] for name in FIELDS}
    return ForwardBatch(**named, page_tables=tables, ahead=arrays.get("ahead"))


def follow(one: CudaSteps, ranks: Ranks) -> None:
    """Do what rank 0 does until it says stop. Raises RuntimeError if it is gone."""
    while True:
        what, facts, arrays = ranks.hear()
        if what == "stop":
            return
        if what == "reserve":
            one.reserve_host(int(facts["slots"]))
        elif what == "move":
            one.move_pages([(bool(store), page, slot) for store, page, slot in arrays["moves"].tolist()])
        elif what == "step":
            one.take_part(heard(arrays), int(facts["tokens"]), ranks.share)
