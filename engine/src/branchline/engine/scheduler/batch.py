"""Packs one step's rows into a ForwardBatch and its RowPlans.

Changes nothing of a sequence but its own reused plan.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.types import ForwardBatch, RowPlan

News = tuple[str, int, str | None]
"""What a text automaton says of a token: (text, tokens consumed, matched stop string)."""


@dataclass(slots=True, eq=False)
class Row:
    """One sequence's part of a step: `count` tokens from `start` on, `scores` plans and then perhaps a sampled one.

    `draft` are guessed tokens that follow its last one: `count` includes them, and each has its own sampled plan.
    """

    sequence: Sequence
    start: int
    count: int
    first_plan: int = 0
    first_row: int = 0  # of its logits rows
    scores: int = 0
    sampled: bool = False
    draft: list[int] = field(default_factory=list)
    forced: bool = False  # `draft` is what the constraint leaves, not guessed
    verified: bool = False  # sampled without its mask and looked at afterwards
    waits: bool = False  # its mask is late: the step's results do not count
    source: int = -1  # plan of the step before whose token this row computes, if that is not known yet
    news: News | None = None  # of a plain row, once its token is known

    def renew(self) -> None:
        """Use a decode's row again, for the sequence's next token."""
        self.start = self.sequence.computed
        self.count = 1
        self.verified = self.waits = self.forced = False
        if self.draft:
            self.draft = []

    @property
    def plans(self) -> int:
        """How many results are its own."""
        return self.scores + self.sampled + len(self.draft)


@dataclass(slots=True, eq=False)
class Step:
    """What to run, and whose it is. The first `decodes` rows decode, the others compute prompts."""

    rows: list[Row]
    batch: ForwardBatch
    plans: list[RowPlan]
    decodes: int = 0

    @property
    def only_decodes(self) -> bool:
        """Whether no row computes a prompt's tokens."""
        return self.decodes == len(self.rows)


def pack(rows: list[Row], page_size: int, decodes: int = 0) -> Step:
    """The step of these rows, in their order."""
    plans: list[RowPlan] = []
    alike = _pack_decodes(rows[:decodes], page_size, plans) if decodes else None
    first = 0 if alike is None else decodes
    others = _pack_others(rows[first:], page_size, plans, first) if first < len(rows) else None
    columns = alike or others or []
    if alike is not None and others is not None:
        columns = [np.concatenate(pair) for pair in zip(alike, others, strict=True)]
    tokens, positions, slots, counts, lengths, wanted = columns
    adapters = [row.sequence.adapter for row in rows]
    batch = ForwardBatch(
        token_ids=tokens,
        positions=positions,
        slots=slots,
        query_lens=counts,
        context_lens=lengths,
        page_tables=[row.sequence.pages for row in rows],
        logit_rows=wanted,
        adapters=adapters if any(adapters) else None,
    )
    return Step(rows, batch, plans, decodes)


Columns = list[npt.NDArray[Any]]
"""token_ids, positions, slots, query_lens, context_lens and logit_rows of some rows, typed as ForwardBatch says."""


