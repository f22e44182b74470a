"""The backend outlines: choices and small regular expressions, by outlines-core's automaton over whole tokens.

Built in the compiling child and shipped as bytes. States are numbers, so rollback and copies cost nothing. Sources are
read and rewritten by our own reader; what has no single plain expression there, or grows too large, is refused.
"""

from __future__ import annotations

import base64
import binascii
from typing import Self

import numpy as np
from outlines_core import Index, Vocabulary

from branchline import _native
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar import source
from branchline.engine.grammar.base import BaseGrammarBackend, BaseGrammarObject, GrammarContext
from branchline.engine.grammar.pattern import Quoting, parse, write
from branchline.engine.grammar.pattern.write import literal
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.types import I32, GrammarKind

NAME = "outlines"
MARK = b"\0"  # behind every text of an automaton
MAX_PATTERN = 2048  # bytes of the rewritten expression
MAX_INDEX = 8 << 20  # bytes of the automaton


class Table:
    """One compiled automaton with its masks; shared by all objects of a constraint, filled as states are seen.

    Every text of the automaton ends with a mark, the byte 0 under an id of its own: without it, an alternative that
    matches at once would hide the longer ones after it. A state is complete where the mark leads to the end.
    """

    def __init__(self, index: Index, pieces: Pieces, ends: frozenset[int]) -> None:
        self.index, self.pieces = index, pieces
        self.first: int = index.get_initial_state()
        self._mark = pieces.vocab_size
        self._ends = ends
        self._final = frozenset(index.get_final_states())
        self._rows: dict[int, tuple[I32, list[int]]] = {}

    def is_complete(self, state: int) -> bool:
        """Whether a text may end here."""
        return self.index.get_next_state(state, self._mark) in self._final

    def follow(self, state: int, token_id: int) -> int | None:
        """The state after one more token; None if it may not be."""
        piece = self.pieces.bytes[token_id]
        if not piece or token_id in self._ends:
            return None
        after: int | None = self.index.get_next_state(state, token_id)
        if after is None or (MARK in piece and not self._leads_on(after)):
            return None
        return after

    def row(self, state: int) -> tuple[I32, list[int]]:
        """(mask, forced token) of a state. Not to be written to."""
        found = self._rows.get(state)
        if found is None:
            ids = self._ids(state)
            forced = [] if self.is_complete(state) else self._forced(state, ids)
            words = np.zeros(masks.width(self.pieces.vocab_size), dtype=np.int32)
            masks.set_bits(words, forced or ids, True)
            found = self._rows[state] = (words, forced)
        return found

    def _ids(self, state: int) -> list[int]:
        known, size = self.pieces.bytes, self.pieces.vocab_size
        ids = [one for one in self.index.get_allowed_tokens(state) or [] if one < size and one not in self._ends]
        return [one for one in ids if MARK not in known[one] or self.follow(state, one) is not None]

    def _leads_on(self, state: int) -> bool:
        """Whether a byte 0 that led here belongs to the text: the mark must still follow."""
        return bool(set(self.index.get_allowed_tokens(state) or ()) - self._ends)

    def _forced(self, state: int, ids: list[int]) -> list[int]:
        """The longest token, if it and every other one are beginnings of the bytes that must follow."""
        known = self.pieces.bytes
        longest = max(ids, key=lambda one: len(known[one]), default=None)
        if longest is None or not all(known[longest].startswith(known[one]) for one in ids):
            return []
        for byte in known[longest][:-1]:
            single = self.pieces.id_of(bytes([byte]))
            after = self.follow(state, single) if single is not None else None
            if after is None or self.is_complete(after):
                return []
            state = after
            if len({known[one][0] for one in self._ids(state)}) != 1:
                return []
        return [longest]


