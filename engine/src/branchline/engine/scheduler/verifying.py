"""Looks at sampled tokens of constrained rows before they count: those without a mask, and those near their limit.

A refused token is replaced by what the same seed, position and logits give without it, so that ids and logprobs are
those of a mask. A token after which the text could not be completed within the limit is replaced by the next one of
the known way out. On the loop's thread, after sampling; states are left as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from branchline.engine.errors import InternalError
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarObject
from branchline.engine.grammar.closing import Closer, completes
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.scheduler.batch import Row, Step
from branchline.engine.scheduler.enforcing import Enforcing
from branchline.engine.scheduler.faults import fault
from branchline.engine.types import RowPlan, RowResult

TRIES = 16  # refused tokens of one place; then the row waits for its mask
WINDOW = 512  # tokens beyond the way out from which on every token is looked at

EFFORT = 64  # states looked at for one way out, in a step

Sample = Callable[[list[RowPlan]], list[RowResult]]


class Verifier:
    """What it needs of the vocabulary is built at the first row that comes near its limit."""

    def __init__(self, pieces: Callable[[], Pieces]) -> None:
        self._closer = functools.cache(lambda: Closer(pieces()))

    def check(self, step: Step, results: list[RowResult], sample: Sample) -> None:
        """Put right what may not stay, in `results`; a row that can't be put right waits."""
        for row in step.rows:
            sequence = row.sequence
            how, grammar = sequence.enforcing, sequence.grammar
            if how is None or grammar is None or not row.sampled or row.waits or sequence.fault is not None:
                continue
            if not row.verified and not _is_near(row, how):
                continue
            try:
                _Check(row, how, grammar, step, results, sample, self._closer).run()
            except Exception as error:
                sequence.fault = fault(sequence, error)


def _is_near(row: Row, how: Enforcing) -> bool:
    left = row.sequence.max_len - len(row.sequence.tokens)
    return how.way is not None and left <= len(how.way) + WINDOW + len(row.draft)


class _Check:
    """The places of one row, one after the other, as far as its guesses come true."""

    def __init__(
        self,
        row: Row,
        how: Enforcing,
        grammar: BaseGrammarObject,
        step: Step,
        results: list[RowResult],
        sample: Sample,
        closer: Callable[[], Closer],
    ) -> None:
        self._row, self._how, self._grammar = row, how, grammar
        self._plans, self._results = step.plans, results
        self._sample, self._closer = sample, closer
        self._near = _is_near(row, how)
        self._way = how.way

    def run(self) -> None:
        row, first = self._row, self._row.first_plan + self._row.scores
        sequence = row.sequence
        if self._near and self._way is not None and self._how.at != len(sequence.tokens):
            left = sequence.max_len - len(sequence.tokens)
            if len(self._way) > left or not completes(self._grammar, self._way):
                self._way = self._search(left)
        taken = 0
        try:
            for place in range(1 + len(row.draft)):
                if not self._place(first + place, place):
                    return
                token = self._results[first + place].token_id
                taken += self._grammar.accept_token(token)
                if place < len(row.draft) and (token != row.draft[place] or self._grammar.is_exhausted()):
                    break
            if self._way is not None:  # else it is looked for again after the next token
                self._how.way, self._how.at = self._way, len(sequence.tokens) + taken
        finally:
            self._grammar.rollback(taken)

    def _place(self, at: int, place: int) -> bool:
        """Whether the result at a place may be used, put right if need be."""
        if self._results[at].error is not None:
            return False
        if self._row.verified and not self._verify(at):
            self._row.waits = self._how.needs_mask = True
            return False
        if self._near and self._way is not None:
            self._steer(at, place)
        return self._results[at].error is None

    def _verify(self, at: int) -> bool:
        """Have a token there that a mask would have allowed."""
        forced = self._grammar.forced_tokens()
        if forced:
            if self._results[at].token_id != forced[0]:
                self._only(at, forced[0])
            return True
        plan = self._plans[at]
        for _ in range(TRIES):
            token = self._results[at].token_id
            if self._grammar.validate_tokens([token]):
                return True
            plan.banned = (*plan.banned, token)
            self._results[at] = self._sample([plan])[0]
            if self._results[at].error is not None:
                return True  # nothing is left: as with a mask
        return False

    def _steer(self, at: int, place: int) -> None:
        """Keep the text's completion within the limit, by the known way if the sampled token leads too far."""
        row, way = self._row, self._way
        assert way is not None, "only rows with a way out come here"
        left = row.sequence.max_len - len(row.sequence.tokens) - place - 1  # after this token
        token = self._results[at].token_id
        self._way = self._after(token, way, left)
        if self._way is not None and len(self._way) <= left:
            return
        if not way or token == way[0]:  # complete already, or on the way
            self._way = way[1:] if way else None
            return
        self._only(at, way[0])
        self._way = way[1:]
        self._how.steered = True

    def _after(self, token: int, way: list[int], left: int) -> list[int] | None:
        """A way out after one more token."""
        grammar = self._grammar
        if way and token == way[0]:
            return way[1:]
        if not grammar.accept_token(token):
            raise InternalError(f"the model's token {token} is outside the constraint's mask")
        try:
            if grammar.is_complete():
                return []
            if completes(grammar, way):
                return way
            if way and completes(grammar, way[1:]):
                return way[1:]
            return self._search(left)
        finally:
            grammar.rollback(1)

    def _search(self, left: int) -> list[int] | None:
        return self._closer().run(self._grammar, left, EFFORT)

    def _only(self, at: int, token: int) -> None:
        """Have one token there, with the logprobs that belong to it."""
        plan = self._plans[at]
        words = np.zeros(masks.width(self._grammar.vocab_size), dtype=np.int32)
        masks.set_bits(words, [token], True)
        plan.mask = words
        self._results[at] = self._sample([plan])[0]
