"""The oracle: a page cache in plain Python, one tree node a page, written to be read rather than to be fast.

Every backend is compared with it (tests/cache). Eviction scans all leaves. Not for production.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from branchline.engine.cache.base import CacheContext, CacheEvent, StoredEvent
from branchline.engine.cache.hashing import block_hashes, chain_hash, root_hash
from branchline.engine.cache.ledger import Ledger


class Node:
    """One cached page. `locks` counts the holders of this node and of its descendants."""

    def __init__(self, handle: int, parent: Node | None, block: tuple[int, ...], page: int, hash_: int) -> None:
        self.handle = handle
        self.parent = parent
        self.block = block
        self.page = page
        self.hash = hash_
        self.locks = 0
        self.used = 0
        self.children: dict[tuple[int, ...], Node] = {}


class ReferenceCache:
    """RadixCacheBackend with `lru` eviction: of the unlocked leaves the least recently touched goes first."""

    shares = True

    def __init__(self, context: CacheContext) -> None:
        if context.eviction != "lru":
            raise ValueError(f"eviction is {context.eviction!r}; the reference backend knows only 'lru'")
        self._page_size = context.page_size
        self._ledger = Ledger(context.num_pages)
        self._handles = itertools.count(1)
        self._clock = itertools.count(1)
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}  # page nodes by handle
        self._events: list[CacheEvent] = []

    def match(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """See RadixCacheBackend; handle 0 stands for an empty match."""
        node, pages = self._roots.get(namespace), []
        now = next(self._clock)
        for block in self._blocks(token_ids, min(limit, len(token_ids))):
            child = node.children.get(block) if node else None
            if child is None:
                break
            node = child
            node.used = now
            pages.append(node.page)
        return (node.handle if node and pages else 0), pages

    def lock(self, node: int) -> None:
        """See RadixCacheBackend."""
        for step in self._path(node):
            step.locks += 1

    def unlock(self, node: int) -> None:
        """See RadixCacheBackend. Raises ValueError if it is not locked."""
        path = self._path(node)
        if any(step.locks == 0 for step in path):
            raise ValueError(f"node {node} is not locked; unlock it once per lock")
        now = next(self._clock)
        for step in path:
            step.locks -= 1
            step.used = now

    def available(self) -> int:
        """See RadixCacheBackend."""
        return len(self._ledger.spare) + self._evictable()

    def allocate(self, count: int) -> list[int] | None:
        """See RadixCacheBackend."""
        if count > self.available():
            return None
        self.evict(count - len(self._ledger.spare))
        return self._ledger.take(count)

    def insert(self, namespace: bytes, token_ids: Sequence[int], pages: Sequence[int]) -> tuple[int, int]:
        """See RadixCacheBackend. Raises ValueError unless the tokens fill the pages exactly."""
        if len(token_ids) != len(pages) * self._page_size:
            raise ValueError(f"{len(token_ids)} tokens do not fill {len(pages)} pages of {self._page_size}")
        node = self._roots.setdefault(namespace, Node(0, None, (), -1, root_hash(namespace)))
        stored: list[Node] = []
        present, now, parent = 0, next(self._clock), 0
        for block, page in zip(self._blocks(token_ids, len(token_ids)), pages, strict=True):
            child = node.children.get(block)
            if child is None:
                self._ledger.adopt(page)
                child = Node(next(self._handles), node, block, page, chain_hash(node.hash, block))
                node.children[block] = child
                self._nodes[child.handle] = child
                parent = parent if stored else node.hash
                stored.append(child)
            else:
                present += 1
            child.used = now
            node = child
        if stored:
            tokens = [token for child in stored for token in child.block]
            self._events.append(("stored", parent, [child.hash for child in stored], tokens))
        return node.handle, present

    def free(self, pages: Sequence[int], epoch: int = 0) -> None:
        """See RadixCacheBackend."""
        self._ledger.free(pages, epoch)

    def retire(self, epoch: int) -> None:
        """See RadixCacheBackend."""
        self._ledger.retire(epoch)

    def evict(self, pages: int) -> int:
        """See RadixCacheBackend."""
        removed: list[int] = []
        while len(removed) < pages:
            leaves = [node for node in self._nodes.values() if not node.children and not node.locks]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: (node.used, node.handle))
            removed.append(leaf.hash)
            self._drop(leaf)
        if removed:
            self._events.append(("removed", removed))
        return len(removed)

    def flush(self) -> int:
        """See RadixCacheBackend."""
        return self.evict(self._evictable())

    def counters(self) -> tuple[int, int, int, int]:
        """See RadixCacheBackend."""
        evictable = self._evictable()
        return len(self._ledger.spare), evictable, len(self._nodes) - evictable, len(self._ledger.private)

    def block_hashes(self, namespace: bytes, token_ids: Sequence[int]) -> list[int]:
        """See RadixCacheBackend."""
        return block_hashes(namespace, token_ids, self._page_size)

    def drain_events(self) -> list[CacheEvent]:
        """See RadixCacheBackend."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[StoredEvent]:
        """See RadixCacheBackend; handles rise along every path, so their order puts parents first."""
        return [
            ("stored", node.parent.hash, [node.hash], list(node.block))
            for _, node in sorted(self._nodes.items())
            if node.parent is not None
        ]

    def audit(self) -> None:
        """See RadixCacheBackend."""
        self._ledger.audit([node.page for node in self._nodes.values()])
        for node in self._nodes.values():
            if any(child.locks > node.locks for child in node.children.values()):
                raise RuntimeError(f"page {node.page} is less protected than a page after it")

    def _blocks(self, token_ids: Sequence[int], length: int) -> list[tuple[int, ...]]:
        size = self._page_size
        return [tuple(token_ids[start : start + size]) for start in range(0, length - size + 1, size)]

    def _path(self, handle: int) -> list[Node]:
        path: list[Node] = []
        node = self._nodes.get(handle)
        while node is not None and node.page >= 0:
            path.append(node)
            node = node.parent
        return path

    def _evictable(self) -> int:
        return sum(node.locks == 0 for node in self._nodes.values())

    def _drop(self, leaf: Node) -> None:
        if leaf.parent is not None:
            del leaf.parent.children[leaf.block]
        del self._nodes[leaf.handle]
        self._ledger.spare.append(leaf.page)
