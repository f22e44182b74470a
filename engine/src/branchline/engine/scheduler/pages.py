"""A sequence's KV pages: demand, growth, hand-over to the tree, release. The only caller of a cache's ledger.

Page tables are append-only while a step runs. What is taken is given back through `release`, on every way out.
"""

from __future__ import annotations

from branchline.engine.cache import RadixCacheBackend
from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.types import Executor, HostExecutor


def page_demand(computed: int, length: int, page_size: int) -> int:
    """New pages that grow KV from `computed` to `length` tokens: a partial tail page is used first."""
    return -(-length // page_size) - -(-computed // page_size)


def move_pages(cache: RadixCacheBackend, executor: Executor) -> None:
    """Do the copies between the tiers that the cache waits for. Before a step reads or writes any page."""
    moves = cache.drain_moves()
    if moves and isinstance(executor, HostExecutor):
        executor.move_pages(moves)


class PageTables:
    """Grows and returns the pages of sequences over one cache."""

    def __init__(self, cache: RadixCacheBackend, num_pages: int, page_size: int) -> None:
        self.cache = cache
        self.num_pages = num_pages
        self.page_size = page_size
        self.has_host = cache.host_counters()[0] > 0
        self.version = 0  # rises when the tree may have grown
        self.epoch = 0  # the step in flight whose rows may still write to pages that are given back; 0: none

    def find(self, sequence: Sequence, limit: int) -> tuple[int, list[int]]:
        """(node, pages) that the tree has of the sequence's first `limit` tokens. Nothing is locked."""
        return self.cache.match(sequence.namespace, sequence.known(), limit)

    def fetch(self, sequence: Sequence, limit: int) -> None:
        """Bring what the host tier has of the sequence's next tokens back, and start it on that too.

        Takes no page that computing those tokens would not.
        """
        if not self.has_host or not self.cache.fetch(sequence.namespace, sequence.known(), limit):
            return
        self.version += 1
        node, pages = self.find(sequence, limit)
        self.cache.lock(node)
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
        self.attach(sequence, node, pages)

    def attach(self, sequence: Sequence, node: int, pages: list[int]) -> None:
        """Start a sequence on pages found and locked by the caller."""
        sequence.node = node
        sequence.pages = pages
        sequence.full = len(pages)
        sequence.computed = len(pages) * self.page_size

    def missing(self, sequence: Sequence) -> int:
        """Pages still needed for the KV of all its tokens and of the next one."""
        return -(-(len(sequence.tokens) + sequence.samples) // self.page_size) - len(sequence.pages)

    def extend(self, sequence: Sequence, count: int) -> int:
        """Take pages for up to `count` new tokens; for how many of them there is room now."""
        need = page_demand(len(sequence.pages) * self.page_size, sequence.computed + count, self.page_size)
        if need <= 0:
            return count
        take = min(need, self.cache.available())
        pages = self.cache.allocate(take) if take else []
        if pages is None:  # the backend promised more than it had
            pages = []
        sequence.pages.extend(pages)
        return min(count, len(sequence.pages) * self.page_size - sequence.computed)

    def publish(self, sequence: Sequence) -> None:
        """Give every whole page of computed KV to the tree; duplicates stay the sequence's own."""
        full = sequence.computed // self.page_size
        if full <= sequence.full:
            return
        tokens = sequence.known()[: full * self.page_size]
        request = sequence.group.request
        node, present = self.cache.insert(request.namespace, tokens, sequence.pages[:full], request.priority)
        if present > sequence.full:
            sequence.duplicates.extend(sequence.pages[sequence.full : present])
        self.cache.lock(node)
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
        sequence.node = node
        sequence.full = full
        self.version += 1

    def fold(self, sequence: Sequence) -> bool:
        """Go on with the tree's pages where the sequence computed the same again, and give its own back. Between steps.

        So what a pool holds does not depend on whether a prompt was cached.
        """
        if not sequence.duplicates:
            return False
        _, pages = self.find(sequence, sequence.full * self.page_size)
        if len(pages) < sequence.full:
            return False
        sequence.pages = pages + sequence.pages[sequence.full :]  # a new list: tables in flight only grow
        self.cache.free(sequence.duplicates, self.epoch)
        sequence.duplicates = []
        return True

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take all pages off a sequence; `keep` leaves its whole pages in the tree. Idempotent."""
        if keep:
            self.publish(sequence)
        own = sequence.duplicates + sequence.pages[sequence.full :]
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
        if own:
            self.cache.free(own, self.epoch)
        sequence.node = None
        sequence.pages = []
        sequence.duplicates = []
        sequence.full = 0
        sequence.computed = 0
