"""How one sequence's constraint is enforced: its way out when tokens run short, a mask that is late, and the figures.

State of a sequence, changed by masking and verifying on the loop's thread alone. Knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from branchline.engine.types import Finish, GrammarKind, GrammarReport

if TYPE_CHECKING:
    from branchline.engine.scheduler.masking import Fill

SAMPLES = 512  # times of masks that are kept


@dataclass(slots=True, eq=False)
class Enforcing:
    """Beside `Sequence.grammar`. `way` are tokens that complete the text; None where none are known, and it may then be
    cut off."""

    kind: GrammarKind
    backend: str
    reason: str
    compile_ms: float
    report: bool = False
    best_effort: bool = False
    way: list[int] | None = None
    at: int = -1  # how many tokens the sequence has where `way` begins
    steered: bool = False
    later: Callable[[Finish], None] | None = None  # checks the finished text, then tells the finish
    late: Fill | None = None  # a mask that was not ready; the row waits for it
    needs_mask: bool = False  # verifying came to no end
    tokens: int = 0
    forced: int = 0
    mask_ms: list[float] = field(default_factory=list)

    def masked(self, ms: float) -> None:
        """Note the time of one mask."""
        if len(self.mask_ms) < SAMPLES:
            self.mask_ms.append(ms)
        else:
            self.mask_ms[self.tokens % SAMPLES] = ms

    def is_whole(self, complete: bool) -> bool:
        """Whether a text that ends at its limit is what was asked for: a JSON value, or one that was led to its end."""
        return complete and (self.steered or self.kind is GrammarKind.JSON)

    def is_told(self, complete: bool) -> bool:
        """Whether the finish tells of it."""
        return self.report or self.best_effort or not complete

    def told(self, complete: bool) -> GrammarReport:
        """The figures."""
        times = sorted(self.mask_ms)
        return GrammarReport(
            backend=self.backend,
            reason=self.reason,
            compile_ms=self.compile_ms,
            mask_p99_ms=times[min(int(len(times) * 0.99), len(times) - 1)] if times else 0.0,
            constrained_tokens=self.tokens,
            forced_tokens=self.forced,
            complete=complete,
            enforced=self.later is None,
        )
