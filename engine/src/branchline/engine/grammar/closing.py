"""Short ways to a complete text: runs of tokens that a constraint takes and after which it may end.

Found by a small beam search on the constraint itself, so it works for every backend and each result is proved by the
constraint. Short, not always shortest: an upper bound of what is still needed. States are left as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarObject
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.grammar.reasoning import ReasoningObject

WIDTH = 4  # runs kept at each length of the wider search
MOST = 1024  # tokens of a run
CLOSERS = b"]}"
STARTERS = (b"0", b"1", b'""', b'"', b"[]", b"{}", b"[", b"{", b"null", b"true", b"-")
PLAIN = (b"q", b"Z", b"}")  # all allowed together inside free text only


class Closer:
    """Searches over one vocabulary. Thread-safe: holds nothing that changes."""

    def __init__(self, pieces: Pieces) -> None:
        self._size = len(pieces.bytes)
        self._lengths = np.array([len(piece) for piece in pieces.bytes], dtype=np.int64)
        self._first = np.array([piece[0] if piece else 0 for piece in pieces.bytes], dtype=np.int64)
        self._brackets = np.array([bool(piece) and not piece.strip(CLOSERS) for piece in pieces.bytes])
        self._quotes = np.array([piece[:1] == b'"' and not piece[1:].strip(CLOSERS) for piece in pieces.bytes])
        self._starters = [token for token in map(pieces.id_of, STARTERS) if token is not None]
        self._digit = pieces.id_of(b"0")
        self._plain = [token for token in map(pieces.id_of, PLAIN) if token is not None]

    def best(self, grammar: BaseGrammarObject, limit: int = MOST, effort: int = 96) -> list[int] | None:
        """As `run`, in its first state, with more care to be short."""
        run = self._straight(grammar, limit, effort)
        shorter = self._widely(grammar, limit if run is None else len(run) - 1, 2 * effort)
        return run if shorter is None else shorter

    def run(self, grammar: BaseGrammarObject, limit: int, effort: int) -> list[int] | None:
        """At most `limit` tokens that complete the text, end ids left out; None if none were found after looking at
        `effort` states straight ahead, and as many widely. No clock: the same state gives the same run."""
        lead: list[int] = []
        if isinstance(grammar, ReasoningObject):
            lead, text = grammar.closing(), grammar.text
            if text is not None:  # nothing is to be closed first
                return self._search(text, limit, effort)
        taken = grammar.accept_tokens(lead)
        try:
            rest = self._search(grammar, limit - taken, effort) if taken == len(lead) else None
        finally:
            grammar.rollback(taken)
        return None if rest is None else lead + rest

    def _search(self, grammar: BaseGrammarObject, limit: int, effort: int) -> list[int] | None:
        """Straight ahead first, then more widely."""
        run = self._straight(grammar, limit, effort)
        return self._widely(grammar, limit, effort) if run is None else run

    def _straight(self, grammar: BaseGrammarObject, limit: int, effort: int) -> list[int] | None:
        """Always the most promising token."""
        run: list[int] = []
        try:
            while not grammar.is_complete():
                forced = grammar.forced_tokens()
                effort -= not forced  # the mask is what takes time
                further = (forced or self._choices(self._allowed(grammar))[:1])[: limit - len(run)]
                if not further or effort < 0:
                    return None
                taken = grammar.accept_tokens(further)
                run += further[:taken]
                if taken < len(further):
                    return None
            return run
        finally:
            grammar.rollback(len(run))

    def _widely(self, grammar: BaseGrammarObject, limit: int, effort: int) -> list[int] | None:
        """A few of the most promising runs at each length."""
        runs: list[list[int]] = [[]]
        for length in range(limit + 1):
            further: list[tuple[int, list[int]]] = []
            for run in [one for one in runs if len(one) <= length]:
                effort -= 1
                if effort < 0:
                    return None
                taken = grammar.accept_tokens(run)
                try:
                    if taken == len(run) and grammar.is_complete():
                        return run
                    if taken == len(run):
                        forced = grammar.forced_tokens()
                        ways = [forced] if forced else [[one] for one in self._choices(self._allowed(grammar))]
                        further += [(rank, run + way) for rank, way in enumerate(ways)]
                finally:
                    grammar.rollback(taken)
            further += [(0, one) for one in runs if len(one) > length]
            runs = [run for _, run in sorted(further, key=lambda one: one[0])[:WIDTH]]
        return None

    def _allowed(self, grammar: BaseGrammarObject) -> npt.NDArray[np.int64]:
        words = grammar.allocate_vocab_mask(1, grammar.vocab_size)
        grammar.fill_vocab_mask(words, 0)
        return masks.allowed_ids(words[0], min(grammar.vocab_size, self._size))

    def _choices(self, allowed: npt.NDArray[np.int64]) -> list[int]:
        """A few of the allowed tokens, the most promising first: what closes, short values, the longest, one of each
        first byte."""
        if not len(allowed):
            return []
        known = set(allowed.tolist())
        inside = len(self._plain) == len(PLAIN) and known.issuperset(self._plain)
        closing = allowed[(self._quotes if inside else self._brackets)[allowed]]
        chosen = closing[np.argsort(-self._lengths[closing], kind="stable")][:2].tolist()
        if not inside:
            chosen += [token for token in self._starters if token in known][:2]
        elif not chosen and self._digit in known:  # free text that may not end yet: digits are what patterns want most
            chosen.append(self._digit)
        chosen.append(int(allowed[np.argmax(self._lengths[allowed])]))
        short = allowed[np.argsort(self._lengths[allowed], kind="stable")]
        _, firsts = np.unique(self._first[short], return_index=True)
        chosen += short[np.sort(firsts)][:6].tolist()
        return list(dict.fromkeys(chosen))


def completes(grammar: BaseGrammarObject, run: Sequence[int]) -> bool:
    """Whether these tokens are taken and complete the text."""
    taken = grammar.accept_tokens(run)
    try:
        return taken == len(run) and grammar.is_complete()
    finally:
        grammar.rollback(taken)
