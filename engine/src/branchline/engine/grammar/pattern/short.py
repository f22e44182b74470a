"""A short text that an expression is likely to match. A guess: whoever uses it asks the constraint itself."""

from __future__ import annotations

from branchline.engine.grammar.pattern.tree import Chars, Concat, Either, Node, Repeat

LONG = 4096  # characters that a guess may have
LIKED = "0a1A-_ .:/@x"  # tried first of a set, all of them single bytes of any vocabulary


def short(node: Node) -> str | None:
    """The guess; None where none is easily made. Look-aheads and anchors are taken to hold."""
    match node:
        case Chars():
            return _one(node)
        case Concat():
            parts = [short(part) for part in node.parts]
            return _joined([part for part in parts if part is not None]) if None not in parts else None
        case Either():
            known = [text for text in map(short, node.branches) if text is not None]
            return min(known, key=len, default=None)
        case Repeat():
            if node.least == 0:
                return ""
            body = short(node.body)
            return None if body is None or len(body) * node.least > LONG else body * node.least
        case _:
            return ""


def _joined(parts: list[str]) -> str | None:
    return "".join(parts) if sum(map(len, parts)) <= LONG else None


def _one(chars: Chars) -> str | None:
    """A character of the set: a plain one if there is one."""
    codes = [*map(ord, LIKED), *range(0x20, 0x7F), *(low for low, _ in chars.ranges)]
    return next((chr(code) for code in codes if chars.holds(code) and not 0xD800 <= code <= 0xDFFF), None)
