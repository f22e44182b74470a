"""Decodes that say nothing but a token and its text: no constraint, penalty, logprob or guess. Most of them.

The texts of a whole step are made in one call to compiled code; a row at a time costs more in calls than in work.
Knows no pages and no queue. Whatever can't go this way is left to the way that does all.
"""

from __future__ import annotations

import time

from branchline.engine.scheduler.batch import Step
from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.speculative.controller import Drafter
from branchline.engine.types import RowResult


class Plain:
    """Pushes the sampled tokens of a step's plain rows into their texts."""

    def __init__(self) -> None:
        from branchline._native import TextStream, push_many

        self._stream, self._push = TextStream, push_many
        self.share_s = 0.0  # of one row, in the latest step

    def is_plain(self, sequence: Sequence, drafter: Drafter | None) -> bool:
        """Whether decodes of the sequence are plain from here on."""
        plan = sequence.plan
        if sequence.grammar is not None or plan.penalties is not None or plan.want_logprob:
            return False
        return type(sequence.text) is self._stream and (drafter is None or not drafter.wants_hidden)

    def push(self, step: Step, results: list[RowResult]) -> None:
        """Give each plain row its `news`. A token that ends its sequence, and a row at fault, get none."""
        rows, streams, tokens = [], [], []
        for row in step.rows[: step.decodes]:
            sequence = row.sequence
            if not sequence.plain or row.draft or sequence.finished:
                continue
            result = results[row.first_plan]
            token = result.token_id
            if result.error is None and token not in sequence.ends:
                rows.append(row)
                streams.append(sequence.text)
                tokens.append(token)
        if not rows:
            return
        begun = time.perf_counter()
        try:
            news = self._push(streams, tokens)  # type: ignore[arg-type]  # they are its own: see is_plain
        except TypeError:  # before any was pushed: a text was put in another's place
            return
        self.share_s = (time.perf_counter() - begun) / len(rows)
        for row, one in zip(rows, news, strict=True):
            row.news = one
