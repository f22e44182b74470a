"""Reads regular expressions (ECMA-262's syntax with u flag, and the small additions that are common elsewhere).

What is read has one meaning for every backend. Back references, look-behind, word borders, flags and
possessive or atomic parts are refused by name: no regular language, or not the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from branchline.engine.grammar.pattern.tree import (
    CATEGORIES,
    TOP,
    Anchor,
    Chars,
    Concat,
    Either,
    Look,
    Node,
    Repeat,
)
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported

MAX_BYTES = 65536
MAX_DEPTH = 100
MAX_REPEAT = 100_000
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_CLASSES = {"d": ((0x30, 0x39),), "w": _WORD, "s": _SPACE}
_DOT = Chars(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)), negated=True)
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "a": 7, "e": 27}
_LONG = {
    "Letter": "L", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Mark": "M", "Number": "N",
    "Decimal_Number": "Nd", "digit": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z", "Other": "C",
    "Nonspacing_Mark": "Mn", "Titlecase_Letter": "Lt", "Control": "Cc",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pattern:
    """A read expression. `text` is the source."""

    text: str
    root: Node


def parse(text: str) -> Pattern:
    """The tree of `text`. Raises GrammarInvalid if it does not parse, GrammarUnsupported for what is not regular."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise GrammarInvalid(f"the pattern has more than {MAX_BYTES} bytes: shorten it")
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise GrammarInvalid("the pattern holds a lone surrogate: write whole characters")
    reader = _Reader(text)
    root = reader.either(0)
    if reader.at < len(text):
        reader.wrong("an unmatched ')'")
    return Pattern(text, root)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def take(self) -> str:
        char = self.peek()
        self.at += 1
        return char

    def skip(self, word: str) -> bool:
        if self.text.startswith(word, self.at):
            self.at += len(word)
            return True
        return False

    def wrong(self, what: str) -> NoReturn:
        raise GrammarInvalid(f"the pattern {shown(self.text)} has {what} at position {self.at}: correct it")

    def unsupported(self, what: str) -> NoReturn:
        raise GrammarUnsupported("pattern", f"{what} in {shown(self.text)} is not a regular part; rewrite it without")

    def either(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            self.wrong(f"more than {MAX_DEPTH} nested groups")
        branches = [self.concat(depth)]
        while self.skip("|"):
            branches.append(self.concat(depth))
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def concat(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated(self.atom(depth)))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def repeated(self, body: Node) -> Node:
        while True:
            start = self.at
            char = self.peek()
            if char == "*":
                bounds: tuple[int, int | None] = (0, None)
            elif char == "+":
                bounds = (1, None)
            elif char == "?":
                bounds = (0, 1)
            elif char == "{":
                found = self.braces()
                if found is None:
                    return body
                bounds = found
            else:
                return body
            if char != "{":
                self.at += 1
            if self.skip("+"):
                self.unsupported("a possessive repetition")
            self.skip("?")  # lazy: the same language
            if isinstance(body, Anchor | Look):
                self.at = start
                self.unsupported("a repeated anchor")
            body = Repeat(body, *bounds)
            if self.peek() in ("*", "+", "?"):
                self.wrong("nothing to repeat")

    def braces(self) -> tuple[int, int | None] | None:
        """{m}, {m,} or {m,n}; None for a literal brace."""
        end = self.text.find("}", self.at)
        inner = self.text[self.at + 1 : end] if end > 0 else ""
        low, comma, high = inner.partition(",")
        if end < 0 or not low.isdecimal() or not low.isascii() or (high and not (high.isdecimal() and high.isascii())):
            self.wrong("a '{' that starts no count (escape it)")
        least = int(low)
        most = (int(high) if high else None) if comma else least
        if most is not None and most < least:
            self.wrong(f"a count {inner} whose bounds are out of order")
        if max(least, most or 0) > MAX_REPEAT:
            self.wrong(f"a count above {MAX_REPEAT}")
        self.at = end + 1
        return least, most

    def atom(self, depth: int) -> Node:
        char = self.take()
        if char == "(":
            return self.group(depth)
        if char == "[":
            return self.bracket()
        if char == ".":
            return _DOT
        if char in "^$":
            return Anchor(char == "^")
        if char == "\\":
            return self.escape()
        if char in "*+?":
            self.at -= 1
            self.wrong("nothing to repeat")
        if char == "{":
            self.at -= 1
            self.wrong("a '{' after nothing (escape it)")
        return one(ord(char))

    def group(self, depth: int) -> Node:
        look: bool | None = None
        if self.skip("?"):
            if self.skip("="):
                look = True
            elif self.skip("!"):
                look = False
            elif self.skip("<=") or self.skip("<!"):
                self.unsupported("a look-behind")
            elif self.skip("<") or self.skip("P<"):
                end = self.text.find(">", self.at)
                name = self.text[self.at : end] if end > 0 else ""
                if not name.isidentifier():
                    self.wrong("a group name that is no name")
                self.at = end + 1
            elif not self.skip(":"):
                self.unsupported(f"the group (?{self.peek()}")
        body = self.either(depth + 1)
        if not self.skip(")"):
            self.wrong("an unclosed '('")
        return body if look is None else Look(body, look)

    def escape(self) -> Node:
        char = self.take()
        if char == "":
            self.wrong("a final backslash")
        if char in "dws":
            return Chars(_CLASSES[char])
        if char in "DWS":
            return Chars(_CLASSES[char.lower()], negated=True)
        if char in "pP":
            return Chars(properties=(self.property(char == "P"),))
        if char in "bB":
            self.unsupported(f"the word border \\{char}")
        if char == "A":
            return Anchor(True)
        if char in "zZ":
            return Anchor(False)
        if char in "123456789k":
            self.unsupported("a back reference")
        return one(self.character(char))

    def property(self, negated: bool) -> tuple[str, bool]:
        if not self.skip("{"):
            name = self.take()
        else:
            end = self.text.find("}", self.at)
            if end < 0:
                self.wrong("an unclosed \\p{")
            name = self.text[self.at : end]
            self.at = end + 1
        for prefix in ("General_Category=", "gc="):
            name = name.removeprefix(prefix)
        name = _LONG.get(name, name)
        if name not in CATEGORIES:
            self.unsupported(f"the property {name!r}")
        return name, negated

    def character(self, char: str) -> int:
        """The code of the escaped character after the backslash and `char`."""
        if char == "0" and self.peek().isdigit():
            self.unsupported("an octal escape")
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "x":
            return self.hexadecimal(2)
        if char == "u":
            return self.unicode()
        if char == "c":
            letter = self.take()
            if not (letter.isascii() and letter.isalpha()):
                self.wrong("a \\c without a letter")
            return ord(letter) % 32
        if char.isascii() and char.isalnum():
            self.wrong(f"an unknown escape \\{char}")
        return ord(char)

    def unicode(self) -> int:
        if self.skip("{"):
            end = self.text.find("}", self.at)
            digits = self.text[self.at : end] if end > 0 else ""
            if not digits or any(char not in "0123456789abcdefABCDEF" for char in digits) or int(digits, 16) > TOP:
                self.wrong("a \\u{} that is no code point")
            self.at = end + 1
            return int(digits, 16)
        code = self.hexadecimal(4)
        if 0xD800 <= code <= 0xDBFF and self.skip("\\u"):
            low = self.hexadecimal(4)
            if not 0xDC00 <= low <= 0xDFFF:
                self.wrong("half a surrogate pair")
            return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return code

    def hexadecimal(self, count: int) -> int:
        digits = self.text[self.at : self.at + count]
        if len(digits) < count or any(char not in "0123456789abcdefABCDEF" for char in digits):
            self.wrong(f"an escape without {count} hexadecimal digits")
        self.at += count
        return int(digits, 16)

    def bracket(self) -> Node:
        negated = self.skip("^")
        ranges: list[tuple[int, int]] = []
        properties: list[tuple[str, bool]] = []
        while not self.skip("]"):
            if self.peek() == "":
                self.wrong("an unclosed '['")
            low = self.member(ranges, properties)
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                if low is None:
                    self.wrong("a range that begins with a class")
                self.at += 1
                high = self.member(ranges, properties)
                if high is None or high < low:
                    self.wrong("a range out of order")
                ranges.append((low, high))
            elif low is not None:
                ranges.append((low, low))
        if not ranges and not properties:
            return ANYTHING if negated else NOTHING
        return Chars(tuple(ranges), tuple(properties), negated)

    def member(self, ranges: list[tuple[int, int]], properties: list[tuple[str, bool]]) -> int | None:
        """One character, or None after a class was added."""
        char = self.take()
        if char != "\\":
            return ord(char)
        char = self.take()
        if char == "":
            self.wrong("a final backslash")
        if char in "dws":
            ranges.extend(_CLASSES[char])
            return None
        if char in "DWS":
            ranges.extend(invert(_CLASSES[char.lower()]))
            return None
        if char in "pP":
            properties.append(self.property(char == "P"))
            return None
        if char == "b":
            return 8
        if char in "123456789":
            self.unsupported("an octal escape")
        return self.character(char)


def one(code: int) -> Chars:
    """The set of one character."""
    return Chars(((code, code),))


def invert(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """The characters outside sorted, disjoint ranges."""
    found, low = [], 0
    for first, last in ranges:
        if low < first:
            found.append((low, first - 1))
        low = last + 1
    if low <= TOP:
        found.append((low, TOP))
    return found


def shown(text: str) -> str:
    """The pattern, cut for a message."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


ANYTHING = Chars(negated=True)
NOTHING = Chars(())
