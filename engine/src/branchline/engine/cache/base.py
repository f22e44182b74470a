"""What a radix cache backend is: the protocol, its build context and nothing else.

A backend owns every KV page of the pool: each is free, in the tree, or private to a caller; and every slot of the
host tier, if there is one. It knows nothing of requests, of torch or of the KV itself. Called by the scheduler, on
the loop's thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from branchline.engine.types import PageMove

StoredEvent: TypeAlias = tuple[Literal["stored"], int, list[int], list[int]]
"""("stored", parent hash, block hashes, their tokens): whole blocks that became resident."""

CacheEvent: TypeAlias = StoredEvent | tuple[Literal["removed"], list[int]] | tuple[Literal["cleared"]]
"""A change of residency; ("removed", hashes) lists children first, ("cleared",) is everything."""


@dataclass(frozen=True, slots=True)
class CacheContext:
    """All that a backend's factory may know. `eviction` is a registered policy's name."""

    num_pages: int
    page_size: int
    eviction: str = "lru"
    host_pages: int = 0  # slots of the host tier

    def __post_init__(self) -> None:
        """Refuse an empty pool."""
        if self.num_pages < 1:
            raise ValueError(f"num_pages is {self.num_pages}; give the pool at least one page")
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; a page holds at least one token")


@dataclass(frozen=True, slots=True)
class NodeView:
    """A run of pages that no request has parted yet."""

    node: int  # its number, used again when it is gone
    parent: int  # its parent's; 0 if it begins a prompt
    namespace_hash: int
    pages: int
    depth_tokens: int  # before it
    locks: int
    leases: int  # among the locks
    uses: int  # requests that began on it
    age_ms: int  # since its last use
    children: int
    on_host: bool
    token_ids: list[int]  # its first ones, as many as asked for


@dataclass(frozen=True, slots=True)
class TreeView:
    """Some nodes in the order of their numbers. `next` is the cursor of the next piece, 0 if nothing is left."""

    nodes: list[NodeView]
    next: int = 0
    nodes_total: int = 0
    namespaces_total: int = 0


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

    def credit(self, node: int, priority: int = 0) -> None:
        """One more request began on the node's prefix: what policies rank by. Touches recency; locks nothing."""

    def tick(self, now_ms: int) -> None:
        """The time on a clock that does not go back; `view` counts ages from it."""

    def available(self) -> int:
        """Free plus evictable pages: what `allocate` can give at most."""

    def allocate(self, count: int) -> list[int] | None:
        """`count` private pages, evicting as needed; None, with nothing changed, if that many can't be had."""

    def insert(
        self, namespace: bytes, token_ids: Sequence[int], pages: Sequence[int], priority: int = 0
    ) -> tuple[int, int]:
        """Give whole pages to the tree: (deepest node, pages already present before). Raises its priority to this one.

        pages[present:] become the tree's. Those of pages[:present] that are not the tree's stay private to the caller.
        """

    def free(self, pages: Sequence[int], epoch: int = 0) -> None:
        """Return private pages; usable again at once (epoch 0) or after `retire(epoch)`."""

    def retire(self, epoch: int) -> None:
        """Nothing of `epoch` or before reads KV any more: its frees take effect."""

    def evict(self, pages: int) -> int:
        """Take up to so many evictable pages, least valuable first; how many. With a host tier they move there."""

    def flush(self) -> int:
        """Drop every evictable page, of both tiers; how many were dropped."""

    def fetch(self, namespace: bytes, token_ids: Sequence[int], limit: int) -> int:
        """Bring pages that follow those of `match` back from the host tier, as many as free and evictable pages hold.

        How many. They are in the tree then, unlocked; their content is there once the moves are done.
        """

    def drain_moves(self) -> list[PageMove]:
        """Copies between the tiers since the last call. To be done in this order before any page is written again."""

    def host_counters(self) -> tuple[int, int, int, int]:
        """The host tier's slots, those in use, pages stored so far and pages fetched so far."""

    def counters(self) -> tuple[int, int, int, int]:
        """Pages (free, evictable, protected, private); the sum is the pool's size at every moment."""

    def block_hashes(self, namespace: bytes, token_ids: Sequence[int]) -> list[int]:
        """Chained hash of each whole page of `token_ids`, as events carry them."""

    def drain_events(self) -> list[CacheEvent]:
        """What became resident or ceased to be since the last call, in order."""

    def snapshot(self) -> list[StoredEvent]:
        """`stored` events of everything resident, parents first."""

    def view(self, cursor: int, limit: int, tokens: int, leases: Sequence[int]) -> TreeView:
        """Up to `limit` nodes from number `cursor` on, with at most `tokens` ids each; `leases` are locked nodes, one
        entry a lease. Touches no recency."""

    def audit(self) -> None:
        """Raise RuntimeError if any page is in no state or in two."""