def _pack_decodes(rows: list[Row], page_size: int, plans: list[RowPlan]) -> Columns | None:
    """Rows of one token each that are all sampled: nearly all rows of nearly all steps, so written out.

    None, with no plan added, if one of them has a guess.
    """
    starts = [row.start for row in rows]
    tokens: list[int] = []
    pages: list[int] = []
    own: list[RowPlan] = []
    for at, row in enumerate(rows):
        if row.draft:
            return None
        sequence, start = row.sequence, row.start
        tokens.append(sequence.tokens[start])
        pages.append(sequence.pages[start // page_size])
        row.first_plan = row.first_row = at
        row.sampled = True
        plan = sequence.plan
        plan.row, plan.position = at, start + 1
        if sequence.min_tokens or plan.banned:  # verifying adds to it
            plan.banned = sequence.banned if sequence.generated < sequence.min_tokens else ()
        own.append(plan)
    plans.extend(own)
    counts = np.empty(len(rows), dtype=np.int32)
    counts.fill(1)
    positions = np.array(starts, dtype=np.int32)
    return [
        np.array(tokens, dtype=np.int32),
        positions,
        np.array(pages, dtype=np.int64) * page_size + positions % page_size,
        counts,
        positions + counts,
        np.arange(len(rows), dtype=np.int64),
    ]


def _pack_others(rows: list[Row], page_size: int, plans: list[RowPlan], before: int) -> Columns:
    """Chunks of prompts and rows with guesses. `before` tokens and logits rows come before theirs."""
    tokens = array("I")
    wanted: list[int] = []
    for row in rows:
        sequence, start, count = row.sequence, row.start, row.count
        end = start + count
        offset = before + len(tokens)
        if row.draft:
            tokens.append(sequence.tokens[start])
            tokens.extend(row.draft)
        else:
            tokens.extend(sequence.known()[start:end])
        row.first_plan = len(plans)
        row.first_row = before + len(wanted)
        if sequence.scored < sequence.prompt_len:
            row.scores = _plan_scores(row, offset, before, wanted, plans)
        if row.draft:
            row.sampled = True
            plans.extend(_plan_draft(sequence, row.draft, before + len(wanted)))
            wanted.extend(range(offset, offset + count))
        elif end == len(sequence.tokens) and sequence.samples:
            row.sampled = True
            plans.append(_plan_sample(sequence, before + len(wanted)))
            wanted.append(offset + count - 1)
    return [np.frombuffer(tokens, dtype=np.int32), *_places(rows, page_size), np.array(wanted, dtype=np.int64)]


def _places(rows: list[Row], page_size: int) -> Columns:
    """positions, slots, query_lens and context_lens of rows of any length, all at once."""
    starts = np.array([row.start for row in rows], dtype=np.int32)
    counts = np.array([row.count for row in rows], dtype=np.int32)
    ends = counts.cumsum(dtype=np.int32)
    positions = np.arange(ends[-1], dtype=np.int32) + (starts - ends + counts).repeat(counts)
    pages: list[int] = []
    shifts: list[int] = []  # from a page's number in its sequence to its place in `pages`
    for row in rows:
        first = row.start // page_size
        shifts.append(len(pages) - first)
        pages.extend(row.sequence.pages[first : -(-(row.start + row.count) // page_size)])
    places = positions // page_size + np.array(shifts, dtype=np.int32).repeat(counts)
    slots = np.array(pages, dtype=np.int64)[places] * page_size + positions % page_size
    return [positions, slots, counts, starts + counts]


def _plan_sample(sequence: Sequence, wanted: int) -> RowPlan:
    plan = sequence.plan
    plan.row = wanted
    plan.position = len(sequence.tokens)
    plan.banned = sequence.banned if sequence.generated < sequence.min_tokens else ()
    return plan


def _plan_draft(sequence: Sequence, draft: list[int], wanted: int) -> list[RowPlan]:
    """One plan a guessed token and one for what follows them all, each as it would be had the guesses come true."""
    first = _plan_sample(sequence, wanted)
    plans = [first]
    for ahead in range(1, len(draft) + 1):
        plans.append(
            RowPlan(
                row=wanted + ahead,
                params=first.params,
                seed=first.seed,
                position=first.position + ahead,
                penalties=first.penalties,
                banned=sequence.banned if sequence.generated + ahead < sequence.min_tokens else (),
                want_logprob=first.want_logprob,
                top_k=first.top_k,
                chosen_ids=first.chosen_ids,
                ahead=tuple(draft[:ahead]) if first.penalties is not None else (),
            )
        )
    return plans


def _plan_scores(row: Row, offset: int, before: int, wanted: list[int], plans: list[RowPlan]) -> int:
    """Rows of this chunk whose next prompt token is to be scored; the last prompt token scores nothing."""
    sequence = row.sequence
    request = sequence.group.request
    first = max(sequence.scored, row.start + 1)
    last = min(row.start + row.count, sequence.prompt_len - 1)
    for position in range(first, last + 1):
        plans.append(
            RowPlan(
                row=before + len(wanted),
                params=request.sampling,
                position=position,
                target=sequence.tokens[position],
                want_logprob=True,
                top_k=request.logprobs.top_k,
                chosen_ids=request.logprobs.token_ids,
            )
        )
        wanted.append(offset + position - 1 - row.start)
    return max(last - first + 1, 0)
