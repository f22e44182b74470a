"""Packs one step's rows into a ForwardBatch and its RowPlans.

Plain lists until the very end, numpy only to hand over. Changes nothing of a sequence but its own reused plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.types import ForwardBatch, RowPlan


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
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    counts: list[int] = []
    lengths: list[int] = []
    tables: list[list[int]] = []
    wanted: list[int] = []
    plans: list[RowPlan] = []
    for row in rows:
        sequence, start, count = row.sequence, row.start, row.count
        end = start + count
        offset = len(tokens)
        pages = sequence.pages
        if count == 1:
            tokens.append(sequence.tokens[start])
            positions.append(start)
            slots.append(pages[start // page_size] * page_size + start % page_size)
        else:
            tokens.extend(sequence.tokens[start:end] if not row.draft else (sequence.tokens[start], *row.draft))
            positions.extend(range(start, end))
            slots.extend(pages[at // page_size] * page_size + at % page_size for at in range(start, end))
        counts.append(count)
        lengths.append(end)
        tables.append(pages)
        row.first_plan = len(plans)
        row.first_row = len(wanted)
        if sequence.scored < sequence.prompt_len:
            row.scores = _plan_scores(row, offset, wanted, plans)
        if row.draft:
            row.sampled = True
            plans.extend(_plan_draft(sequence, row.draft, len(wanted)))
            wanted.extend(range(offset, offset + count))
        elif end == len(sequence.tokens) and sequence.samples:
            row.sampled = True
            plans.append(_plan_sample(sequence, len(wanted)))
            wanted.append(offset + count - 1)
    batch = ForwardBatch(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slots=np.array(slots, dtype=np.int64),
        query_lens=np.array(counts, dtype=np.int32),
        context_lens=np.array(lengths, dtype=np.int32),
        page_tables=tables,
        logit_rows=np.array(wanted, dtype=np.int64),
    )
    return Step(rows, batch, plans, decodes)


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


def _plan_scores(row: Row, offset: int, wanted: list[int], plans: list[RowPlan]) -> int:
    """Rows of this chunk whose next prompt token is to be scored; the last prompt token scores nothing."""
    sequence = row.sequence
    request = sequence.group.request
    first = max(sequence.scored, row.start + 1)
    last = min(row.start + row.count, sequence.prompt_len - 1)
    for position in range(first, last + 1):
        plans.append(
            RowPlan(
                row=len(wanted),
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
