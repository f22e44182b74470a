"""The keywords of one JSON type each, as pairs of (alternatives, alternatives of the negation)."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from branchline.engine.grammar.schema.atoms import FALSE, TRUE, Clauses, Literal, both

if TYPE_CHECKING:
    from branchline.engine.grammar.schema.document import Node
    from branchline.engine.grammar.schema.logic import Logic, Pair

Pairs = Iterator[tuple[str, "Pair"]]


def _fact(yes: Clauses, no: Clauses) -> Pair:
    return (lambda: yes, lambda: no)


def numbers(logic: Logic, node: Node, value: dict[str, Any]) -> Pairs:
    """Bounds and multiples."""
    for name, kind, exclusive in (
        ("minimum", "min", False), ("exclusiveMinimum", "min", True), ("maximum", "max", False),
        ("exclusiveMaximum", "max", True),
    ):  # fmt: skip
        if name in value and not isinstance(value[name], bool):
            bound = _fraction(value[name])
            opposite = "max" if kind == "min" else "min"
            yield name, _fact([((kind, bound, exclusive),)], [((opposite, bound, not exclusive),)])
    if "multipleOf" in value:
        step = _fraction(value["multipleOf"])
        yield "multipleOf", _fact([(("mult", step, True),)], [(("mult", step, False),)])


def strings(logic: Logic, node: Node, value: dict[str, Any]) -> Pairs:
    """Length, pattern and format. A format is an annotation where it is not asserted."""
    if "minLength" in value:
        least = int(value["minLength"])
        yield "minLength", _fact([(("minlen", least),)], [(("maxlen", least - 1),)] if least else FALSE)
    if "maxLength" in value:
        most = int(value["maxLength"])
        yield "maxLength", _fact([(("maxlen", most),)], [(("minlen", most + 1),)])
    if "pattern" in value:
        text, pointer = value["pattern"], f"{node.pointer}/pattern"
        yield "pattern", _fact([(("pattern", text, True, pointer),)], [(("pattern", text, False, pointer),)])
    if "format" in value:
        pointer = f"{node.pointer}/format"
        yield "format", _fact([(("format", value["format"], pointer),)], FALSE)


def arrays(logic: Logic, node: Node, value: dict[str, Any]) -> Pairs:
    """Elements and their counts."""
    first = len(value.get("prefixItems", ()))
    if first:
        inner = [node.child("prefixItems", index).number for index in range(first)]
        yield (
            "prefixItems",
            _fact(
                [tuple(("item", at, (number, True)) for at, number in enumerate(inner))],
                [(("minitems", at + 1), ("item", at, (number, False))) for at, number in enumerate(inner)],
            ),
        )
    if "items" in value:
        number = node.child("items").number
        yield "items", _fact([(("rest", first, (number, True)),)], [(("contains", first, (number, False), 1, None),)])
    if "contains" in value:
        yield "contains", _contains(node, value)
    if "minItems" in value:
        least = int(value["minItems"])
        yield "minItems", _fact([(("minitems", least),)], [(("maxitems", least - 1),)] if least else FALSE)
    if "maxItems" in value:
        most = int(value["maxItems"])
        yield "maxItems", _fact([(("maxitems", most),)], [(("minitems", most + 1),)])
    if value.get("uniqueItems"):
        pointer = f"{node.pointer}/uniqueItems"
        yield "uniqueItems", _fact([(("unique", pointer),)], [(("repeats", pointer),)])


def _contains(node: Node, value: dict[str, Any]) -> Pair:
    literal: Literal = (node.child("contains").number, True)
    least = int(value.get("minContains", 1))
    most = int(value["maxContains"]) if "maxContains" in value else None
    if node.dialect in ("draft4", "draft6", "draft7"):
        least, most = 1, None
    if least == 0 and most is None:
        return _fact(TRUE, FALSE)
    no: Clauses = [(("contains", 0, literal, 0, least - 1),)] if least else []
    if most is not None:
        no.append((("contains", 0, literal, most + 1, None),))
    yes: Clauses = [] if most is not None and most < least else [(("contains", 0, literal, least, most),)]
    return _fact(yes, no)


def objects(logic: Logic, node: Node, value: dict[str, Any]) -> Pairs:
    """Members, their names and their count."""
    names = tuple(value.get("properties", ()))
    patterns = tuple(value.get("patternProperties", ()))
    if names:
        inner = [(name, node.child("properties", name).number) for name in names]
        yield (
            "properties",
            _fact(
                [tuple(("prop", name, (number, True)) for name, number in inner)],
                [(("req", name), ("prop", name, (number, False))) for name, number in inner],
            ),
        )
    if patterns:
        each = [(pattern, node.child("patternProperties", pattern).number) for pattern in patterns]
        yield (
            "patternProperties",
            _fact(
                [tuple(("patprop", pattern, (number, True)) for pattern, number in each)],
                [(("somekey", (), (), pattern, (number, False)),) for pattern, number in each],
            ),
        )
    if "additionalProperties" in value:
        number = node.child("additionalProperties").number
        yield (
            "additionalProperties",
            _fact(
                [(("additional", names, patterns, (number, True)),)],
                [(("somekey", names, patterns, None, (number, False)),)],
            ),
        )
    if "propertyNames" in value:
        number = node.child("propertyNames").number
        yield "propertyNames", _fact([(("names", (number, True)),)], [(("badname", (number, False)),)])
    if value.get("required"):
        keys = value["required"]
        yield "required", _fact([tuple(("req", name) for name in keys)], [(("forbid", name),) for name in keys])
    if "minProperties" in value:
        least = int(value["minProperties"])
        yield "minProperties", _fact([(("minprops", least),)], [(("maxprops", least - 1),)] if least else FALSE)
    if "maxProperties" in value:
        most = int(value["maxProperties"])
        yield "maxProperties", _fact([(("maxprops", most),)], [(("minprops", most + 1),)])
    yield from _dependent(logic, node, value)


def _dependent(logic: Logic, node: Node, value: dict[str, Any]) -> Pairs:
    for name, needed in value.get("dependentRequired", {}).items():
        if not needed:
            continue
        yes: Clauses = [(("forbid", name),), (("req", name), *(("req", one) for one in needed if one != name))]
        yield "dependentRequired", _fact(yes, [(("req", name), ("forbid", one)) for one in needed if one != name])
    for name in value.get("dependentSchemas", {}):
        inner = node.child("dependentSchemas", name)

        def yes_of(name: str = name, inner: Node = inner) -> Clauses:
            return [(("forbid", name),), *both([(("req", name),)], logic.clauses(inner, True, "object"))]

        def no_of(name: str = name, inner: Node = inner) -> Clauses:
            return both([(("req", name),)], logic.clauses(inner, False, "object"))

        yield "dependentSchemas", (yes_of, no_of)


def _fraction(value: int | float) -> Fraction:
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)
