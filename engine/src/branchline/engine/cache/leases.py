"""Prefix leases: who holds which pages of the tree, until when, and within which budgets.

A lease locks its prefix's node, so its pages can be neither evicted nor handed out. Pages that several leases
share count once. Called on the loop's thread only; reads no clock.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from branchline.engine.cache.base import RadixCacheBackend, TreeView
from branchline.engine.errors import InvalidArgument, NotFound, ResourceExhausted
from branchline.engine.types import LeaseState

MAX_TTL_MS = 86_400_000


@dataclass(slots=True)
class Lease:
    """One hold. `token_ids` are those of its whole pages."""

    lease_id: str
    tenant: str
    namespace: bytes
    token_ids: tuple[int, ...]
    node: int
    pages: tuple[int, ...]
    expires_s: float


@dataclass(frozen=True, slots=True)
class Budgets:
    """Most pages that leases may hold: all together, and those of one tenant."""

    worker: int
    tenant: int

    @staticmethod
    def of(num_pages: int, worker: float, tenant: float | None) -> Budgets:
        """From shares of the pool; no tenant share means the worker's."""
        pages = int(num_pages * worker)
        return Budgets(pages, pages if tenant is None else min(int(num_pages * tenant), pages))


class LeaseBook:
    """Live leases by id. Conservation: `held` counts each page once for each lease that holds it."""

    def __init__(
        self,
        cache: RadixCacheBackend,
        page_size: int,
        budgets: Budgets,
        draw_id: Callable[[], str] = lambda: secrets.token_hex(16),
    ) -> None:
        self.budgets = budgets
        self._cache = cache
        self._page_size = page_size
        self._draw_id = draw_id
        self._leases: dict[str, Lease] = {}
        self._held: Counter[int] = Counter()
        self._tenants: dict[str, Counter[int]] = {}
        self._next: float | None = None

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def pages(self) -> int:
        """Pages that leases hold, each counted once."""
        return len(self._held)

    @property
    def held(self) -> set[int]:
        """Those pages."""
        return set(self._held)

    @property
    def next_expiry_s(self) -> float | None:
        """No lease runs out before; None without leases."""
        return self._next

    def nodes(self) -> list[int]:
        """Nodes of the live leases, one entry a lease."""
        return [lease.node for lease in self._leases.values()]

    def check(self, tenant: str, namespace: bytes, token_ids: Sequence[int], now: float) -> None:
        """Refuse early what could not be granted. Raises InvalidArgument or ResourceExhausted."""
        if not self._cache.shares:
            raise InvalidArgument(
                "this worker shares no prefixes, so that there is nothing to lease: start it without "
                "--disable-radix-cache",
                field="lease",
            )
        whole = len(token_ids) // self._page_size
        _, found = self._cache.match(namespace, token_ids, whole * self._page_size)
        self._check_budgets(tenant, found, whole - len(found), now)

    def grant(self, tenant: str, namespace: bytes, token_ids: Sequence[int], ttl_ms: int, now: float) -> Lease:
        """Hold the whole pages of a prefix that is in the tree. Raises ResourceExhausted beyond a budget."""
        size = len(token_ids) // self._page_size * self._page_size
        node, pages = self._cache.match(namespace, token_ids, size)
        self._check_budgets(tenant, pages, 0, now)
        self._cache.lock(node)
        lease = Lease(
            self._draw_id(), tenant, namespace, tuple(token_ids[: len(pages) * self._page_size]), node, tuple(pages),
            now + ttl_ms / 1e3,
        )  # fmt: skip
        self._leases[lease.lease_id] = lease
        self._held.update(lease.pages)
        self._tenants.setdefault(tenant, Counter()).update(lease.pages)
        self._note(lease.expires_s)
        return lease

    def use(
        self, lease_id: str, tenant: str, namespace: bytes, token_ids: Sequence[int], now: float
    ) -> tuple[LeaseState, int | None]:
        """How a request finds a lease, and the node to give back with `leave`; it stays locked until then."""
        lease = self._find(lease_id, tenant, now)
        if lease is None:
            return LeaseState.LOST, None
        common = min(len(lease.token_ids), len(token_ids))
        if namespace != lease.namespace or tuple(token_ids[:common]) != lease.token_ids[:common]:
            return LeaseState.UNMATCHED, None
        self._cache.lock(lease.node)
        return LeaseState.HELD, lease.node

    def leave(self, node: int) -> None:
        """Give back what `use` locked."""
        self._cache.unlock(node)

    def renew(self, lease_id: str, tenant: str, ttl_ms: int, now: float) -> Lease:
        """Let a lease run out `ttl_ms` from now. Raises NotFound if it does not live."""
        lease = self._find(lease_id, tenant, now)
        if lease is None:
            raise NotFound("the lease was released, ran out or never was: acquire a new one", field="lease_id")
        lease.expires_s = now + ttl_ms / 1e3
        self._note(lease.expires_s)
        return lease

    def release(self, lease_id: str, tenant: str, now: float) -> bool:
        """End a lease; whether it was alive."""
        lease = self._find(lease_id, tenant, now)
        if lease is not None:
            self._end(lease)
        return lease is not None

    def expire(self, now: float) -> int:
        """Tell the cache the time and end what has run out; how many leases."""
        self._cache.tick(int(now * 1e3))
        if self._next is None or now < self._next:
            return 0
        over = [lease for lease in self._leases.values() if lease.expires_s <= now]
        for lease in over:
            self._end(lease)
        self._next = min((lease.expires_s for lease in self._leases.values()), default=None)
        return len(over)

    def view(self, cursor: int, limit: int, tokens: int, now: float) -> TreeView:
        """A piece of the cache's tree with what leases hold of it; see RadixCacheBackend.view."""
        self._cache.tick(int(now * 1e3))
        return self._cache.view(cursor, limit, tokens, self.nodes())

    def clear(self) -> None:
        """End all leases."""
        for lease in list(self._leases.values()):
            self._end(lease)

    def audit(self) -> None:
        """Raise RuntimeError unless the counts are those of the live leases."""
        held: Counter[int] = Counter(page for lease in self._leases.values() for page in lease.pages)
        if held != self._held or len(held) > self.budgets.worker:
            raise RuntimeError(f"leases hold {len(held)} pages, {len(self._held)} are counted")
        if sum((Counter(counts) for counts in self._tenants.values()), Counter()) != held:
            raise RuntimeError("the tenants' pages are not those of all leases")

    # ---- inside -------------------------------------------------------------------------------

    def _find(self, lease_id: str, tenant: str, now: float) -> Lease | None:
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.tenant == tenant and lease.expires_s > now else None

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        _subtract(self._held, lease.pages)
        counts = self._tenants[lease.tenant]
        _subtract(counts, lease.pages)
        if not any(other.tenant == lease.tenant for other in self._leases.values()):
            del self._tenants[lease.tenant]
        self._cache.unlock(lease.node)

    def _note(self, expires_s: float) -> None:
        self._next = expires_s if self._next is None else min(self._next, expires_s)

    def _check_budgets(self, tenant: str, pages: Iterable[int], unknown: int, now: float) -> None:
        pages = list(pages)
        for whose, counts, budget in (
            ("the worker's lease budget", self._held, self.budgets.worker),
            ("your lease budget", self._tenants.get(tenant, Counter[int]()), self.budgets.tenant),
        ):
            asked = unknown + sum(page not in counts for page in pages)
            if asked and len(counts) + asked > budget:
                raise self._refusal(whose, asked, len(counts), budget, now)

    def _refusal(self, whose: str, asked: int, held: int, budget: int, now: float) -> ResourceExhausted:
        wait = None
        if asked <= budget and self._next is not None:
            wait = min(max(int((self._next - now) * 1e3), 50), 2**31)
        return ResourceExhausted(
            f"{whose} is {budget} pages, {held} are held and {asked} more are asked for: release a lease, or lease a "
            "shorter prefix",
            field="lease",
            retry_after_ms=wait,
        )


def _subtract(counts: Counter[int], pages: Iterable[int]) -> None:
    for page in pages:
        counts[page] -= 1
        if not counts[page]:
            del counts[page]