class OutlinesObject(BaseGrammarObject):
    """The states so far; nothing of it is shared but the table."""

    def __init__(self, table: Table, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self._table = table
        self._states = [table.first]

    def _accept(self, token_id: int) -> bool:
        state = self._table.follow(self._states[-1], token_id)
        if state is None:
            return False
        self._states.append(state)
        return True

    def _rollback(self, count: int) -> None:
        del self._states[-count:]

    def _fill(self, words: I32) -> None:
        words[:] = self._table.row(self._states[-1])[0]

    def _complete(self) -> bool:
        return self._table.is_complete(self._states[-1])

    def _exhausted(self) -> bool:
        return self._complete() and not self._table.row(self._states[-1])[0].any()

    def _forced(self) -> list[int]:
        run, state = list[int](), self._states[-1]
        while True:
            forced = self._table.row(state)[1]
            if not forced:
                return run
            run += forced
            after = self._table.follow(state, forced[0])
            assert after is not None, "a forced token is an allowed one"
            state = after

    def _copy(self) -> Self:
        other = type(self)(self._table, self.vocab_size)
        other._states = list(self._states)
        return other


class OutlinesBackend(BaseGrammarBackend):
    """See BaseGrammarBackend. Building it reads the tokenizer."""

    name = NAME
    kinds = frozenset((GrammarKind.REGEX, GrammarKind.CHOICE))

    def __init__(self, context: GrammarContext) -> None:
        super().__init__(context)
        self._end = min(context.eos_ids, default=context.vocab_size + 1)
        self._ends = frozenset((*context.eos_ids, self._end))
        natives = _native.Vocabulary.from_tokenizer_json(context.tokenizer_json)
        self._pieces = Pieces(natives, context.vocab_size)
        by_bytes: dict[bytes, list[int]] = {MARK: [context.vocab_size]}
        for token, piece in enumerate(self._pieces.bytes):
            if piece and token not in self._ends and not natives.is_special(token):
                by_bytes.setdefault(piece, []).append(token)
        self._vocabulary = Vocabulary(self._end, by_bytes)

    def dispatch_regex(self, text: str) -> BaseGrammarObject:
        """Texts that the expression matches as a whole."""
        return self.load(GrammarKind.REGEX, self.compile(GrammarKind.REGEX, text))

    def dispatch_choice(self, text: str) -> BaseGrammarObject:
        """One of a JSON array's strings."""
        return self.load(GrammarKind.CHOICE, self.compile(GrammarKind.CHOICE, text))

    def compile(self, kind: GrammarKind, text: str) -> str:
        """The automaton, in base 64."""
        if kind is GrammarKind.REGEX:
            pattern = _pattern(text)
        elif kind is GrammarKind.CHOICE:
            source.check_size(text, "the choice")
            pattern = "|".join(literal(one, Quoting.PLAIN) or "(?:)" for one in source.choices_of(text))
        else:
            self.dispatch_fallback(kind, text)
        size = len(pattern.encode())
        if size > MAX_PATTERN:
            raise GrammarUnsupported(
                "size", f"its expression has {size} bytes, and {MAX_PATTERN} at most", backend=NAME
            )
        try:
            index = Index(f"(?:{pattern})\\x00", self._vocabulary)
        except ValueError as error:
            words = " ".join(str(error).split())[:300]
            if "vocabulary" in words.lower():
                raise GrammarInvalid(f"no text fits the constraint: correct it ({words})") from None
            raise GrammarUnsupported("pattern", words, backend=NAME) from None
        made: bytes = index.__reduce__()[1][0]
        made = bytes(made)
        if len(made) > MAX_INDEX:
            raise GrammarUnsupported("size", f"its automaton has {len(made)} bytes, {MAX_INDEX} at most", backend=NAME)
        return base64.b64encode(made).decode()

    def load(self, kind: GrammarKind, compiled: str) -> BaseGrammarObject:
        """The constraint in its first state, from what `compile` gave."""
        try:
            index = Index.from_binary(base64.b64decode(compiled, validate=True))
        except (ValueError, binascii.Error) as error:
            raise GrammarInvalid(f"{kind.value} is no compiled automaton: {error}") from None
        return OutlinesObject(Table(index, self._pieces, self._ends), self.context.vocab_size)


def _pattern(text: str) -> str:
    """The expression in the automaton's dialect, if one plain expression says it all."""
    terms = write(parse(text).root, Quoting.PLAIN, whole=True)
    if any(term.none_of or len(term.all_of) != 1 for term in terms):
        raise GrammarUnsupported("lookaround", "it needs more than one expression", backend=NAME)
    return "|".join(f"(?:{term.all_of[0]})" for term in terms)
