"""Backends for tests: over bytes, over the tiny vocabulary of `harness`, and over any list of pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache

from branchline.engine.grammar.base import BaseGrammarObject, GrammarContext
from branchline.engine.grammar.guidance import GuidanceBackend
from branchline.engine.types import GrammarKind

BYTE_END = 256  # the one special id of the byte vocabulary


def byte_level(data: bytes) -> str:
    """Bytes in the spelling of byte-level vocabularies."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {code: chr(code) for code in kept}
    for place, code in enumerate(code for code in range(256) if code not in names):
        names[code] = chr(256 + place)
    return "".join(names[byte] for byte in data)


def tokenizer_json(pieces: Sequence[bytes], specials: Sequence[str] = ("</s>",)) -> bytes:
    """A byte-level tokenizer: `pieces` have ids 0.., then the special ones."""
    vocab = {byte_level(piece): number for number, piece in enumerate(pieces)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": len(pieces) + number, "content": name, "special": True, **flags} for number, name in enumerate(specials)
    ]
    shape = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": shape,
            "post_processor": None,
            "decoder": shape,
            "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False},
        }
    ).encode()


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
