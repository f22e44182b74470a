"""Covering arrays: few rows in which every pair of values of every two factors meets."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations

Row = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs(row: Mapping[str, object]) -> set[Pair]:
    """All pairs that meet in a row."""
    return set(combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def wanted(factors: Mapping[str, Sequence[object]]) -> set[Pair]:
    """All pairs there are."""
    names = sorted(factors)
    return {((a, x), (b, y)) for a, b in combinations(names, 2) for x in factors[a] for y in factors[b]}


def covering(factors: Mapping[str, Sequence[object]], seed: int = 1, tries: int = 60) -> list[Row]:
    """Rows that cover every pair; greedy, the same for the same arguments."""
    generator, left, rows = random.Random(seed), wanted(factors), list[Row]()
    while left:
        first = min(left, key=repr)
        best: Row = {}
        for _ in range(tries):
            row = {name: generator.choice(list(values)) for name, values in factors.items()}
            row |= dict(first)
            if not best or len(pairs(row) & left) > len(pairs(best) & left):
                best = row
        rows.append(best)
        left -= pairs(best)
    return rows
