"""Vocabulary masks: int32 words on the host, one row a sequence, bit t of a row set where token t is allowed.

Token t is bit t % 32 of word t // 32, lowest bit first, as every known backend writes them. A mask is as wide as
the model's head, so that ids which no tokenizer knows are never allowed. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from branchline.engine.types import I32

ALL = np.int32(-1)


def width(vocab_size: int) -> int:
    """Words of a row."""
    return (vocab_size + 31) // 32


def allocate(rows: int, vocab_size: int) -> I32:
    """int32 [rows, width], everything allowed."""
    return np.full((rows, width(vocab_size)), ALL, dtype=np.int32)


def set_bits(words: I32, token_ids: Iterable[int], allowed: bool) -> None:
    """Allow or forbid some ids in one row, int32 [width], in place."""
    view = words.view(np.uint32)
    for token in token_ids:
        bit = np.uint32(1 << (token % 32))
        if allowed:
            view[token // 32] |= bit
        else:
            view[token // 32] &= ~bit


def allows(words: I32, token_id: int) -> bool:
    """Whether one row allows an id; ids outside it are forbidden."""
    at = token_id // 32
    return 0 <= at < len(words) and bool((int(words[at]) >> (token_id % 32)) & 1)


def allowed_ids(words: I32, vocab_size: int) -> npt.NDArray[np.int64]:
    """The ids below `vocab_size` that one row allows, ascending."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
    return np.flatnonzero(bits)


def apply(logits: npt.NDArray[np.float32], words: I32) -> None:
    """Send what one row forbids to −inf, in place. `logits` float32 [vocab_size]; ids beyond the row are forbidden."""
    bits = np.zeros(len(logits), dtype=bool)
    known = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)]
    bits[: len(known)] = known
    logits[~bits] = -np.inf
