"""The step after one whose results are not known yet: its rows one token on, that token to be read on the device.

Made only where the results cannot change who runs: every row goes on decoding unless it ends, nobody is to be admitted,
nothing is guessed, constrained or penalised. A row whose sequence turns out to have ended is computed for nothing: it
writes one slot of a page that is given back when the step is over, and its result is dropped. Changes nothing of a
sequence but its pages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from branchline.engine.scheduler.batch import Row, Step
from branchline.engine.scheduler.pages import PageTables
from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.types import ForwardBatch


def after(step: Step, prefilling: int, pages: PageTables) -> Step | None:
    """The next step; None if somebody's part in it can't be told, or pages are short. `prefilling` sequences compute
    prompts, and nobody but the rows of `step` may."""
    if len(step.rows) - step.decodes != prefilling or not all(_goes_on(row) for row in step.rows):
        return None
    rows = _following(step, pages)
    return _packed(rows, pages.page_size) if rows else None


def _goes_on(row: Row) -> bool:
    """Whether the row ends with a sampled token that needs nothing of the host to be followed by another."""
    sequence = row.sequence
    return (
        row.sampled
        and not row.draft
        and not row.scores
        and sequence.grammar is None
        and sequence.plan.penalties is None
        and sequence.scored >= sequence.prompt_len
    )


def _following(step: Step, pages: PageTables) -> list[Row]:
    """The rows of the next step with pages for them; none if pages are short. Whoever must end now has none."""
    rows: list[Row] = []
    for row in step.rows:
        sequence, start = row.sequence, row.start + row.count
        if sequence.finished or start + 1 >= sequence.max_len:
            continue
        if start >= len(sequence.pages) * pages.page_size:
            new = pages.cache.allocate(1)
            if new is None:
                return []
            sequence.pages.extend(new)
        made = Row(sequence, start, 1, len(rows), len(rows), sampled=True)
        made.source = row.first_plan
        rows.append(made)
    return rows


def _packed(rows: list[Row], page_size: int) -> Step:
    """The step of these rows, whose tokens are those of the plans that they come from."""
    starts = [row.start for row in rows]
    tables = [row.sequence.pages for row in rows]
    positions = np.array(starts, dtype=np.int32)
    adapters = [row.sequence.adapter for row in rows]
    batch = ForwardBatch(
        token_ids=np.zeros(len(rows), dtype=np.int32),
        positions=positions,
        slots=np.array(
            [
                pages[start // page_size] * page_size + start % page_size
                for pages, start in zip(tables, starts, strict=True)
            ],
            dtype=np.int64,
        ),
        query_lens=np.ones(len(rows), dtype=np.int32),
        context_lens=positions + 1,
        page_tables=tables,
        logit_rows=np.arange(len(rows), dtype=np.int64),
        ahead=np.array([row.source for row in rows], dtype=np.int32),
        adapters=adapters if any(adapters) else None,
    )
    plans = [
        # A copy: the sequence's own is still that of the step in flight.
        replace(row.sequence.plan, row=number, position=row.start + 1, banned=_banned(row.sequence, row.start))
        for number, row in enumerate(rows)
    ]
    return Step(rows, batch, plans, len(rows))


def _banned(sequence: Sequence, start: int) -> tuple[int, ...]:
    return sequence.banned if start + 1 - sequence.prompt_len < sequence.min_tokens else ()
