"""What each token id spells, and the fewest tokens of a text: the vocabulary as constraints see it.

Immutable once built, once a loop, when the first constraint needs it. Ids that no tokenizer knows spell nothing and
are never allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol


class Spelling(Protocol):
    """What a tokenizer must tell; `branchline._native.Vocabulary` does."""

    def __len__(self) -> int:
        """One more than the highest id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id stands for; empty if it has no entry."""


class Pieces:
    """Bytes by id and ids by bytes, of a head of `vocab_size` ids."""

    def __init__(self, vocabulary: Spelling, vocab_size: int) -> None:
        known = min(len(vocabulary), vocab_size)
        self.vocab_size = vocab_size
        self.bytes: list[bytes] = [vocabulary.token_bytes(token) for token in range(known)]
        self.bytes += [b""] * (vocab_size - known)
        self._ids: dict[bytes, int] = {}
        for token, piece in enumerate(self.bytes):
            if piece:
                self._ids.setdefault(piece, token)
        self.longest = max(map(len, self._ids), default=1)

    def id_of(self, piece: bytes) -> int | None:
        """The lowest id that spells exactly this."""
        return self._ids.get(piece)

    def text(self, token_ids: Sequence[int]) -> bytes:
        """What a run of ids spells."""
        size = len(self.bytes)
        return b"".join(self.bytes[token] for token in token_ids if 0 <= token < size)

    def spell(self, text: bytes) -> list[int] | None:
        """The fewest ids that spell a text, the longest first among equals; None if none do."""
        best: list[tuple[int, int]] = [(0, 0)] * (len(text) + 1)  # (tokens to the end, length of the first)
        for at in range(len(text) - 1, -1, -1):
            options = [
                (best[at + size][0] + 1, -size)
                for size in range(1, min(self.longest, len(text) - at) + 1)
                if best[at + size][0] >= 0 and text[at : at + size] in self._ids
            ]
            count, size = min(options, default=(-1, 0))
            best[at] = (count, -size)
        if best[0][0] < 0:
            return None
        ids, at = [], 0
        while at < len(text):
            size = best[at][1]
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids


def lazily(vocabulary: Spelling, vocab_size: int) -> Callable[[], Pieces]:
    """What builds them at the first call and gives the same ones ever after."""
    return functools.cache(lambda: Pieces(vocabulary, vocab_size))
