"""What a radix cache backend is: the protocol, its build context and nothing else.

A backend owns every KV page of the pool: each is free, in the tree, or private to a caller. It knows
nothing of requests, of torch or of the KV itself. Called by the scheduler, on the loop's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

StoredEvent: TypeAlias = tuple[Literal["stored"], int, list[int], list[int]]
"""("stored", parent hash, block hashes, their tokens): whole blocks that became resident."""

CacheEvent: TypeAlias = StoredEvent | tuple[Literal["removed"], list[int]] | tuple[Literal["cleared"]]
"""A change of residency; ("removed", hashes) lists children first, ("cleared",) is everything."""


@dataclass(frozen=True, slots=True)
class CacheContext:
    """All that a backend's factory may know. `eviction` names the policy; backends refuse one they lack."""

    num_pages: int
    page_size: int
    eviction: str = "lru"

    def __post_init__(self) -> None:
        """Refuse an empty pool."""
        if self.num_pages < 1:
            raise ValueError(f"num_pages is {self.num_pages}; give the pool at least one page")
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; a page holds at least one token")


class RadixCacheBackend(Protocol):
    """A page ledger with a prefix tree over whole pages, keyed by (namespace, token ids).

    Not thread-safe. `match` and `insert` return node handles that stay valid while locked. A locked node
    protects its whole path from eviction. Callers never touch a page they neither own nor have locked.
    """

    shares: bool
    """Whether `match` can ever find anything; False lets the scheduler skip waiting for shared pages."""

    def match(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """(node, pages) of the longest cached prefix in whole pages of at most `limit` tokens; touches recency."""

    def lock(self, node: int) -> None:
        """Protect the node's path once more. Must be undone by `unlock`."""

    def unlock(self, node: int) -> None:
        """Take one protection back; at zero the path is evictable again, and the most recent."""

    def available(self) -> int:
        """Free plus evictable pages: what `allocate` can give at most."""

    def allocate(self, count: int) -> list[int] | None:
        """`count` private pages, evicting as needed; None, with nothing changed, if that many can't be had."""

    def insert(self, namespace: bytes, token_ids: Sequence[int], pages: Sequence[int]) -> tuple[int, int]:
        """Give whole pages to the tree: (deepest node, pages already present before).

        pages[present:] become the tree's. Those of pages[:present] that are not the tree's stay private to the caller.
        """

    def free(self, pages: Sequence[int], epoch: int = 0) -> None:
        """Return private pages; usable again at once (epoch 0) or after `retire(epoch)`."""

    def retire(self, epoch: int) -> None:
        """Nothing of `epoch` or before reads KV any more: its frees take effect."""

    def evict(self, pages: int) -> int:
        """Drop up to so many evictable pages, least valuable first; how many were dropped."""

    def flush(self) -> int:
        """Drop every evictable page; how many were dropped."""

    def counters(self) -> tuple[int, int, int, int]:
        """Pages (free, evictable, protected, private); the sum is the pool's size at every moment."""

    def block_hashes(self, namespace: bytes, token_ids: Sequence[int]) -> list[int]:
        """Chained hash of each whole page of `token_ids`, as events carry them."""

    def drain_events(self) -> list[CacheEvent]:
        """What became resident or ceased to be since the last call, in order."""

    def snapshot(self) -> list[StoredEvent]:
        """`stored` events of everything resident, parents first."""

    def audit(self) -> None:
        """Raise RuntimeError if any page is in no state or in two."""
