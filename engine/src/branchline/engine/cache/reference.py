"""The oracle: a page cache in plain Python, one tree node a page, written to be read rather than to be fast.

Every backend is compared with it (tests/cache). Eviction scans all leaves. Not for production.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from branchline.engine.cache.base import CacheContext, CacheEvent, NodeView, StoredEvent, TreeView
from branchline.engine.cache.eviction import clamp, ranks
from branchline.engine.cache.hashing import block_hashes, chain_hash, root_hash
from branchline.engine.cache.ledger import Ledger
from branchline.engine.types import PageMove


class Node:
    """One cached page. `locks` counts the holders of this node and of its descendants."""

    def __init__(self, handle: int, parent: Node | None, block: tuple[int, ...], page: int, hash_: int) -> None:
        self.handle = handle
        self.parent = parent
        self.block = block
        self.page = page
        self.hash = hash_
        self.locks = 0
        self.on_host = False  # then `page` is a slot
        self.used = 0
        self.used_ms = 0
        self.uses = 0
        self.priority = -128
        self.children: dict[tuple[int, ...], Node] = {}


class ReferenceCache:
    """RadixCacheBackend: of the unlocked leaves that of least rank goes first, of equal ones the least recent."""

    shares = True

    def __init__(self, context: CacheContext) -> None:
        self._ranks = ranks(context.eviction)
        self._now_ms = 0
        self._page_size = context.page_size
        self._ledger = Ledger(context.num_pages)
        self._handles = itertools.count(1)
        self._clock = itertools.count(1)
        self._roots: dict[bytes, Node] = {}
        self._nodes: dict[int, Node] = {}  # page nodes by handle
        self._events: list[CacheEvent] = []
        self._slots = list(range(context.host_pages))  # free ones
        self._host = [context.host_pages, 0, 0]  # slots, stored, fetched
        self._moves: list[PageMove] = []
        self._pinned: list[Node] = []

    def match(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """See RadixCacheBackend; handle 0 stands for an empty match."""
        node, pages = self._roots.get(namespace), []
        now = next(self._clock)
        for block in self._blocks(token_ids, min(limit, len(token_ids))):
            child = node.children.get(block) if node else None
            if child is None or child.on_host:
                break
            node = child
            node.used, node.used_ms = now, self._now_ms
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
            step.used, step.used_ms = now, self._now_ms

    def credit(self, node: int, priority: int = 0) -> None:
        """See RadixCacheBackend."""
        now = next(self._clock)
        for step in self._path(node):
            step.uses += 1
            step.priority = max(step.priority, clamp(priority))
            step.used, step.used_ms = now, self._now_ms

    def tick(self, now_ms: int) -> None:
        """See RadixCacheBackend."""
        self._now_ms = max(self._now_ms, now_ms)

    def available(self) -> int:
        """See RadixCacheBackend."""
        return len(self._ledger.spare) + self._evictable()

    def allocate(self, count: int) -> list[int] | None:
        """See RadixCacheBackend."""
        if count > self.available():
            return None
        self.evict(count - len(self._ledger.spare))
        return self._ledger.take(count)

    def insert(
        self, namespace: bytes, token_ids: Sequence[int], pages: Sequence[int], priority: int = 0
    ) -> tuple[int, int]:
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
            elif child.on_host:  # computed again: the caller's page takes its place
                self._ledger.adopt(page)
                self._slots.append(child.page)
                child.page, child.on_host = page, False
            else:
                present += 1
            child.used, child.used_ms = now, self._now_ms
            child.priority = max(child.priority, clamp(priority))
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
        evicted = 0
        while evicted < pages and (leaf := self._least(on_host=False)) is not None:
            evicted += 1
            worst = self._least(on_host=True)
            if not self._slots and worst is not None:
                removed.append(worst.hash)
                self._drop(worst)
            if self._slots:
                self._store(leaf)
            else:
                removed.append(leaf.hash)
                self._drop(leaf)
        if removed:
            self._events.append(("removed", removed))
        return evicted

    def _least(self, *, on_host: bool) -> Node | None:
        """What goes first in a tier: never before what follows it there, nor what is held."""
        leaves = [
            node
            for node in self._nodes.values()
            if node.on_host == on_host
            and not node.locks
            and node not in self._pinned
            and not any(child.on_host == on_host for child in node.children.values())
        ]
        return min(
            leaves,
            key=lambda node: (self._ranks.of(node.uses, node.priority), node.used, node.handle),
            default=None,
        )

    def _store(self, leaf: Node) -> None:
        slot = self._slots.pop()
        self._moves.append((True, leaf.page, slot))
        self._ledger.spare.append(leaf.page)
        leaf.page, leaf.on_host, leaf.used = slot, True, next(self._clock)
        self._host[1] += 1

    def fetch(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> int:
        """See RadixCacheBackend."""
        node, pages = self.match(namespace, token_ids, limit)
        blocks = self._blocks(token_ids, min(limit, len(token_ids)))[len(pages) :]
        at = self._nodes[node] if node else self._roots.get(namespace)
        for block in blocks:
            at = at.children.get(block) if at else None
            if at is None:
                break
            self._pinned.append(at)
        self.lock(node)
        self._pinned = self._pinned[: self.available()]
        taken = self.allocate(len(self._pinned)) or []
        self.unlock(node)
        for child, page in zip(self._pinned, taken, strict=True):
            self._slots.append(child.page)
            self._moves.append((False, page, child.page))
            self._ledger.adopt(page)
            child.page, child.on_host = page, False
        fetched, self._pinned = self._pinned, []
        self._host[2] += len(fetched)
        if fetched:
            self.match(namespace, token_ids, (len(pages) + len(fetched)) * self._page_size)
        return len(fetched)

    def drain_moves(self) -> list[PageMove]:
        """See RadixCacheBackend."""
        moves, self._moves = self._moves, []
        return moves

    def host_counters(self) -> tuple[int, int, int, int]:
        """See RadixCacheBackend."""
        return self._host[0], self._host[0] - len(self._slots), self._host[1], self._host[2]

    def flush(self) -> int:
        """See RadixCacheBackend."""
        removed: list[int] = []
        for on_host in (True, False):
            while (leaf := self._least(on_host=on_host)) is not None:
                removed.append(leaf.hash)
                self._drop(leaf)
        if removed:
            self._events.append(("removed", removed))
        return len(removed)

    def counters(self) -> tuple[int, int, int, int]:
        """See RadixCacheBackend."""
        evictable = self._evictable()
        protected = sum(not node.on_host for node in self._nodes.values()) - evictable
        return len(self._ledger.spare), evictable, protected, len(self._ledger.private)

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

    def view(self, cursor: int, limit: int, tokens: int, leases: Sequence[int]) -> TreeView:
        """See RadixCacheBackend; a node is one page."""
        found = [node for handle, node in sorted(self._nodes.items()) if handle >= cursor]
        held = [step for lease in leases for step in self._path(lease)]
        shown = [self._show(node, tokens, held.count(node)) for node in found[:limit]]
        following = found[limit].handle if len(found) > limit else 0
        return TreeView(shown, following, len(self._nodes), sum(bool(root.children) for root in self._roots.values()))

    def _show(self, node: Node, tokens: int, leases: int) -> NodeView:
        path = self._path(node.handle)
        parent = path[1].handle if len(path) > 1 else 0
        root = path[-1].parent.hash if path[-1].parent is not None else 0
        depth = (len(path) - 1) * self._page_size
        age = self._now_ms - node.used_ms
        return NodeView(
            node.handle, parent, root, 1, depth, node.locks, leases, node.uses, age, len(node.children), node.on_host,
            list(node.block[:tokens]),
        )  # fmt: skip

    def audit(self) -> None:
        """See RadixCacheBackend."""
        self._ledger.audit([node.page for node in self._nodes.values() if not node.on_host])
        held = [node.page for node in self._nodes.values() if node.on_host]
        if sorted([*self._slots, *held]) != list(range(self._host[0])):
            raise RuntimeError("a host slot is in no state or in two")
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
        return sum(node.locks == 0 and not node.on_host for node in self._nodes.values())

    def _drop(self, leaf: Node) -> None:
        if leaf.parent is not None:
            del leaf.parent.children[leaf.block]
        del self._nodes[leaf.handle]
        (self._slots if leaf.on_host else self._ledger.spare).append(leaf.page)
