"""How long outputs turn out to be, and how careful to be with pages: what admission reserves for growth.

Learnt from the requests that ended by themselves. After a retraction it reserves for the whole expected output of
everybody and eases off over some hundred steps, so that pages that were just short are not given away at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from branchline.engine.scheduler.sequence import Sequence

ENDS = 256  # latest ends that count
REBUILD = 16  # ends between two looks at them
BUCKET = 16  # generated tokens that are looked up alike
UNKNOWN = 128  # tokens that an output is taken to have left when pages were short and nothing is known
BEYOND = 1024  # most that is expected of an output longer than any before
CALM = 0.3  # share of the expected growth reserved in quiet times: not all grow to their end at once
EASE = 0.99  # what a step leaves of the caution


class Forecast:
    """Expected further tokens by tokens generated so far, and the share of them to reserve."""

    def __init__(self) -> None:
        self._ends: deque[int] = deque(maxlen=ENDS)
        self._new = 0
        self._left: list[int] = []  # expected further tokens, by bucket of generated ones
        self._longest = 0  # the most of them
        self.caution = 0.0  # 1 right after a retraction

    @property
    def share(self) -> float:
        """Of the expected growth, what is reserved now."""
        return CALM + (1.0 - CALM) * self.caution

    def ended(self, generated: int) -> None:
        """A sequence ended by itself after so many tokens."""
        self._ends.append(generated)
        self._new += 1
        if self._new >= REBUILD:
            self._new = 0
            self._rebuild()

    def retracted(self) -> None:
        """Pages were short."""
        self.caution = 1.0

    def step(self) -> None:
        """A step went by."""
        self.caution = self.caution * EASE if self.caution > 0.01 else 0.0

    def left(self, sequence: Sequence) -> int:
        """Tokens that the sequence is expected to generate yet, at most what it may."""
        if not sequence.samples:
            return 0
        table, length = self._left, len(sequence.tokens)
        generated = length - sequence.prompt_len
        if table:
            bucket = generated // BUCKET
            expected = table[bucket] if bucket < len(table) else min(generated // 2, BEYOND)
        else:
            expected = UNKNOWN if self.caution else 0
        return min(expected, sequence.max_len - length)

    def most(self, running: int, page_size: int) -> int:
        """No less than `pages` of so many sequences; looks at none of them."""
        longest = max(self._longest, BEYOND) if self._left or self.caution else 0
        return running * (int(longest * self.share / page_size) + 1)

    def pages(self, sequences: Iterable[Sequence], page_size: int) -> int:
        """Pages to keep for the growth of running sequences: one each at least."""
        share = self.share / page_size
        return sum(int(self.left(sequence) * share) + 1 for sequence in sequences)

    def _rebuild(self) -> None:
        """Mean of what lay beyond each bucket's start, over the ends that went so far."""
        ends = sorted(self._ends)
        sums = [0]
        for end in reversed(ends):
            sums.append(sums[-1] + end)
        self._left = []
        for start in range(0, ends[-1] + 1, BUCKET):
            longer = len(ends) - bisect_right(ends, start)
            if not longer:
                break
            self._left.append(round(sums[longer] / longer) - start)
        self._longest = max(self._left, default=0)
