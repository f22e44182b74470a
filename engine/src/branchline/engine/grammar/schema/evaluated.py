"""unevaluatedProperties and unevaluatedItems: which members and elements the rest of a schema looked at.

A schema is split into scenarios: which of its in-place parts hold. In each the evaluated members are known, and the
keyword becomes an ordinary one about all others.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.grammar.schema.atoms import TRUE, Atom, Clauses, both, either

if TYPE_CHECKING:
    from branchline.engine.grammar.schema.document import Node
    from branchline.engine.grammar.schema.logic import Logic

MAX_SPLIT = 5
_APPLIED = ("allOf", "anyOf", "oneOf", "if", "$ref", "$dynamicRef", "dependentSchemas")


@dataclass(frozen=True, slots=True)
class Seen:
    """Members (by name and pattern) or elements (first ones, or those that fit a node) that were looked at."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    first: int = 0
    fitting: tuple[int, ...] = ()
    everything: bool = False

    def with_(self, other: Seen) -> Seen:
        """What either saw."""
        return Seen(
            tuple(dict.fromkeys((*self.names, *other.names))),
            tuple(dict.fromkeys((*self.patterns, *other.patterns))),
            max(self.first, other.first),
            tuple(dict.fromkeys((*self.fitting, *other.fitting))),
            self.everything or other.everything,
        )


Scenario = tuple[Clauses, Seen]


def clauses(logic: Logic, node: Node, positive: bool, kind: str, keyword: str) -> Clauses:
    """The alternatives of a node that has `keyword`, or of its negation."""
    parts: list[Clauses] = [] if positive else [logic.plain(node, False, kind)]
    for holds, seen in _scenarios(logic, node, kind, own=True):
        rest = _others(logic, node, seen, positive, keyword)
        if rest is not None:
            parts.append(both(holds, [(rest,)]) if rest else holds)
    return either(parts)


def _others(logic: Logic, node: Node, seen: Seen, positive: bool, keyword: str) -> Atom | None:
    """What must hold for all others (or for one of them, negated): () for nothing, None for never."""
    if seen.everything:
        return () if positive else None
    inner = node.child(keyword)
    if keyword == "unevaluatedProperties":
        if positive:
            return ("additional", seen.names, seen.patterns, (inner.number, True))
        return ("somekey", seen.names, seen.patterns, None, (inner.number, False))
    if seen.fitting:
        nodes = (inner, *(logic.document.nodes[number] for number in seen.fitting))
        inner = logic.document.either(nodes, inner.pointer)
    if positive:
        return ("rest", seen.first, (inner.number, True))
    return ("contains", seen.first, (inner.number, False), 1, None)


def _scenarios(logic: Logic, node: Node, kind: str, own: bool = False) -> list[Scenario]:
    """Every way in which the node can hold, with what it then looks at. The ways cover all values it fits."""
    if node.verdict is not None:
        return [(TRUE, Seen())] if node.verdict else []
    if node.union or node.has_const or not _sees(logic, node, kind, set()):
        holds = logic.clauses(node, True, kind)
        return [(holds, Seen())] if holds else []
    found: list[Scenario] = [(logic.plain(node, True, kind, skip=_APPLIED), _own(node, kind))]
    value = node.value
    for keyword in _APPLIED:
        if keyword in value:
            found = _cross(found, _applied(logic, node, kind, keyword))
    keyword = "unevaluatedProperties" if kind == "object" else "unevaluatedItems"
    if keyword in value and not own:
        made = []
        for holds, seen in found:
            rest = _others(logic, node, seen, True, keyword)
            made.append((both(holds, [(rest,)]) if rest else holds, Seen(everything=True)))
        found = made
    return [(holds, seen) for holds, seen in found if holds]


