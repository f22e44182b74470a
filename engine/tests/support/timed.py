"""The tiny executor on a clock that its own work moves: what scheduling does to latency, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from branchline.engine.types import ForwardBatch
from harness import Clock, Engine
from tiny import TinyExecutor


@dataclass(frozen=True)
class Rates:
    """Seconds of a step: its own, a sequence's, a token's, and a token's for each thousand of context."""

    step: float = 0.010
    row: float = 0.002
    token: float = 0.001
    context: float = 0.0005


class TimedExecutor(TinyExecutor):
    """Moves `clock` by what a step costs, `noise` times as much in steps divisible by 7."""

    def __init__(self, clock: Clock, pages: int, page_size: int, rates: Rates, noise: float = 1.0) -> None:
        super().__init__(pages, page_size)
        self.clock = clock
        self.rates = rates
        self.noise = noise

    def run(self, batch: ForwardBatch) -> list[npt.NDArray[np.float64]]:
        """See Executor."""
        counts = batch.query_lens.astype(float)
        contexts = batch.context_lens - counts / 2
        rates = self.rates
        prompts = counts > 1
        seconds = rates.step + rates.row * (~prompts).sum()
        seconds += (counts * prompts).sum() * rates.token + (counts * contexts).sum() * rates.context / 1e3
        self.clock.now += float(seconds) * (self.noise if self.steps % 7 == 0 else 1.0)
        return super().run(batch)


def timed(rates: Rates = Rates(), noise: float = 1.0, pages: int = 2000, **limits: object) -> Engine:
    """An engine whose clock the executor moves; pages of 16 tokens."""
    engine = Engine(pages=pages, page_size=16, **limits)  # type: ignore[arg-type]
    engine.executor = TimedExecutor(engine.clock, pages, 16, rates, noise)
    engine.rebuild()
    return engine
