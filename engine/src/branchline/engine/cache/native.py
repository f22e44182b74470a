"""The default backend: the Rust radix tree and page ledger of branchline._native.

Only converts; every rule is in crates/prefix, which the gateway's index shares.
"""

from __future__ import annotations

from collections.abc import Sequence

from branchline import _native
from branchline.engine.cache.base import CacheContext, CacheEvent, NodeView, StoredEvent, TreeView
from branchline.engine.cache.eviction import ranks
from branchline.engine.types import PageMove


class NativeCache:
    """RadixCacheBackend over `_native.PageCache`. O(1) eviction a page at any tree size."""

    shares = True

    def __init__(self, context: CacheContext) -> None:
        """Raises RegistryError for an unknown eviction policy."""
        self._page_size = context.page_size
        self._pages = _native.PageCache(
            context.num_pages, context.page_size, policy=ranks(context.eviction).table, host_pages=context.host_pages
        )

    def match(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """See RadixCacheBackend."""
        return self._pages.match(namespace, token_ids, limit)

    def lock(self, node: int) -> None:
        """See RadixCacheBackend."""
        self._pages.lock(node)

    def unlock(self, node: int) -> None:
        """See RadixCacheBackend."""
        self._pages.unlock(node)

    def credit(self, node: int, priority: int = 0) -> None:
        """See RadixCacheBackend."""
        self._pages.credit(node, priority)

    def tick(self, now_ms: int) -> None:
        """See RadixCacheBackend."""
        self._pages.tick(now_ms)

    def available(self) -> int:
        """See RadixCacheBackend."""
        return self._pages.available()

    def allocate(self, count: int) -> list[int] | None:
        """See RadixCacheBackend."""
        return self._pages.allocate(count)

    def insert(
        self, namespace: bytes, token_ids: Sequence[int], pages: Sequence[int], priority: int = 0
    ) -> tuple[int, int]:
        """See RadixCacheBackend."""
        return self._pages.insert(namespace, token_ids, pages, priority)

    def free(self, pages: Sequence[int], epoch: int = 0) -> None:
        """See RadixCacheBackend."""
        self._pages.free(pages, epoch)

    def retire(self, epoch: int) -> None:
        """See RadixCacheBackend."""
        self._pages.retire(epoch)

    def evict(self, pages: int) -> int:
        """See RadixCacheBackend."""
        return self._pages.evict(pages)

    def flush(self) -> int:
        """See RadixCacheBackend."""
        return self._pages.flush()

    def fetch(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> int:
        """See RadixCacheBackend."""
        return self._pages.fetch(namespace, token_ids, limit)

    def drain_moves(self) -> list[PageMove]:
        """See RadixCacheBackend."""
        return self._pages.drain_moves()

    def host_counters(self) -> tuple[int, int, int, int]:
        """See RadixCacheBackend."""
        return self._pages.host_counters()

    def counters(self) -> tuple[int, int, int, int]:
        """See RadixCacheBackend."""
        return self._pages.counters()

    def block_hashes(self, namespace: bytes, token_ids: Sequence[int]) -> list[int]:
        """See RadixCacheBackend."""
        return _native.block_hashes(namespace, token_ids, self._page_size)

    def drain_events(self) -> list[CacheEvent]:
        """See RadixCacheBackend."""
        return self._pages.drain_events()

    def snapshot(self) -> list[StoredEvent]:
        """See RadixCacheBackend."""
        return self._pages.snapshot()

    def view(self, cursor: int, limit: int, tokens: int, leases: Sequence[int]) -> TreeView:
        """See RadixCacheBackend."""
        nodes, *rest = self._pages.view(cursor, limit, tokens, leases)
        return TreeView([NodeView(*node) for node in nodes], *rest)

    def audit(self) -> None:
        """See RadixCacheBackend."""
        self._pages.audit()
