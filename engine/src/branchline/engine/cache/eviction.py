"""Eviction policies: which cached prefix goes first when pages are short. The protocol and the built-in ones.

A policy is asked once, at start, for the rank of every level of use and priority; from then on evicting a page
costs the same at any tree size and runs no Python. Ties go by recency, a prefix never before what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from branchline import registry
from branchline.registry import RegistryError

EXACT_USES = 32
USE_LEVELS = 64
LOWEST_PRIORITY, HIGHEST_PRIORITY = -128, 127
HIGHEST_RANK = 255


class EvictionPolicy(Protocol):
    """Ranks cached prefixes: lower ranks go first, equal ones by recency."""

    def rank(self, uses: int, priority: int) -> int:
        """The rank, 0 to 255, of a prefix on which `uses` requests began, `priority` (-128 to 127) the highest
        of those that used it. Pure; must not fall when either rises."""


class Lru:
    """The least recently used goes first, whatever else."""

    def rank(self, uses: int, priority: int) -> int:
        """All alike."""
        return 0


class Lfu:
    """The least often used goes first."""

    def rank(self, uses: int, priority: int) -> int:
        """Exact up to 31 uses, then one rank for each doubling."""
        return use_level(uses)


class Slru:
    """What was never used again goes first, so that a scan of new prompts leaves what is shared alone."""

    def rank(self, uses: int, priority: int) -> int:
        """Two segments: probation and, from the first reuse on, protected."""
        return min(uses, 1)


class Priority:
    """What only requests of low priority used goes first."""

    def rank(self, uses: int, priority: int) -> int:
        """The priority itself."""
        return priority - LOWEST_PRIORITY


@dataclass(frozen=True, slots=True)
class Ranks:
    """A policy's answers: a row of 256 priorities for each of 64 levels of use."""

    table: bytes

    def of(self, uses: int, priority: int) -> int:
        """The rank of a prefix."""
        return self.table[use_level(uses) * 256 + clamp(priority) - LOWEST_PRIORITY]


def use_level(uses: int) -> int:
    """Level of a number of uses: itself up to 31, then one for each doubling, at most 63."""
    return uses if uses < EXACT_USES else min(26 + uses.bit_length(), USE_LEVELS - 1)


def clamp(priority: int) -> int:
    """The nearest priority that policies know."""
    return min(max(priority, LOWEST_PRIORITY), HIGHEST_PRIORITY)


def ranks(name: str) -> Ranks:
    """Ask the policy registered under `name`. Raises RegistryError if it is unknown or its ranks are no order."""
    policy = registry.eviction_policies.get(name)()
    registry.eviction_policies.verify(name, policy)
    return Ranks(table(name, policy))  # type: ignore[arg-type]


def table(name: str, policy: EvictionPolicy) -> bytes:
    """Every rank of a policy, a row a level of use. Raises RegistryError if they are no order."""
    found = [
        _rank(name, policy, level if level < EXACT_USES else 1 << (level - 27), priority)
        for level in range(USE_LEVELS)
        for priority in range(LOWEST_PRIORITY, HIGHEST_PRIORITY + 1)
    ]
    for at, rank in enumerate(found):
        if (at >= 256 and rank < found[at - 256]) or (at % 256 and rank < found[at - 1]):
            raise RegistryError(
                f"eviction policy {name!r} gives use level {at // 256} with priority {at % 256 - 128} rank {rank}, "
                "less than for less of either: a rank must not fall when uses or priority rise"
            )
    return bytes(found)


def _rank(name: str, policy: EvictionPolicy, uses: int, priority: int) -> int:
    rank = policy.rank(uses, priority)
    if not isinstance(rank, int) or not 0 <= rank <= HIGHEST_RANK:
        raise RegistryError(
            f"eviction policy {name!r} gives {uses} uses with priority {priority} the rank {rank!r}: give an integer "
            f"from 0 to {HIGHEST_RANK}"
        )
    return rank
