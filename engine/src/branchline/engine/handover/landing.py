"""The decode half: where pulled pages land, page run by page run, in the tree of this worker.

What has landed is a cached prefix like any other, locked until its request is scheduled; a pull that breaks leaves
nothing but that. Loop's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from branchline.engine.cache import RadixCacheBackend
from branchline.engine.handover.base import Counters
from branchline.engine.types import HostExecutor, PageExecutor


@dataclass(slots=True)
class Landing:
    """The pages of one prompt that are there, all under the lock of `node`."""

    namespace: bytes
    token_ids: tuple[int, ...]
    wanted: int
    node: int | None = None
    pages: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Pages that have not come."""
        return self.wanted - len(self.pages)


class Landings:
    """Landings of live requests by id. Conservation: `drop` gives back every lock."""

    def __init__(self, cache: RadixCacheBackend, executor: PageExecutor, counters: Counters) -> None:
        self._cache = cache
        self._executor = executor
        self._counters = counters
        self._landings: dict[str, Landing] = {}

    def pages(self) -> set[int]:
        """Pages under the landings' locks."""
        return {page for landing in self._landings.values() for page in landing.pages}

    def begin(self, request_id: str, namespace: bytes, token_ids: tuple[int, ...]) -> Landing:
        """A prompt's pages will come; those that are here already are locked."""
        wanted = (len(token_ids) - 1) // self._executor.page_size
        landing = self._landings[request_id] = Landing(namespace, token_ids, wanted)
        self._hold(landing)
        return landing

    def land(self, request_id: str, first: int, data: bytes, reserve: int) -> bool:
        """Put a run of pages into the tree; False if there is no room for it that leaves `reserve` pages free."""
        landing = self._landings.get(request_id)
        if landing is None:
            return False
        size = self._executor.page_bytes
        count = len(data) // size
        here = len(landing.pages)
        if first > here:  # what was here had to give way
            self._hold(landing)
            here = len(landing.pages)
            if first > here:
                return False
        skip = here - first  # come by another request meanwhile
        fresh = count - skip
        if fresh <= 0:
            return True
        if self._cache.available() < fresh + reserve:
            return False
        pages = self._cache.allocate(fresh)
        if pages is None:
            return False
        try:
            self._write(pages, memoryview(data)[skip * size :])
            tokens = landing.token_ids[: (here + fresh) * self._executor.page_size]
            _, present = self._cache.insert(landing.namespace, tokens, landing.pages + pages)
        except BaseException:
            self._cache.free(pages)
            raise
        # Pages that the tree had already stay ours; they are not needed.
        unused = (landing.pages + pages)[here:present]
        if unused:
            self._cache.free(unused)
        self._hold(landing)
        self._counters.received_pages += fresh
        self._counters.received_bytes += fresh * size
        return True

    def drop(self, request_id: str) -> None:
        """The request has been scheduled, or has ended. Idempotent."""
        landing = self._landings.pop(request_id, None)
        if landing is not None:
            self._release(landing)

    def give_way(self) -> bool:
        """Let go of all that has landed and waits, so that it may be evicted; whether there was any."""
        held = [landing for landing in self._landings.values() if landing.node is not None]
        for landing in held:
            self._release(landing)
        return bool(held)

    def _write(self, pages: Sequence[int], data: memoryview) -> None:
        moves = self._cache.drain_moves()  # what had these pages may be on its way to the host tier
        if moves and isinstance(self._executor, HostExecutor):
            self._executor.move_pages(moves)
        self._executor.write_pages(pages, data)

    def _hold(self, landing: Landing) -> None:
        """Lock what the tree has of the prompt."""
        size = self._executor.page_size
        node, pages = self._cache.match(landing.namespace, landing.token_ids, landing.wanted * size)
        if not pages:
            return
        self._cache.lock(node)
        if landing.node is not None:
            self._cache.unlock(landing.node)
        landing.node, landing.pages = node, pages

    def _release(self, landing: Landing) -> None:
        node, landing.node, landing.pages = landing.node, None, []
        if node is not None:
            self._cache.unlock(node)
