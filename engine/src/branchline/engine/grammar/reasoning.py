"""A constraint that begins behind a block of reasoning: free text up to its end mark, the full constraint after it.

Wraps any backend's object by its public methods alone. Marks are found in bytes, so that it does not matter how they
are cut into tokens; a token that runs past the end mark is never allowed. Knows no requests; no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np

from branchline.engine.errors import InvalidArgument
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarObject
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.types import I32, ReasoningAsk

TAIL = 64  # tokens of a prompt's end that are looked at


class Phase(IntEnum):
    """Where an output is."""

    LEAD = 0  # it may still begin with the begin mark, or with the constrained text
    INSIDE = 1
    AFTER = 2


class Marks:
    """Begin and end mark over one vocabulary: masks and steps of the search for them. Shared by all requests."""

    def __init__(self, pieces: Pieces, begin: str, end: str) -> None:
        self.pieces, self.begin, self.end = pieces, begin.encode(), end.encode()
        if not self.begin or not self.end:
            raise InvalidArgument("grammar.reasoning needs both begin and end: give its marks", field="grammar")
        if pieces.spell(self.end) is None:
            raise InvalidArgument(
                f"this model's tokenizer can't spell grammar.reasoning.end {end!r}: correct it", field="grammar"
            )
        self._borders = _borders(self.end)
        self._free: dict[int, I32] = {}
        self._lead: dict[int, I32] = {}
        self._closing: dict[int, list[int]] = {}
        self.opening = pieces.spell(self.begin) or []
        last = self.end[-1:]
        self._risky = [token for token, piece in enumerate(pieces.bytes) if last in piece[:-1]]
        self._base = _row(pieces.vocab_size, (token for token, piece in enumerate(pieces.bytes) if piece))

    def phase(self, prompt: Sequence[int], implicit: bool) -> Phase:
        """Where an output begins, by the last tokens of its prompt; blanks after a mark don't count."""
        tail = self.pieces.text(prompt[-TAIL:]).rstrip()
        if tail.endswith(self.end):
            return Phase.AFTER
        return Phase.INSIDE if implicit or tail.endswith(self.begin) else Phase.LEAD

    def feed(self, matched: int, piece: bytes) -> tuple[int, int]:
        """(bytes of the end mark seen, bytes of the piece behind a whole mark or −1) after a piece."""
        for at, byte in enumerate(piece):
            while matched and self.end[matched] != byte:
                matched = self._borders[matched - 1]
            matched += self.end[matched] == byte
            if matched == len(self.end):
                return matched, len(piece) - at - 1
        return matched, -1

    def free(self, matched: int) -> I32:
        """What may follow inside the block: all that does not run past the end mark. Not to be written to."""
        words = self._free.get(matched)
        if words is None:
            words = self._base.copy()
            pieces = self.pieces.bytes
            masks.set_bits(words, (one for one in self._risky if self.feed(matched, pieces[one])[1] > 0), False)
            self._free[matched] = words
        return words

    def opens(self, seen: int, piece: bytes) -> bool:
        """Whether a piece goes on with the begin mark of which `seen` bytes are there, and not past the end mark."""
        rest = self.begin[seen:]
        if not piece or not (rest.startswith(piece) or piece.startswith(rest)):
            return False
        return self.feed(0, piece[len(rest) :])[1] <= 0

    def lead(self, seen: int) -> I32:
        """The tokens for which `opens` holds. Not to be written to."""
        words = self._lead.get(seen)
        if words is None:
            ids = (token for token, piece in enumerate(self.pieces.bytes) if self.opens(seen, piece))
            words = self._lead[seen] = _row(self.pieces.vocab_size, ids)
        return words

    def closing(self, matched: int) -> list[int]:
        """The fewest tokens that complete the end mark. Not to be written to."""
        ids = self._closing.get(matched)
        if ids is None:
            ids = self._closing[matched] = self.pieces.spell(self.end[matched:]) or []
        return ids


@dataclass(frozen=True, slots=True)
class _Now:
    """Where an output is: bytes of the looked-for mark that are there, tokens of reasoning, and in LEAD whether the
    tokens so far may also begin the constrained text."""

    phase: Phase
    seen: int = 0
    spent: int = 0
    alive: bool = True
    reasoned: bool = False


