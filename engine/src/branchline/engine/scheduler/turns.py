"""Whose turn it is in a step's prompt tokens: a long prompt leaves up to half of them to much shorter ones.

So a short prompt waits a few steps behind a long one, not until its end, and the long one takes at most twice as long.
Prompts of like length go in order. Made anew for each step; holds nothing after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

from branchline.engine.scheduler.batch import Row
from branchline.engine.scheduler.cost import Allowance
from branchline.engine.scheduler.pages import PageTables
from branchline.engine.scheduler.sequence import Sequence

MUCH = 2  # so many times shorter goes ahead
LEAST = 32  # a room below this is not halved: the two sides take turns


@dataclass(frozen=True, slots=True)
class Claim:
    """Tokens that a prompt has left to compute, and its priority."""

    left: int
    priority: int

    @classmethod
    def running(cls, sequence: Sequence) -> Self:
        """Of a sequence in prefill."""
        return cls(sequence.work, sequence.priority)

    @classmethod
    def waiting(cls, sequence: Sequence) -> Self:
        """Of one that waits, by the latest estimate of what is cached."""
        return cls(max(sequence.work - sequence.matched, 1), sequence.priority)

    def goes_before(self, other: Claim) -> bool:
        """Whether `other` leaves room for this one."""
        if self.priority != other.priority:
            return self.priority > other.priority
        return self.left * MUCH <= other.left


class Turns:
    """The prompts that want tokens of one step: those in prefill, and the ones that wait and may be admitted."""

    def __init__(self, prefilling: Iterable[Sequence], waiting: Iterable[Sequence], number: int) -> None:
        self._prefilling, self._waiting = tuple(prefilling), waiting
        self._yields = number % 2 == 1  # of small rooms, every second one
        self._leaves: Claim | None = None

    @classmethod
    def of(cls, prefilling: Collection[Sequence], waiting: Iterable[Sequence], number: int) -> Self:
        """All claims on the step of that number; none where nobody is in prefill, as nobody is in the way then."""
        return cls(prefilling, waiting if prefilling else (), number)

    @property
    def left(self) -> bool:
        """Whether a prompt left room for others."""
        return self._leaves is not None

    def share(self, claim: Claim, room: int) -> int:
        """Of `room` tokens, those that a prompt takes at first; the rest comes to it if nobody uses it."""
        wanted = self._before(claim, max(room // 2, 1))
        kept = min(wanted, room // 2) if room >= LEAST else room * self._yields * bool(wanted)
        if kept and self._leaves is None:
            self._leaves = claim
        return room - kept

    def _before(self, claim: Claim, enough: int) -> int:
        """Tokens of those that go before a claim, or `enough` if there are more. Written out as `goes_before` would
        say it: it looks at every waiting prompt in every step.
        """
        priority, longest, wanted = claim.priority, claim.left // MUCH, 0
        for sequence in self._prefilling:
            left = len(sequence.tokens) - sequence.computed
            if sequence.priority > priority or (sequence.priority == priority and left <= longest):
                wanted += left
        for sequence in self._waiting:
            if wanted >= enough:
                break
            left = max(len(sequence.tokens) - sequence.computed - sequence.matched, 1)
            if sequence.priority > priority or (sequence.priority == priority and left <= longest):
                wanted += left
        return wanted

    def passes(self, claim: Claim) -> bool:
        """Whether a waiting prompt is left for a later step: what was left free is not for it."""
        return self._leaves is not None and not claim.goes_before(self._leaves)

    @staticmethod
    def top_up(
        rows: list[Row], prefilling: dict[int, Sequence], room: Allowance, chunk: int, pages: PageTables
    ) -> bool:
        """What nobody used of the step goes to the prompts in it; whether there are any."""
        found = False
        for index, row in enumerate(rows):
            sequence, end = row.sequence, row.start + row.count
            if sequence.number not in prefilling:
                continue
            found = True
            free = min(room.room(end), chunk - row.count, sequence.work - row.count)
            if free > 0 and (count := pages.extend(sequence, row.count + free)) > row.count:
                rows[index] = Row(sequence, row.start, count)
                room.take(end, count - row.count)
        return found
