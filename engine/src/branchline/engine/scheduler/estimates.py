"""How much of a waiting sequence's prompt the cache and the store of scores hold, as far as was looked.

A few estimates that are older than the tree are renewed in each pass. Locks nothing; looking touches recency.
"""

from __future__ import annotations

from collections.abc import Callable

from branchline.engine.scheduler import scores
from branchline.engine.scheduler.pages import PageTables
from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.scheduler.waiting import WaitingQueue

REFRESHES = 8  # stale estimates renewed a pass


class Estimates:
    """Of the sequences of one queue, from one cache and one store."""

    def __init__(self, waiting: WaitingQueue, pages: PageTables, store: scores.ScoreStore) -> None:
        self._waiting = waiting
        self._pages = pages
        self._store = store

    def of(self, sequence: Sequence) -> int:
        """Tokens of it that cached pages cover now."""
        limit = scores.match_limit(sequence, len(self.known_scores(sequence)))
        return len(self._pages.find(sequence, limit)[1]) * self._pages.page_size

    def known_scores(self, sequence: Sequence) -> list[float]:
        """Stored logprobs of its next positions, if they answer what it asks for."""
        if sequence.scored >= sequence.prompt_len:
            return []
        logprobs = sequence.group.request.logprobs
        return [] if logprobs.top_k or logprobs.token_ids else self._store.known(sequence)

    def refresh(self, guard: Callable[[Sequence, Callable[[Sequence], int], Sequence], int | None]) -> None:
        """Renew a few. `guard` runs what may fail, for one sequence."""
        version, left = self._pages.version, REFRESHES
        for sequence in self._waiting.window():
            if sequence.matched_version != version:
                found = guard(sequence, self.of, sequence)
                self._waiting.estimate(sequence, found or 0, version)
                left -= 1
                if left == 0:
                    return