class ReasoningObject(BaseGrammarObject):
    """See BaseGrammarObject. An end id is legal only behind the constrained text, never inside the block.

    When `budget` tokens of reasoning are spent, marks included, the end mark is forced. A text that may begin with
    the begin mark or with the constrained text is held to both until it differs; a whole mark opens the block.
    """

    def __init__(self, inner: BaseGrammarObject, marks: Marks, phase: Phase, budget: int | None) -> None:
        super().__init__(inner.vocab_size)
        self._marks = marks
        self._budget = budget
        self._plain = inner  # the constrained text if no block comes before it
        self._after = inner.copy() if phase is Phase.LEAD else inner  # the one behind the block
        self._now = _Now(phase, reasoned=phase is Phase.INSIDE)
        self._past: list[tuple[_Now, bool]] = []  # before each token; whether a constraint took it

    def start(self, ends: Iterable[int]) -> Self:
        """A copy whose end ids are `ends`, and those of what it wraps."""
        known = tuple(ends)
        other = super().start(known)
        other._plain, other._after = other._plain.start(known), other._after.start(known)
        return other

    @property
    def is_inside(self) -> bool:
        """Whether the constrained text has not begun."""
        return self._now.phase is not Phase.AFTER

    def closing(self) -> list[int]:
        """Tokens that lead to the constrained text soonest; none if it may begin, or has begun."""
        now = self._now
        if now.phase is Phase.INSIDE:
            return self._marks.closing(now.seen)
        if now.phase is Phase.LEAD and not now.alive:
            return [*(self._marks.pieces.spell(self._marks.begin[now.seen :]) or []), *self._marks.closing(0)]
        return []

    @property
    def text(self) -> BaseGrammarObject | None:
        """The constraint of the text, if that may begin here or has begun; to be left as it is."""
        return None if self.closing() else self._text(self._now)

    def _accept(self, token_id: int) -> bool:
        now = self._now
        if now.phase is Phase.AFTER:
            taken = accepted = self._text(now).accept_token(token_id)
        elif now.phase is Phase.INSIDE:
            taken, accepted = False, self._reason(now, token_id)
        else:
            accepted, taken = self._begin(now, token_id)
        if accepted:
            self._past.append((now, taken))
        return accepted

    def _text(self, now: _Now) -> BaseGrammarObject:
        """The constraint that holds."""
        return self._after if now.reasoned else self._plain

    def _begin(self, now: _Now, token_id: int) -> tuple[bool, bool]:
        """LEAD: (taken, taken by the constraint too)."""
        marks, piece = self._marks, self._marks.pieces.bytes[token_id]
        leads = self._may_open(now) and marks.opens(now.seen, piece)
        taken = now.alive and self._plain.accept_token(token_id)
        if not leads:
            if taken:
                self._now = _Now(Phase.AFTER, spent=now.spent)
            return taken, taken
        over = now.seen + len(piece) - len(marks.begin)
        if over < 0:
            self._now = _Now(Phase.LEAD, now.seen + len(piece), now.spent + 1, taken)
        else:
            seen, behind = marks.feed(0, piece[len(piece) - over :])
            self._now = _Now(Phase.INSIDE, seen, now.spent + 1, reasoned=True)
            if behind == 0:
                self._now = _Now(Phase.AFTER, 0, now.spent + 1, reasoned=True)
        return True, taken

    def _reason(self, now: _Now, token_id: int) -> bool:
        """INSIDE: whether the token is taken."""
        piece = self._marks.pieces.bytes[token_id]
        if not piece or (self._is_spent(now) and token_id != self._marks.closing(now.seen)[0]):
            return False
        seen, behind = self._marks.feed(now.seen, piece)
        if behind > 0:
            return False
        closed = behind == 0
        self._now = _Now(Phase.AFTER if closed else Phase.INSIDE, 0 if closed else seen, now.spent + 1, reasoned=True)
        return True

    def _may_open(self, now: _Now) -> bool:
        """Whether the budget has room for a block."""
        if self._budget is None or now.seen:
            return True
        return len(self._marks.opening) + len(self._marks.closing(0)) <= self._budget

    def _is_spent(self, now: _Now) -> bool:
        return self._budget is not None and now.spent + len(self._marks.closing(now.seen)) >= self._budget

    def _rollback(self, count: int) -> None:
        undone = self._past[-count:]
        del self._past[-count:]
        for text, reasoned in ((self._plain, False), (self._after, True)):
            taken = sum(taken for now, taken in undone if now.reasoned is reasoned)
            if taken:
                text.rollback(taken)
        self._now = undone[0][0]

    def _fill(self, words: I32) -> None:
        now = self._now
        if now.phase is Phase.INSIDE:
            if self._is_spent(now):
                words[:] = 0
                masks.set_bits(words, self._marks.closing(now.seen)[:1], True)
            else:
                words[:] = self._marks.free(now.seen)
            return
        if now.phase is Phase.AFTER or now.alive:
            self._text(now).fill_vocab_mask(words[None, :], 0)
        else:
            words[:] = 0
        if now.phase is Phase.LEAD and self._may_open(now):
            words |= self._marks.lead(now.seen)

    def _complete(self) -> bool:
        now = self._now
        open_text = now.phase is Phase.AFTER or (now.phase is Phase.LEAD and now.alive)
        return open_text and self._text(now).is_complete()

    def _exhausted(self) -> bool:
        return self._now.phase is Phase.AFTER and self._text(self._now).is_exhausted()

    def _forced(self) -> list[int]:
        now = self._now
        if now.phase is Phase.AFTER:
            return self._text(now).forced_tokens()
        return self._marks.closing(now.seen) if now.phase is Phase.INSIDE and self._is_spent(now) else []

    def _copy(self) -> Self:
        other = type(self)(self._plain.copy(), self._marks, Phase.AFTER, self._budget)
        if self._after is not self._plain:
            other._after = self._after.copy()
        other._now, other._past = self._now, list(self._past)
        return other


def wrap(grammar: BaseGrammarObject, ask: ReasoningAsk, marks: Marks, prompt: Sequence[int]) -> ReasoningObject:
    """A constraint in its first state, behind the reasoning that a request allows."""
    return ReasoningObject(grammar.copy(), marks, marks.phase(prompt, ask.implicit), ask.max_tokens)


def _row(vocab_size: int, ids: Iterable[int]) -> I32:
    words = np.zeros(masks.width(vocab_size), dtype=np.int32)
    masks.set_bits(words, ids, True)
    return words


def _borders(text: bytes) -> list[int]:
    """Knuth, Morris and Pratt's failure function."""
    borders, length = [0] * len(text), 0
    for at in range(1, len(text)):
        while length and text[at] != text[length]:
            length = borders[length - 1]
        length += text[at] == text[length]
        borders[at] = length
    return borders
