"""The backend `none`: pages without sharing, for measuring what the cache saves and for doubting it.

Every match is empty and every inserted page stays its owner's.
"""

from __future__ import annotations

from collections.abc import Sequence

from branchline.engine.cache.base import CacheContext, CacheEvent, StoredEvent, TreeView
from branchline.engine.cache.hashing import block_hashes
from branchline.engine.cache.ledger import Ledger
from branchline.engine.types import PageMove


class PrivateCache:
    """RadixCacheBackend whose tree is always empty."""

    shares = False

    def __init__(self, context: CacheContext) -> None:
        """Raises ValueError for a host tier."""
        if context.host_pages:
            raise ValueError(f"host_pages is {context.host_pages}; without sharing nothing is worth keeping: give 0")
        self._page_size = context.page_size
        self._ledger = Ledger(context.num_pages)

    def match(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """The root and no page."""
        return 0, []

    def lock(self, node: int) -> None:
        """Nothing to protect."""

    def unlock(self, node: int) -> None:
        """Nothing was protected."""

    def credit(self, node: int, priority: int = 0) -> None:
        """Nothing to rank."""

    def tick(self, now_ms: int) -> None:
        """Nothing has an age."""

    def available(self) -> int:
        """Free pages."""
        return len(self._ledger.spare)

    def allocate(self, count: int) -> list[int] | None:
        """Private pages, or None if there are not so many."""
        return None if count > len(self._ledger.spare) else self._ledger.take(count)

    def insert(
        self, namespace: bytes, token_ids: Sequence[int], pages: Sequence[int], priority: int = 0
    ) -> tuple[int, int]:
        """Keeps nothing: all pages stay the caller's, as duplicates would."""
        return 0, len(pages)

    def free(self, pages: Sequence[int], epoch: int = 0) -> None:
        """See RadixCacheBackend."""
        self._ledger.free(pages, epoch)

    def retire(self, epoch: int) -> None:
        """See RadixCacheBackend."""
        self._ledger.retire(epoch)

    def evict(self, pages: int) -> int:
        """Nothing is evictable."""
        return 0

    def flush(self) -> int:
        """Nothing is evictable."""
        return 0

    def fetch(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> int:
        """There is no host tier."""
        return 0

    def drain_moves(self) -> list[PageMove]:
        """There is no host tier."""
        return []

    def host_counters(self) -> tuple[int, int, int, int]:
        """There is no host tier."""
        return 0, 0, 0, 0

    def counters(self) -> tuple[int, int, int, int]:
        """See RadixCacheBackend."""
        return len(self._ledger.spare), 0, 0, len(self._ledger.private)

    def block_hashes(self, namespace: bytes, token_ids: Sequence[int]) -> list[int]:
        """See RadixCacheBackend."""
        return block_hashes(namespace, token_ids, self._page_size)

    def drain_events(self) -> list[CacheEvent]:
        """Nothing is ever resident."""
        return []

    def snapshot(self) -> list[StoredEvent]:
        """Nothing is ever resident."""
        return []

    def view(self, cursor: int, limit: int, tokens: int, leases: Sequence[int]) -> TreeView:
        """No node."""
        return TreeView([])

    def audit(self) -> None:
        """See RadixCacheBackend."""
        self._ledger.audit(())
