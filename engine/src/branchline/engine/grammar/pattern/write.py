"""Writes pattern trees as full-match expressions for automaton engines, plain or inside JSON's quotes.

Search semantics, anchors and leading look-aheads are resolved here: a pattern becomes a union of terms, each an
intersection of expressions, some negated. JSON spelling is canonical (one spelling a character), so intersection and
complement of quoted expressions are those of the texts they stand for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

from branchline.engine.grammar.pattern.tree import REST, Anchor, Chars, Concat, Either, Look, Node, Repeat
from branchline.engine.grammar.refusal import GrammarUnsupported

MAX_BRANCHES = 64
SPECIAL = (*range(0x20), 0x22, 0x5C)
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}


class Quoting(Enum):
    """How characters are spelled."""

    PLAIN = 0
    JSON = 1  # as the inside of a JSON string


@dataclass(frozen=True, slots=True)
class Term:
    """Texts that match every one of `all_of` and none of `none_of`, each expression matched as a whole."""

    all_of: tuple[str, ...]
    none_of: tuple[str, ...] = ()


def write(root: Node, quoting: Quoting, *, whole: bool) -> list[Term]:
    """The union that `root` means. `whole`: the text as a whole must match, else some part of it (JSON Schema).

    Raises GrammarUnsupported for anchors and look-aheads in places that have no meaning here.
    """
    if whole:
        root = Concat((Anchor(True), Concat((root,)), Anchor(False)))
    terms = []
    for branch in _branches(root):
        terms.append(_term(branch, quoting))
    return terms


def text_of(node: Node, quoting: Quoting) -> str:
    """The expression of an anchor-free tree."""
    match node:
        case Chars():
            return chars(node, quoting)
        case Concat(parts):
            return "".join(text_of(part, quoting) for part in parts)
        case Either(branches):
            return "(?:" + "|".join(text_of(branch, quoting) for branch in branches) + ")"
        case Repeat(body, least, most):
            inner = text_of(body, quoting)
            if not inner or most == 0:
                return ""
            count = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
                (least, most), f"{{{least},{'' if most is None else most}}}"
            )
            return f"(?:{inner}){count}"
    raise GrammarUnsupported("pattern", "an anchor or look-ahead inside a repetition is not enforced")


def chars(node: Chars, quoting: Quoting) -> str:
    """One character class, with JSON's escapes for what may not stand raw."""
    body = "".join(_range(low, high) for low, high in node.ranges)
    body += "".join(rf"\{'P' if negated else 'p'}{{{name}}}" for name, negated in node.properties)
    if not body:
        plain = "(?s:.)" if node.negated else "[a&&b]"
    else:
        plain = f"[{'^' if node.negated else ''}{body}]"
    if quoting is Quoting.PLAIN:
        return plain
    escapes = [code for code in SPECIAL if node.holds(code)]
    if not escapes:
        return plain
    if (
        not node.properties
        and not node.negated
        and all(low in SPECIAL and high in SPECIAL and (low == high or high < 0x20) for low, high in node.ranges)
    ):
        return _escapes(escapes)
    raw = f"[^{body}\\x00-\\x1F\\x22\\x5C]" if node.negated and not node.properties else None
    if raw is None:
        raw = f"[{plain}--[\\x00-\\x1F\\x22\\x5C]]" if body else r"[^\x00-\x1F\x22\x5C]"
    return f"(?:{raw}|{_escapes(escapes)})"


def _escapes(codes: list[int]) -> str:
    if len(codes) == len(SPECIAL):
        return r"\\(?:[\x22\\bfnrt]|u00(?:0[0-7bBeEfF]|1[0-9a-fA-F]))"
    return "(?:" + "|".join(spell(code) for code in codes) + ")"


def spell(code: int) -> str:
    """The expression of one escaped character."""
    short = _SHORT.get(code)
    if short is not None:
        return r"\\" + (r"\x22" if short == '"' else r"\\" if short == "\\" else short)
    digit = f"{code % 16:x}"
    last = digit if digit.isdigit() else f"[{digit}{digit.upper()}]"
    return rf"\\u00{code // 16}{last}"


def literal(text: str, quoting: Quoting) -> str:
    """The expression of exactly this text."""
    return "".join(chars(Chars(((ord(char), ord(char)),)), quoting) for char in text)


def _range(low: int, high: int) -> str:
    if low <= 0xDFFF and high >= 0xD800:  # surrogates are no characters of a text
        parts = [(low, 0xD7FF)] if low < 0xD800 else []
        parts += [(0xE000, high)] if high > 0xDFFF else []
        return "".join(_range(*part) for part in parts)
    return _char(low) if low == high else f"{_char(low)}-{_char(high)}"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def _term(branch: tuple[Node, ...], quoting: Quoting) -> Term:
    """One anchor-normalised branch: leading anchors and look-aheads, a body, final anchors."""
    parts = list(branch)
    start = end = False
    looks: list[Look] = []
    while parts and isinstance(parts[0], Anchor | Look):
        head = parts[0]
        if isinstance(head, Look):
            looks.append(head)
        elif head.start:
            start = True
        else:
            break
        parts.pop(0)
    while parts and isinstance(parts[-1], Anchor) and not parts[-1].start:
        end = True
        parts.pop()
    if any(isinstance(part, Anchor | Look) for part in parts):
        raise GrammarUnsupported("pattern", "an anchor or look-ahead in the middle is not enforced")
    if looks and not start:
        raise GrammarUnsupported("pattern", "a look-ahead that doesn't follow ^ is not enforced")
    body = Concat((*(() if start else (REST,)), *parts, *(() if end else (REST,))))
    all_of, none_of = [text_of(body, quoting)], []
    for look in looks:
        inner = write(Concat((Anchor(True), look.body)), quoting, whole=False)
        if any(len(term.all_of) > 1 or term.none_of for term in inner):
            raise GrammarUnsupported("pattern", "nested look-aheads are not enforced")
        texts = [term.all_of[0] for term in inner]
        if look.positive:
            all_of.append("(?:" + "|".join(texts) + ")")
        else:
            none_of.extend(texts)
    return Term(tuple(all_of), tuple(none_of))


def _branches(node: Node) -> list[tuple[Node, ...]]:
    """Alternatives, each a sequence whose anchors and look-aheads are direct members."""
    if not _anchored(node):
        return [(node,)]
    match node:
        case Anchor() | Look():
            return [(node,)]
        case Either(branches):
            found = [branch for one in branches for branch in _branches(one)]
        case Repeat(body, 0, 1):
            found = [(), *_branches(body)]
        case Repeat(body, 1, 1):
            found = _branches(body)
        case Concat(parts):
            found = [
                tuple(itertools.chain.from_iterable(chosen))
                for chosen in itertools.islice(itertools.product(*map(_branches, parts)), MAX_BRANCHES + 1)
            ]
        case _:
            raise GrammarUnsupported("pattern", "an anchor or look-ahead inside a repetition is not enforced")
    if len(found) > MAX_BRANCHES:
        raise GrammarUnsupported("pattern", f"its anchors split it into more than {MAX_BRANCHES} alternatives")
    return found


def _anchored(node: Node) -> bool:
    match node:
        case Anchor() | Look():
            return True
        case Concat(parts):
            return any(map(_anchored, parts))
        case Either(branches):
            return any(map(_anchored, branches))
        case Repeat(body, _, _):
            return _anchored(body)
    return False
