"""A JSON Schema document: its schema nodes, their keywords checked, their references resolved.

Only places that hold schemas are looked into; literals, defaults and examples never are. Nothing is fetched: a
reference that leaves the document is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.grammar.schema import keywords

MAX_BYTES = 1 << 20
MAX_DEPTH = 256


@dataclass(slots=True, eq=False)
class Node:
    """One schema: a boolean or an object, with the JSON pointer at which it stands.

    `value` is the keywords by name; the boolean schemas are {} and {"not": {}} with `verdict` set.
    """

    number: int
    value: dict[str, Any]
    pointer: str
    base: str
    dialect: str
    verdict: bool | None = None
    children: dict[tuple[str | int, ...], Node] = field(default_factory=dict)
    union: tuple[Node, ...] = ()  # for made-up nodes: any of these
    const: Any = None  # for made-up nodes: exactly this value, if has_const
    has_const: bool = False

    def child(self, *path: str | int) -> Node:
        """The subschema at keyword and index or name."""
        return self.children[path]


class Document:
    """All nodes of a schema. Raises GrammarInvalid for a wrong schema."""

    def __init__(self, root: Any, dialect: str) -> None:
        self.nodes: list[Node] = []
        self.by_uri: dict[str, Node] = {}
        self.raw: dict[str, Any] = {}  # resource URI → its JSON
        self.dynamic: dict[str, list[Node]] = {}
        self._by_identity: dict[int, Node] = {}
        self._consts: dict[str, Node] = {}
        self._unions: dict[tuple[int, ...], Node] = {}
        if isinstance(root, dict) and isinstance(root.get("$schema"), str):
            dialect = keywords.dialect_of(root["$schema"])
        self.raw[""] = root
        self.root = self._read(root, "", "", dialect, 0)

    def resolve(self, node: Node, reference: str) -> Node:
        """The node that `$ref` names. Raises GrammarInvalid if it does not exist, GrammarUnsupported if elsewhere."""
        where = f"{node.pointer}/$ref"
        target = urljoin(node.base, reference)
        if target in self.by_uri:
            return self.by_uri[target]
        uri, fragment = urldefrag(target)
        if uri not in self.raw:
            raise GrammarUnsupported("$ref", f"{reference!r} leaves the document and nothing is fetched", pointer=where)
        if fragment and not fragment.startswith("/"):
            raise GrammarInvalid(f"the reference {reference!r} names an anchor that does not exist", pointer=where)
        value = self.raw[uri]
        for token in unquote(fragment).split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and token in value:
                value = value[token]
            elif isinstance(value, list) and token.isdecimal() and int(token) < len(value):
                value = value[int(token)]
            else:
                raise GrammarInvalid(f"the reference {reference!r} points at nothing", pointer=where)
        known = self._by_identity.get(id(value)) if isinstance(value, dict) else None
        if known is None:
            known = self._read(value, fragment, uri, node.dialect, 0)
        return known

    def constant(self, value: Any, pointer: str) -> Node:
        """The node that only `value` fits."""
        key = json.dumps(value, sort_keys=True)
        if key not in self._consts:
            made = self._node({}, pointer, "", self.root.dialect)
            made.const, made.has_const = value, True
            self._consts[key] = made
        return self._consts[key]

    def either(self, nodes: tuple[Node, ...], pointer: str) -> Node:
        """The node that fits what any of `nodes` fits."""
        key = tuple(node.number for node in nodes)
        if key not in self._unions:
            made = self._node({}, pointer, "", self.root.dialect)
            made.union = nodes
            self._unions[key] = made
        return self._unions[key]

    def _node(self, value: dict[str, Any], pointer: str, base: str, dialect: str) -> Node:
        node = Node(len(self.nodes), value, pointer, base, dialect)
        self.nodes.append(node)
        return node

    def _read(self, value: Any, pointer: str, base: str, dialect: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise GrammarInvalid(f"more than {MAX_DEPTH} nested schemas", pointer=pointer)
        if isinstance(value, bool):
            node = self._node({}, pointer, base, dialect)
            node.verdict = value
            return node
        if not isinstance(value, dict):
            raise GrammarInvalid(
                f"a schema is {keywords.shown(value)}: it must be an object or a boolean", pointer=pointer
            )
        base = self._identify(value, pointer, base, dialect)
        value = keywords.checked(value, pointer, dialect)
        node = self._node(value, pointer, base, dialect)
        self._register(node, value)
        for path, inner in _children(value):
            where = pointer + "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in path)
            node.children[path] = self._read(inner, where, base, dialect, depth + 1)
        return node

    def _identify(self, value: dict[str, Any], pointer: str, base: str, dialect: str) -> str:
        name = value.get("$id") if dialect != "draft4" else value.get("id")
        if "$ref" in value and dialect in ("draft4", "draft6", "draft7"):
            return base
        if not isinstance(name, str) or name.startswith("#"):
            return base
        uri, _ = urldefrag(urljoin(base, name))
        self.raw[uri] = value
        return uri

    def _register(self, node: Node, value: dict[str, Any]) -> None:
        # `checked` may have copied the object: references find it by the original.
        original = value.get(keywords.ORIGINAL, value)
        self._by_identity[id(original)] = node
        if self.raw.get(node.base) is original:
            self.by_uri.setdefault(node.base, node)
            self.by_uri.setdefault(node.base + "#", node)
        anchors = [value.get("$anchor"), value.get("$dynamicAnchor")]
        name = value.get("$id")
        if isinstance(name, str) and name.startswith("#") and len(name) > 1:
            anchors.append(name[1:])
        for anchor in anchors:
            if isinstance(anchor, str):
                self.by_uri.setdefault(f"{node.base}#{anchor}", node)
        dynamic = value.get("$dynamicAnchor")
        if isinstance(dynamic, str):
            self.dynamic.setdefault(dynamic, []).append(node)


def _children(value: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    for name, inner in value.items():
        kind = keywords.HOLDS.get(name)
        if kind == "schema":
            yield (name,), inner
        elif kind == "list":
            yield from (((name, index), one) for index, one in enumerate(inner))
        elif kind == "map":
            yield from (((name, key), one) for key, one in inner.items())


def load(text: str) -> Any:
    """The JSON of a schema. Raises GrammarInvalid for anything else, also for a name that stands twice."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise GrammarInvalid(f"the schema has more than {MAX_BYTES} bytes: shorten it")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in items:
            if name in found:
                raise GrammarInvalid(f"the schema names {name!r} twice in one object")
            found[name] = value
        return found

    def constant(name: str) -> Any:
        raise GrammarInvalid(f"the schema holds {name}, which is no JSON")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        words = "too deep" if isinstance(error, RecursionError) else str(error)
        raise GrammarInvalid(f"the schema is no JSON: {words[:120]}") from None
