"""Backends for tests: over bytes, over the tiny vocabulary of `harness`, and over any list of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from branchline.engine.grammar.base import BaseGrammarObject, GrammarContext
from branchline.engine.grammar.guidance import GuidanceBackend
from branchline.engine.grammar.small import tokenizer_json
from branchline.engine.types import GrammarKind

BYTE_END = 256  # the one special id of the byte vocabulary


def backend_of(pieces: Sequence[bytes], specials: Sequence[str] = ("</s>",), width: int = 0) -> GuidanceBackend:
    """llguidance over these pieces; `width` is the head's, if it is wider."""
    size = len(pieces) + len(specials)
    return GuidanceBackend(GrammarContext(tokenizer_json(pieces, specials), max(size, width), (len(pieces),)))


@cache
def byte_backend() -> GuidanceBackend:
    """Ids 0 to 255 are bytes, BYTE_END is the end."""
    return backend_of([bytes([code]) for code in range(256)])


def constraint(kind: GrammarKind, text: str, ends: Sequence[int] = (BYTE_END,)) -> BaseGrammarObject:
    """A constraint over bytes in its first state."""
    backend = byte_backend()
    return backend.load(kind, backend.compile(kind, text)).start(ends)


def accepts(grammar: BaseGrammarObject, text: str) -> bool:
    """Whether exactly this text is accepted, to its end. The grammar is left as it was."""
    data = list(text.encode("utf-8", "surrogatepass"))
    other = grammar.copy()
    return other.accept_tokens(data) == len(data) and other.is_complete()
