"""Byte-level tokenizers of few pieces, over which suites can try every text.

Made for suites and tests, ours and plugins'; nothing that serves imports it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from branchline.engine.grammar.base import GrammarContext

PIECES = ("a", "b", "c", "ab", "bc", "abc", "1", "12", '"', "{", "}", ":", '"a', '{"', '":', "aa", ",", "[", "]")
END = len(PIECES)


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


@functools.cache
def small_context(width: int = END + 1) -> GrammarContext:
    """The vocabulary of the suites: PIECES, then the end. `width` is the head's, END + 1 or more."""
    return GrammarContext(tokenizer_json([piece.encode() for piece in PIECES]), width, (END,))


@functools.cache
def byte_context() -> GrammarContext:
    """Ids 0 to 255 are bytes, 256 is the end: every text can be spelled."""
    return GrammarContext(tokenizer_json([bytes([code]) for code in range(256)]), 257, (256,))
