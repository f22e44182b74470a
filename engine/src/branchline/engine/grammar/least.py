"""How short a constrained text can be: a run of tokens that is one, and a number of tokens that none goes below.

The number is a bound that holds for certain, not the best one: a request is refused by it. Runs off the step loop.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from branchline.engine.grammar.base import BaseGrammarObject
from branchline.engine.grammar.closing import MOST, Closer, completes
from branchline.engine.grammar.pattern import parse, short
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.types import GrammarAsk, GrammarKind

DEPTH = 16  # of a schema; what is deeper counts as one byte
CHOICES = 64  # shortest strings of a choice that are tried
LONG = 4096  # counts above this are not written out

Short = tuple[str, int]
"""A text that may be a value, and bytes that no value goes below."""


class Ways:
    """Over one vocabulary. Thread-safe."""

    def __init__(self, pieces: Callable[[], Pieces]) -> None:
        self._pieces = pieces
        self._closer = functools.cache(lambda: Closer(pieces()))

    def of(self, ask: GrammarAsk, grammar: BaseGrammarObject) -> tuple[list[int] | None, int]:
        """(tokens of a short text or None, tokens that no text goes below). The state is left as it was."""
        texts, least = self._known(ask)
        runs = [run for run in (self._spell(grammar, text.encode()) for text in texts) if run is not None]
        known = min(map(len, runs), default=None)
        found = self._closer().best(grammar, MOST if known is None else known - 1)
        if found is not None:
            runs.append(found)
        way = min(runs, key=len, default=None)
        return way, least if way is None else min(least, len(way))

    def _known(self, ask: GrammarAsk) -> tuple[list[str], int]:
        """(likely short texts, tokens that no text goes below), from the source alone."""
        pieces = self._pieces()
        if ask.kind is GrammarKind.CHOICE:
            texts = [one for one in json.loads(ask.text) if pieces.spell(one.encode()) is not None]
            texts.sort(key=lambda one: len(pieces.spell(one.encode()) or []))
            return texts[:CHOICES], len(pieces.spell(texts[0].encode()) or []) if texts else 0
        if ask.kind is GrammarKind.JSON:
            schema = json.loads(ask.text)
            text, size = shortest(schema, schema)
            return [text], -(-size // pieces.longest)
        return [], 0

    def _spell(self, grammar: BaseGrammarObject, text: bytes) -> list[int] | None:
        """A text as the constraint has it spelled; None if it does not take it."""
        pieces, run, at = self._pieces(), list[int](), 0
        try:
            while at < len(text) and len(run) < MOST:
                forced = grammar.forced_tokens()
                further = forced if text.startswith(pieces.text(forced), at) else []
                sizes = range(min(pieces.longest, len(text) - at), 0, -1)
                further = further or self._next(grammar, [text[at : at + size] for size in sizes])
                taken = grammar.accept_tokens(further)
                run += further[:taken]
                at += len(pieces.text(further))
                if not further or taken < len(further):
                    return None
        finally:
            grammar.rollback(len(run))
        return run if completes(grammar, run) else None

    def _next(self, grammar: BaseGrammarObject, candidates: list[bytes]) -> list[int]:
        """The first of some texts that is a token which is taken."""
        for one in candidates:
            token = self._pieces().id_of(one)
            if token is not None and grammar.validate_tokens([token]):
                return [token]
        return []


def shortest(schema: Any, root: Any, depth: int = 0) -> Short:
    """A likely short value of a JSON schema, compactly written, and a bound. Other keywords count as nothing."""
    if not isinstance(schema, dict) or depth > DEPTH:
        return "0", 1
    found = [_typed(schema, root, depth)]
    if "const" in schema:
        found.append(_written(schema["const"]))
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        found.append(min(map(_written, schema["enum"]), key=_size))
    if isinstance(schema.get("$ref"), str):
        found.append(shortest(_pointed(root, schema["$ref"]), root, depth + 1))
    for key, choose in (("allOf", max), ("anyOf", min), ("oneOf", min)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts:
            found.append(choose((shortest(part, root, depth + 1) for part in parts), key=_size))
    return max(found, key=_size)


def _size(one: Short) -> int:
    return one[1]


def _pointed(root: Any, reference: str) -> Any:
    """What a local reference means, if it is easily found."""
    if not reference.startswith("#"):
        return None
    place = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, dict) else None
    return place


def _typed(schema: dict[str, Any], root: Any, depth: int) -> Short:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds:
        return "0", 1
    return min((_kind(schema, kind, root, depth) for kind in kinds), key=_size)


def _kind(schema: dict[str, Any], kind: Any, root: Any, depth: int) -> Short:
    if kind == "object":
        return _object(schema, root, depth)
    if kind == "array":
        count = _count(schema, "minItems")
        text, size = shortest(schema.get("items"), root, depth + 1) if "prefixItems" not in schema else ("0", 1)
        body = ",".join([text] * count) if count * len(text) <= LONG else ""
        return f"[{body}]", 2 + count * size + max(count - 1, 0)
    if kind == "string":
        count = _count(schema, "minLength")
        text = _matched(schema["pattern"]) if isinstance(schema.get("pattern"), str) else ""
        text += "a" * (min(count, LONG) - len(text))
        return json.dumps(text, ensure_ascii=False), 2 + count
    if kind in ("boolean", "null"):
        return ("true" if kind == "boolean" else "null"), 4
    least = schema.get("minimum")
    return (str(least) if isinstance(least, int) and least > 0 else "0"), 1


def _object(schema: dict[str, Any], root: Any, depth: int) -> Short:
    names = schema.get("required")
    names = [one for one in names if isinstance(one, str)] if isinstance(names, list) else []
    members = schema.get("properties")
    members = members if isinstance(members, dict) else {}
    order = [one for one in members if one in names]
    texts, size = list[str](), 2
    for name in dict.fromkeys([*order, *names]):
        text, least = shortest(members.get(name), root, depth + 1)
        texts.append(f"{json.dumps(name, ensure_ascii=False)}:{text}")
        size += len(name.encode("utf-8", "surrogatepass")) + 3 + least
    return "{" + ",".join(texts) + "}", size + max(len(texts) - 1, 0)


def _matched(pattern: str) -> str:
    """A text that the expression is likely to match; empty where none is easily found."""
    try:
        return short(parse(pattern).root) or ""
    except (GrammarInvalid, GrammarUnsupported):
        return ""


def _count(schema: dict[str, Any], key: str) -> int:
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) and 0 < value < 1e9 else 0


def _written(value: Any) -> Short:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text, len(text.encode("utf-8", "surrogatepass"))
