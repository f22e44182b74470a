"""Which prompt pages are being computed right now, by block hash.

Lets the scheduler put off a sequence whose next page another one is about to finish, so that identical
prefixes that arrive together are computed once. Owns no pages.
"""

from __future__ import annotations

from branchline.engine.scheduler.sequence import Sequence


class Inflight:
    """Block hash → number of the sequence that computes it."""

    def __init__(self) -> None:
        self._owners: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def claim(self, sequence: Sequence) -> None:
        """The sequence is about to compute the prompt pages it did not find."""
        for block in sequence.group.hashes[sequence.full :]:
            self._owners.setdefault(block, sequence.number)

    def settle(self, sequence: Sequence, before: int, after: int) -> None:
        """Pages [before, after) of the sequence are in the tree, or will not come."""
        for block in sequence.group.hashes[before:after]:
            if self._owners.get(block) == sequence.number:
                del self._owners[block]

    def drop(self, sequence: Sequence) -> None:
        """The sequence computes no more prompt pages."""
        self.settle(sequence, 0, len(sequence.group.hashes))

    def awaits(self, sequence: Sequence, limit: int, page_size: int) -> bool:
        """Whether a page that the sequence could use, within `limit` tokens, is being computed.

        Hashes are chained: if a later page is on its way then so is, or is there already, all before it.
        """
        usable = sequence.group.hashes[sequence.matched // page_size : limit // page_size]
        return not self._owners.keys().isdisjoint(usable)
