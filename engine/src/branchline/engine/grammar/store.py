"""Compiled constraints by key, and remembered refusals: bounded by bytes a tenant, least recently used first out.

Plain bookkeeping on one thread at a time (the manager's lock); the clock is passed in. An entry that several tenants
use is charged to each, so that none can push out what another still has.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from branchline.engine.errors import EngineError

V = TypeVar("V")
Key = Hashable


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a constraint was not compiled, and until when that is believed."""

    error: EngineError
    until_s: float


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V | Refusal
    bytes: int
    owners: int = 0


class Store(Generic[V]):
    """`budget` bytes for each of at most `tenants` tenants."""

    def __init__(self, budget: int, tenants: int) -> None:
        self._budget = budget
        self._most = tenants
        self._entries: dict[Key, _Entry[V]] = {}
        self._tenants: OrderedDict[str, OrderedDict[Key, None]] = OrderedDict()
        self._bytes: Counter[str] = Counter()  # charged to each tenant; kept, since it is asked for at every hit

    def __len__(self) -> int:
        return len(self._entries)

    def held(self, tenant: str) -> int:
        """Bytes charged to a tenant."""
        return self._bytes[tenant]

    def get(self, key: Key, tenant: str, now: float) -> V | Refusal | None:
        """What is known of a key; refusals that ran out are forgotten."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if isinstance(entry.value, Refusal) and now >= entry.value.until_s:
            self._forget(key)
            return None
        self._charge(key, entry, tenant)
        return entry.value

    def put(self, key: Key, tenant: str, value: V | Refusal, size: int) -> None:
        """Remember, unless it alone is larger than a tenant's budget."""
        self._forget(key)
        if size <= self._budget:
            entry = self._entries[key] = _Entry(value, size)
            self._charge(key, entry, tenant)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._tenants.clear()

    def _charge(self, key: Key, entry: _Entry[V], tenant: str) -> None:
        """Mark the key as the tenant's most recent one and make room for it."""
        keys = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        if key not in keys:
            entry.owners += 1
            self._bytes[tenant] += entry.bytes
        keys[key] = None
        keys.move_to_end(key)
        while len(keys) > 1 and self.held(tenant) > self._budget:
            self._leave(next(iter(keys)), tenant, keys)
        while len(self._tenants) > self._most:
            name, gone = self._tenants.popitem(last=False)
            for one in list(gone):
                self._leave(one, name, gone)
            del self._bytes[name]

    def _leave(self, key: Key, tenant: str, keys: OrderedDict[Key, None]) -> None:
        del keys[key]
        entry = self._entries[key]
        entry.owners -= 1
        self._bytes[tenant] -= entry.bytes
        if entry.owners == 0:
            del self._entries[key]

    def _forget(self, key: Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            for tenant, keys in self._tenants.items():
                if key in keys:
                    del keys[key]
                    self._bytes[tenant] -= entry.bytes
