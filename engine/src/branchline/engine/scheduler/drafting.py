"""Guessed tokens in a step: asks the drafter for them, makes room, and keeps of each row's results what came true.

A row with a draft computes its last token and the guesses after it; every result is sampled by (seed, position)
as it would be alone, so the first that differs from the guess is still right and ends the row. KV of the rest
lies beyond `computed` and is overwritten.
"""

from __future__ import annotations

from branchline.engine.errors import InternalError
from branchline.engine.grammar.base import BaseGrammarObject
from branchline.engine.scheduler.batch import Row
from branchline.engine.scheduler.faults import fault
from branchline.engine.scheduler.pages import PageTables
from branchline.engine.scheduler.progress import Progress
from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.speculative.controller import Drafter
from branchline.engine.types import RowResult

MAX_FORCED = 64  # tokens of one row in one step


def add(drafter: Drafter, rows: list[Row], pages: PageTables, max_tokens: int, reserve: int) -> None:
    """Give decode `rows` drafts, at most `max_tokens` with them. `reserve` pages are spoken for."""
    limits = [(row.sequence, row.sequence.max_len - len(row.sequence.tokens) - 1) for row in rows]
    drafts = drafter.plan(limits, len(rows), max_tokens - len(rows))
    for row in rows:
        draft = drafts.get(row.sequence.number)
        grammar = row.sequence.grammar
        if _is_late(row.sequence):
            continue
        if draft and grammar is not None:
            draft = _valid(row.sequence, grammar, draft)
        if draft:
            room = _room(row, len(draft), pages, reserve)
            row.draft = draft[:room]
            row.count += len(row.draft)


def force(rows: list[Row], pages: PageTables, max_tokens: int, reserve: int) -> None:
    """Give constrained decode `rows` without a draft what their constraints force, as guesses that always come true."""
    left = max_tokens - sum(row.count for row in rows)
    for row in rows:
        sequence = row.sequence
        if sequence.grammar is None or sequence.fault is not None or row.draft or left <= 0 or _is_late(sequence):
            continue
        most = min(left, MAX_FORCED, sequence.max_len - len(sequence.tokens) - 1)
        try:
            forced = sequence.grammar.forced_tokens()[: max(most, 0)]
        except Exception as error:
            sequence.fault = fault(sequence, error)
            continue
        if forced:
            row.draft = forced[: _room(row, len(forced), pages, reserve)]
            row.forced = True
            row.count += len(row.draft)
            left -= len(row.draft)


def _is_late(sequence: Sequence) -> bool:
    """Whether a mask is still being filled: nobody else may use the constraint then."""
    return sequence.enforcing is not None and sequence.enforcing.late is not None


def _valid(sequence: Sequence, grammar: BaseGrammarObject, draft: list[int]) -> list[int]:
    """The guesses that the constraint takes. A backend's fault ends the request when the row is committed."""
    try:
        return draft[: grammar.validate_tokens(draft)]
    except Exception as error:
        sequence.fault = fault(sequence, error)
        return []


def _room(row: Row, wanted: int, pages: PageTables, reserve: int) -> int:
    """How many guessed tokens have a place: on pages that nobody else waits for."""
    sequence, size = row.sequence, pages.page_size
    have = len(sequence.pages) * size - sequence.computed - 1
    if have >= wanted:
        return wanted
    need = -(-(wanted - have) // size)
    if pages.cache.available() - need < reserve:
        return have
    return pages.extend(sequence, 1 + wanted) - 1


def check(result: RowResult) -> None:
    """Raise InternalError for a result that can't be used."""
    if result.error is not None:
        raise InternalError(f"the model gave unusable logits: {result.error}")


def begin(drafter: Drafter | None, row: Row, hidden: object | None) -> None:
    """A prompt is computed and its first token chosen."""
    if drafter is not None and drafter.wants_hidden:
        last = row.first_row + row.plans - 1
        drafter.settle(row.sequence, 0, 0, 0, _rows(hidden, last, 1))


def commit(
    drafter: Drafter | None,
    row: Row,
    results: list[RowResult],
    progress: Progress,
    now: float,
    hidden: object | None = None,
) -> bool:
    """Append a decode row's tokens up to the first wrong guess, that one's right token included; whether it ended."""
    sequence, draft = row.sequence, row.draft
    ended, taken, before = False, 0, sequence.accepted
    sequence.drafted += 0 if row.forced else len(draft)
    for place, result in enumerate(results):
        check(result)
        is_right = place < len(draft) and result.token_id == draft[place]
        sequence.accepted += is_right and not row.forced
        if row.forced and is_right and sequence.enforcing is not None:
            sequence.enforcing.forced += 1
        ended = progress.advance(sequence, result, now)
        taken = place + 1
        sequence.computed = row.start + taken
        if ended or not is_right:
            break
    guessed = 0 if row.forced else len(draft)
    if drafter is not None and (guessed or drafter.wants_hidden):
        right = sequence.accepted - before
        drafter.settle(sequence, guessed, min(guessed, taken), right, _rows(hidden, row.first_row, taken))
    return ended


def _rows(hidden: object | None, first: int, count: int) -> object | None:
    """`count` rows of the states from `first` on."""
    return None if hidden is None else hidden[first : first + count]  # type: ignore[index]
