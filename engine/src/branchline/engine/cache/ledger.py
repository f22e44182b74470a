"""The page ledger of the pure-Python backends: free and private pages, and frees still in flight.

Owns no tree; `ReferenceCache` and `PrivateCache` build on it.
"""

from __future__ import annotations

from collections.abc import Sequence


class Ledger:
    """Free pages, private pages and private pages whose free waits for an epoch."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.spare = list(range(num_pages - 1, -1, -1))
        self.private: set[int] = set()
        self.pending: list[tuple[int, int]] = []  # (epoch, page); pages stay in `private`
        self._retired = 0

    def take(self, count: int) -> list[int]:
        """`count` pages off the free list, now private."""
        taken = [self.spare.pop() for _ in range(count)]
        self.private.update(taken)
        return taken

    def adopt(self, page: int) -> None:
        """A private page becomes the tree's. Raises ValueError if it is not private."""
        if page not in self.private or any(page == waiting for _, waiting in self.pending):
            raise ValueError(f"page {page} is not private; only its owner may insert it")
        self.private.remove(page)

    def free(self, pages: Sequence[int], epoch: int) -> None:
        """Return private pages at once, or when `epoch` retires. Raises ValueError for others and changes nothing."""
        waiting = {page for _, page in self.pending}
        if len(set(pages)) != len(pages) or any(page not in self.private or page in waiting for page in pages):
            raise ValueError(f"pages {list(pages)} are not all private; a page is freed once, by its owner")
        self.pending.extend((epoch, page) for page in pages)
        self._settle()

    def retire(self, epoch: int) -> None:
        """Let the frees of `epoch` and before take effect."""
        self._retired = max(self._retired, epoch)
        self._settle()

    def audit(self, tree: Sequence[int]) -> None:
        """Raise RuntimeError unless free, private and `tree` pages are all pages, each once."""
        if sorted([*self.spare, *self.private, *tree]) != list(range(self.num_pages)):
            raise RuntimeError("a page is in no state or in two")

    def _settle(self) -> None:
        ready = [page for epoch, page in self.pending if epoch <= self._retired]
        if ready:
            self.pending = [(epoch, page) for epoch, page in self.pending if epoch > self._retired]
            self.private.difference_update(ready)
            self.spare.extend(ready)