def _applied(logic: Logic, node: Node, kind: str, keyword: str) -> list[Scenario]:
    value = node.value
    if keyword == "$ref":
        return _scenarios(logic, logic.document.resolve(node, value["$ref"]), kind)
    if keyword == "$dynamicRef":
        return _scenarios(logic, logic.dynamic(node), kind)
    if keyword == "if":
        return _conditional(logic, node, kind)
    if keyword == "dependentSchemas":
        return _dependent(logic, node, kind)
    nodes = logic.listed(node, keyword)
    if keyword == "allOf":
        found: list[Scenario] = [(TRUE, Seen())]
        for one in nodes:
            found = _cross(found, _scenarios(logic, one, kind))
        return found
    if keyword == "oneOf":
        made: list[Scenario] = []
        for one in nodes:
            others: Clauses = TRUE
            for other in nodes:
                if other is not one and not logic.disjoint(one, other, kind):
                    others = both(others, logic.clauses(other, False, kind))
            made += _cross(_scenarios(logic, one, kind), [(others, Seen())])
        return made
    return _any_of(logic, node, nodes, kind)


def _any_of(logic: Logic, node: Node, nodes: list[Node], kind: str) -> list[Scenario]:
    seeing = [one for one in nodes if _sees(logic, one, kind, set())]
    blind = [one for one in nodes if one not in seeing]
    if len(seeing) > MAX_SPLIT:
        raise GrammarUnsupported(
            "anyOf", f"more than {MAX_SPLIT} of its schemas decide what is evaluated", pointer=f"{node.pointer}/anyOf"
        )
    made: list[Scenario] = []
    for chosen in itertools.product((True, False), repeat=len(seeing)):
        part: list[Scenario] = [(TRUE, Seen())]
        for one, holds in zip(seeing, chosen, strict=True):
            part = _cross(part, _scenarios(logic, one, kind) if holds else [(logic.clauses(one, False, kind), Seen())])
        if not any(chosen):
            part = _cross(part, [(either([logic.clauses(one, True, kind) for one in blind]), Seen())])
        made += part
    return made


def _conditional(logic: Logic, node: Node, kind: str) -> list[Scenario]:
    value = node.value
    yes = _scenarios(logic, node.child("if"), kind)
    if "then" in value:
        yes = _cross(yes, _scenarios(logic, node.child("then"), kind))
    no: list[Scenario] = [(logic.clauses(node.child("if"), False, kind), Seen())]
    if "else" in value:
        no = _cross(no, _scenarios(logic, node.child("else"), kind))
    return yes + no


def _dependent(logic: Logic, node: Node, kind: str) -> list[Scenario]:
    found: list[Scenario] = [(TRUE, Seen())]
    for name in node.value["dependentSchemas"] if kind == "object" else ():
        inner = _scenarios(logic, node.child("dependentSchemas", name), kind)
        found = _cross(found, [([(("forbid", name),)], Seen()), *_cross([([(("req", name),)], Seen())], inner)])
    return found


def _cross(left: list[Scenario], right: list[Scenario]) -> list[Scenario]:
    made = [(both(one, other), seen.with_(more)) for one, seen in left for other, more in right]
    return [(holds, seen) for holds, seen in made if holds]


def _own(node: Node, kind: str) -> Seen:
    value = node.value
    if kind == "object":
        return Seen(
            tuple(value.get("properties", ())),
            tuple(value.get("patternProperties", ())),
            everything="additionalProperties" in value,
        )
    fitting = (node.child("contains").number,) if "contains" in value and node.dialect != "2019-09" else ()
    return Seen(first=len(value.get("prefixItems", ())), fitting=fitting, everything="items" in value)


def _sees(logic: Logic, node: Node, kind: str, known: set[int]) -> bool:
    """Whether the node can look at any member or element."""
    if node.verdict is not None or node.number in known:
        return False
    known.add(node.number)
    value = node.value
    keyword = "unevaluatedProperties" if kind == "object" else "unevaluatedItems"
    if _own(node, kind) != Seen() or keyword in value:
        return True
    inner = [one for name in ("allOf", "anyOf", "oneOf") if name in value for one in logic.listed(node, name)]
    inner += [node.child(name) for name in ("if", "then", "else") if name in value]
    inner += [node.child("dependentSchemas", name) for name in value.get("dependentSchemas", ())]
    if "$ref" in value:
        inner.append(logic.document.resolve(node, value["$ref"]))
    if "$dynamicRef" in value:
        inner.append(logic.dynamic(node))
    return any(_sees(logic, one, kind, known) for one in inner)
