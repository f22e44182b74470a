"""The waiting sequences and the order in which they are tried.

Retracted sequences come first, oldest retraction last in. The others are ordered by a score: their cached
prefix is a bonus in [0, 1], their waiting a growing one that reaches 1 after `aging_passes` passes or
`aging_seconds`. So a sequence yields only to those that came within that bound after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from branchline.engine.scheduler.options import SchedulerOptions
from branchline.engine.scheduler.sequence import Sequence

WINDOW = 256  # of the oldest; bounds the cost of a pass


class WaitingQueue:
    """Ordered set of waiting sequences by number; all moves are O(1), ordering is O(WINDOW)."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._fresh: dict[int, Sequence] = {}
        self._resumed: dict[int, Sequence] = {}
        self.tokens = 0  # of all waiting sequences

    def __len__(self) -> int:
        return len(self._fresh) + len(self._resumed)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resumed.values()
        yield from self._fresh.values()

    def push(self, sequence: Sequence, pass_number: int, now: float) -> None:
        """Append a newcomer."""
        sequence.enqueued_pass, sequence.enqueued_s = pass_number, now
        self._fresh[sequence.number] = sequence
        self.tokens += len(sequence.tokens)

    def push_front(self, sequence: Sequence) -> None:
        """Put a retracted sequence before all others."""
        self._resumed = {sequence.number: sequence, **self._resumed}
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; whether it was there."""
        found = self._fresh.pop(sequence.number, None) or self._resumed.pop(sequence.number, None)
        if found is not None:
            self.tokens -= len(sequence.tokens)
        return found is not None

    def window(self) -> list[Sequence]:
        """The oldest newcomers, in order of arrival."""
        return list(islice(self._fresh.values(), WINDOW))

    def resumed(self) -> list[Sequence]:
        """Retracted sequences, next one first."""
        return list(self._resumed.values())

    def order(self, pass_number: int, now: float) -> list[Sequence]:
        """Who to try in this pass, first one first. Equal scores keep the order of arrival."""
        options = self._options
        cap, passes, seconds = options.locality_cap_tokens, options.aging_passes, options.aging_seconds

        def score(sequence: Sequence) -> float:
            waited = max((pass_number - sequence.enqueued_pass) / passes, (now - sequence.enqueued_s) / seconds)
            return -waited - min(sequence.matched, cap) / cap

        return self.resumed() + sorted(self.window(), key=score)

    def oldest_s(self) -> float | None:
        """When the longest waiting newcomer came; None if there is none."""
        first = next(iter(self._fresh.values()), None)
        return None if first is None else first.enqueued_s
