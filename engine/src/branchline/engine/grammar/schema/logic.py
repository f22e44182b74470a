"""Schema nodes as alternatives of atoms: what a node, or its negation, asks of a value of one JSON type.

In-place parts (allOf, anyOf, oneOf, not, if, $ref, dependent…) are resolved here; what they ask of members and
elements stays a literal. Exact, or refused with keyword and pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.grammar.schema.atoms import FALSE, TRUE, Clauses, Literal, TooMany, both, either, kind_of
from branchline.engine.grammar.schema.document import Document, Node

Pair = tuple[Callable[[], Clauses], Callable[[], Clauses]]
REFUSED = ("$recursiveRef", "contentSchema")


class Cyclic(GrammarInvalid):
    """A node needs itself to be known."""


def fraction(value: int | float) -> Fraction:
    """The number as its decimal spelling says."""
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)


class Logic:
    """Answers for one document, remembered. `disjoint` tells whether two nodes surely share no value of a kind."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.disjoint: Callable[[Node, Node, str], bool] = lambda left, right, kind: False
        self._known: dict[tuple[int, bool, str], Clauses] = {}
        self._open: set[tuple[int, bool, str]] = set()

    def clauses(self, node: Node, positive: bool, kind: str) -> Clauses:
        """The alternatives of the node, or of its negation, for values of `kind`."""
        if node.verdict is not None:
            return TRUE if node.verdict is positive else FALSE
        key = (node.number, positive, kind)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            raise Cyclic("a reference leads back to itself without a step into the value", pointer=node.pointer)
        self._open.add(key)
        try:
            found = self._clauses(node, positive, kind)
        except TooMany:
            keyword = next((name for name in ("oneOf", "anyOf", "allOf", "not", "if") if name in node.value), "allOf")
            raise GrammarUnsupported(
                keyword, "its alternatives multiply beyond what is worked with", pointer=node.pointer
            ) from None
        finally:
            self._open.discard(key)
        self._known[key] = found
        return found

    def conjunction(self, literals: frozenset[Literal], kind: str) -> Clauses:
        """The alternatives of several literals at once."""
        found = TRUE
        for number, positive in sorted(literals):
            node = self.document.nodes[number]
            try:
                found = both(found, self.clauses(node, positive, kind))
            except TooMany:
                raise GrammarUnsupported(
                    "allOf", "its alternatives multiply beyond what is worked with", pointer=node.pointer
                ) from None
            if not found:
                break
        return found

    def _clauses(self, node: Node, positive: bool, kind: str) -> Clauses:
        if node.union:
            parts = [self.clauses(one, positive, kind) for one in node.union]
            return either(parts) if positive else _all(parts)
        if node.has_const:
            return self._constant(node, positive, kind)
        keyword = {"object": "unevaluatedProperties", "array": "unevaluatedItems"}.get(kind, "")
        if keyword in node.value:
            from branchline.engine.grammar.schema import evaluated

            return evaluated.clauses(self, node, positive, kind, keyword)
        return self.plain(node, positive, kind)

    def plain(self, node: Node, positive: bool, kind: str, skip: tuple[str, ...] = ()) -> Clauses:
        """As `clauses`, without the keywords in `skip`."""
        found = TRUE
        parts: list[Clauses] = []
        for name, (yes, no) in self._pairs(node, kind):
            if name in skip:
                continue
            if positive:
                found = both(found, yes())
                if not found:
                    return found
            else:
                parts.append(no())
        return found if positive else either(parts)

    # ---- keywords ---------------------------------------------------------------------------

    def _pairs(self, node: Node, kind: str) -> Iterator[tuple[str, Pair]]:
        value = node.value
        for name in REFUSED:
            if name in value and name != "contentSchema":
                raise GrammarUnsupported(name, "it is not enforced", pointer=f"{node.pointer}/{name}")
        yield from self._in_place(node, kind)
        yield from self._values(node, kind)
        maker = _KINDS.get(kind)
        if maker is not None:
            yield from maker(self, node, value)

    def _in_place(self, node: Node, kind: str) -> Iterator[tuple[str, Pair]]:
        value = node.value
        if "$ref" in value:
            yield "$ref", self._pair(self.document.resolve(node, value["$ref"]), kind)
        if "$dynamicRef" in value:
            yield "$dynamicRef", self._pair(self.dynamic(node), kind)
        if "allOf" in value:
            nodes = self.listed(node, "allOf")
            yield (
                "allOf",
                (
                    lambda: _all(self.clauses(one, True, kind) for one in nodes),
                    lambda: either([self.clauses(one, False, kind) for one in nodes]),
                ),
            )
        if "anyOf" in value:
            some = self.listed(node, "anyOf")
            yield (
                "anyOf",
                (
                    lambda: either([self.clauses(one, True, kind) for one in some]),
                    lambda: _all(self.clauses(one, False, kind) for one in some),
                ),
            )
        if "oneOf" in value:
            yield "oneOf", (lambda: self._one_of(node, kind), lambda: self._not_one_of(node, kind))
        if "not" in value:
            yes, no = self._pair(node.child("not"), kind)
            yield "not", (no, yes)
        if "if" in value and ("then" in value or "else" in value):
            yield "if", (lambda: self._conditional(node, kind, True), lambda: self._conditional(node, kind, False))

    def dynamic(self, node: Node) -> Node:
        """What `$dynamicRef` names, where that is the same wherever the schema is used from."""
        reference = node.value["$dynamicRef"]
        anchor = reference.rpartition("#")[2]
        target = self.document.resolve(node, reference)
        if len(self.document.dynamic.get(anchor, [])) > 1 and target.value.get("$dynamicAnchor") == anchor:
            raise GrammarUnsupported(
                "$dynamicRef", "several schemas declare its anchor", pointer=f"{node.pointer}/$dynamicRef"
            )
        return target

    def _pair(self, node: Node, kind: str) -> Pair:
        return (lambda: self.clauses(node, True, kind), lambda: self.clauses(node, False, kind))

    def listed(self, node: Node, keyword: str) -> list[Node]:
        """The subschemas of a keyword that holds a list."""
        return [node.child(keyword, index) for index in range(len(node.value[keyword]))]

    def _one_of(self, node: Node, kind: str) -> Clauses:
        nodes = self.listed(node, "oneOf")
        found = []
        for one in nodes:
            clauses = self.clauses(one, True, kind)
            for other in nodes:
                if other is not one and clauses and not self.disjoint(one, other, kind):
                    clauses = both(clauses, self.clauses(other, False, kind))
            found.append(clauses)
        return either(found)

    def _not_one_of(self, node: Node, kind: str) -> Clauses:
        nodes = self.listed(node, "oneOf")
        parts = [_all(self.clauses(one, False, kind) for one in nodes)]
        for at, one in enumerate(nodes):
            for other in nodes[at + 1 :]:
                if not self.disjoint(one, other, kind):
                    parts.append(both(self.clauses(one, True, kind), self.clauses(other, True, kind)))
        return either(parts)

    def _conditional(self, node: Node, kind: str, positive: bool) -> Clauses:
        def branch(name: str) -> Clauses:
            if name not in node.value:
                return TRUE if positive else FALSE
            return self.clauses(node.child(name), positive, kind)

        test = node.child("if")
        return either(
            [
                both(self.clauses(test, True, kind), branch("then")),
                both(self.clauses(test, False, kind), branch("else")),
            ]
        )

    def _values(self, node: Node, kind: str) -> Iterator[tuple[str, Pair]]:
        value = node.value
        if "type" in value:
            types = [value["type"]] if isinstance(value["type"], str) else value["type"]
            if kind == "number" and "integer" in types and "number" not in types:
                yield "type", (lambda: [(("int", True),)], lambda: [(("int", False),)])
            else:
                holds = kind in types
                yield "type", (lambda: TRUE if holds else FALSE, lambda: FALSE if holds else TRUE)
        for name in ("enum", "const"):
            if name in value:
                values = value["enum"] if name == "enum" else [value["const"]]
                pointer = f"{node.pointer}/{name}"
                yield (
                    name,
                    (
                        lambda values=values, pointer=pointer: self._enum(values, True, kind, pointer),  # type: ignore[misc]
                        lambda values=values, pointer=pointer: self._enum(values, False, kind, pointer),  # type: ignore[misc]
                    ),
                )

    def _enum(self, values: list[Any], positive: bool, kind: str, pointer: str) -> Clauses:
        mine = [one for one in values if kind_of(one) == kind]
        if not mine:
            return FALSE if positive else TRUE
        if kind in ("array", "object"):
            parts = [self.clauses(self.document.constant(one, pointer), positive, kind) for one in mine]
            return either(parts) if positive else _all(parts)
        scalars = tuple(dict.fromkeys(fraction(one) if kind == "number" else one for one in mine))
        return [(("in" if positive else "notin", scalars),)]

    def _constant(self, node: Node, positive: bool, kind: str) -> Clauses:
        value = node.const
        if kind_of(value) != kind:
            return FALSE if positive else TRUE
        if kind not in ("array", "object"):
            return self._enum([value], positive, kind, node.pointer)
        if kind == "array":
            size = len(value)
            items = [(index, self.document.constant(one, node.pointer)) for index, one in enumerate(value)]
            if positive:
                return [
                    (("minitems", size), ("maxitems", size), *(("item", at, (one.number, True)) for at, one in items))
                ]
            parts: Clauses = [(("minitems", size + 1),)]
            if size:
                parts.append((("maxitems", size - 1),))
            parts += [(("minitems", at + 1), ("item", at, (one.number, False))) for at, one in items]
            return parts
        members = [(name, self.document.constant(one, node.pointer)) for name, one in value.items()]
        names = tuple(value)
        nothing = (self.never().number, True)
        if positive:
            atoms = [atom for name, one in members for atom in (("req", name), ("prop", name, (one.number, True)))]
            return [(*atoms, ("additional", names, (), nothing))]
        parts = [(("somekey", names, (), None, (nothing[0], False)),)]
        for name, one in members:
            parts += [(("forbid", name),), (("req", name), ("prop", name, (one.number, False)))]
        return parts

    def never(self) -> Node:
        """A node that nothing fits."""
        if not hasattr(self, "_never"):
            self._never = self.document.either((), "")
            self._never.verdict = False
        return self._never


def _all(parts: Any) -> Clauses:
    found = TRUE
    for part in parts:
        found = both(found, part)
        if not found:
            break
    return found


def fact(yes: Clauses, no: Clauses) -> Pair:
    """A keyword whose alternatives need no work."""
    return (lambda: yes, lambda: no)


from branchline.engine.grammar.schema import members  # noqa: E402 - its makers need the names above

_KINDS = {
    "number": members.numbers,
    "string": members.strings,
    "array": members.arrays,
    "object": members.objects,
}
