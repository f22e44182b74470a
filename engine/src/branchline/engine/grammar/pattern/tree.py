"""The tree of a regular expression. Plain data; characters are Unicode code points."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

TOP = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set: ranges and Unicode properties, all of it negated or not."""

    ranges: tuple[tuple[int, int], ...] = ()
    properties: tuple[tuple[str, bool], ...] = ()  # (name, negated)
    negated: bool = False

    def holds(self, code: int) -> bool:
        """Whether the set has the character. Exact for ASCII and every property by general category."""
        inside = any(low <= code <= high for low, high in self.ranges) or any(
            _has(name, code) is not negated for name, negated in self.properties
        )
        return inside is not self.negated


@dataclass(frozen=True, slots=True)
class Concat:
    """One after the other; the empty one matches the empty text."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Either:
    """One of them."""

    branches: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; most None is without bound."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` (start) or `$` (end)."""

    start: bool


@dataclass(frozen=True, slots=True)
class Look:
    """Look-ahead."""

    body: Node
    positive: bool


Node = Chars | Concat | Either | Repeat | Anchor | Look
EMPTY = Concat()
ANY = Chars(negated=True)
REST = Repeat(ANY, 0, None)

CATEGORIES = frozenset(
    "L Lu Ll Lt LC Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf Cs Co Cn".split()
)


def _has(name: str, code: int) -> bool:
    category = unicodedata.category(chr(code))
    return category in ("Lu", "Ll", "Lt") if name == "LC" else category.startswith(name)
