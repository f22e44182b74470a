"""The waiting sequences and the order in which they are tried.

A sequence's rank is its priority, its cached prefix as a bonus in [0, 1] and its waiting, which reaches 1 after
`aging_passes` passes or `aging_seconds`, and one whole priority after `priority_aging_seconds`. So a sequence
yields to others of its priority only if they came within the first bound after it, and to those of a priority
higher by k only if they came within k times the second one more. Retracted ones go before all others of their
priority and below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from branchline.engine.scheduler.options import SchedulerOptions
from branchline.engine.scheduler.sequence import Sequence

WINDOW = 256  # sequences looked at; bounds the cost of a pass


class WaitingQueue:
    """Ordered set of waiting sequences by number; all moves are O(1), ordering is O(WINDOW)."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._fresh: dict[int, Sequence] = {}
        self._classes: dict[int, dict[int, Sequence]] = {}  # the same by priority
        self._resumed: dict[int, Sequence] = {}
        self._window: list[Sequence] | None = None  # until somebody comes or goes
        self._estimates: Counter[int] = Counter()  # newcomers by their estimate of cached tokens
        self.tokens = 0  # of all waiting sequences
        self.matched = 0  # of newcomers, by the latest estimates

    def __len__(self) -> int:
        return len(self._fresh) + len(self._resumed)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._resumed.values()
        yield from self._fresh.values()

    def push(self, sequence: Sequence, pass_number: int, now: float) -> None:
        """Append a newcomer, with the estimate it has."""
        sequence.enqueued_pass, sequence.enqueued_s = pass_number, now
        self._fresh[sequence.number] = sequence
        self._classes.setdefault(sequence.priority, {})[sequence.number] = sequence
        self._window = None
        self._count(sequence, 1)
        self.tokens += len(sequence.tokens)

    def push_front(self, sequence: Sequence) -> None:
        """Put a retracted sequence before all others of its priority."""
        self._resumed = {sequence.number: sequence, **self._resumed}
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> bool:
        """Take a sequence out; whether it was there."""
        number = sequence.number
        if self._fresh.pop(number, None) is not None:
            self._window = None
            self._count(sequence, -1)
            alike = self._classes[sequence.priority]
            del alike[number]
            if not alike:
                del self._classes[sequence.priority]
        elif self._resumed.pop(number, None) is None:
            return False
        self.tokens -= len(sequence.tokens)
        return True

    def estimate(self, sequence: Sequence, matched: int, version: int) -> None:
        """So many of its tokens are cached, as of a version of the tree. For newcomers, only this changes it."""
        if matched != sequence.matched and sequence.number in self._fresh:
            self._count(sequence, -1)
            sequence.matched = matched
            self._count(sequence, 1)
        sequence.matched, sequence.matched_version = matched, version

    def _count(self, sequence: Sequence, by: int) -> None:
        matched = sequence.matched
        self.matched += by * matched
        self._estimates[matched] += by
        if not self._estimates[matched]:
            del self._estimates[matched]

    def window(self) -> list[Sequence]:
        """Newcomers in order of arrival: the oldest, half of them replaced by the first of high priorities.

        Not to be changed.
        """
        if self._window is None:
            self._window = self._choose()
        return self._window

    def _choose(self) -> list[Sequence]:
        if len(self._classes) <= 1:
            return list(islice(self._fresh.values(), WINDOW))
        chosen = {sequence.number: sequence for sequence in islice(self._fresh.values(), WINDOW // 2)}
        for priority in sorted(self._classes, reverse=True):
            for sequence in islice(self._classes[priority].values(), WINDOW):
                if len(chosen) >= WINDOW:
                    break
                chosen[sequence.number] = sequence
        return sorted(chosen.values(), key=lambda sequence: (sequence.enqueued_pass, sequence.number))

    def order(self, pass_number: int, now: float) -> list[Sequence]:
        """Who to try in this pass, first one first. Equal ranks keep the order of arrival."""
        fresh = self.window()
        if len(self._classes) > 1 or len(self._estimates) > 1:
            fresh = self._ranked(fresh, pass_number, now)
        return self._merge(fresh) if self._resumed else fresh

    def _ranked(self, fresh: list[Sequence], pass_number: int, now: float) -> list[Sequence]:
        """By rank; written out, since it runs for every waiting sequence in every pass."""
        options = self._options
        cap, passes, seconds = options.locality_cap_tokens, options.aging_passes, options.aging_seconds
        level = options.priority_aging_seconds / seconds
        ranks = []
        for at, one in enumerate(fresh):
            waited, by_clock = (pass_number - one.enqueued_pass) / passes, (now - one.enqueued_s) / seconds
            if by_clock > waited:
                waited = by_clock
            ranks.append((-waited - (one.matched / cap if one.matched < cap else 1.0) - one.priority * level, at))
        ranks.sort()
        return [fresh[at] for _, at in ranks]

    def _merge(self, fresh: list[Sequence]) -> list[Sequence]:
        """Each retracted one before the first newcomer of no higher priority."""
        merged: list[Sequence] = []
        at = 0
        for sequence in sorted(self._resumed.values(), key=lambda one: -one.priority):
            while at < len(fresh) and fresh[at].priority > sequence.priority:
                merged.append(fresh[at])
                at += 1
            merged.append(sequence)
        return merged + fresh[at:]

    def top(self) -> int:
        """The highest waiting priority. Only for a queue that is not empty."""
        top = max(self._classes) if self._classes else None
        if self._resumed:
            resumed = max([one.priority for one in self._resumed.values()])
            return resumed if top is None else max(top, resumed)
        assert top is not None, "nobody waits"
        return top

    def highest(self) -> Sequence | None:
        """The next sequence of the highest priority that waits, however long others have."""
        top = max(self._classes, default=None)
        first = None if top is None else next(iter(self._classes[top].values()))
        resumed = max(self._resumed.values(), key=lambda one: one.priority, default=None)
        if resumed is not None and (first is None or resumed.priority >= first.priority):
            return resumed
        return first

    def oldest_s(self) -> float | None:
        """When the longest waiting newcomer came; None if there is none."""
        first = next(iter(self._fresh.values()), None)
        return None if first is None else first.enqueued_s
