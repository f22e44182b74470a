"""`draft`: a smaller model of the same vocabulary guesses, token by token, what the served one will say.

Owns the second executor and its pool of pages. It draws with the request's own parameters, seed and position,
so that sampled text is guessed as well as greedy text is. A sequence that finds no pages gets no guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from branchline.engine.config import SpeculativeOptions
from branchline.engine.errors import LoadError
from branchline.engine.speculative.base import BEHIND, NOTHING, Ask, DraftContext, Drafted, Proposal
from branchline.engine.types import Executor, ForwardBatch, RowPlan

CATCH_UP = 512  # most tokens of prompts that the draft model reads in one step


@dataclass(slots=True)
class _Pages:
    """One sequence's KV in the draft model: that of `tokens` lies in `pages`."""

    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Work:
    """One sequence during a proposal."""

    state: _Pages
    pending: list[int]  # tokens whose KV is to be computed before the next guess
    plan: RowPlan
    limit: int
    guesses: list[int] = field(default_factory=list)


class ModelDrafts:
    """SpeculativeAlgorithm over a second model, run by the same kind of executor."""

    api_version = 1
    free = False
    wants_hidden = False

    def __init__(self, context: DraftContext) -> None:
        """Builds the draft model. Raises LoadError if it can't be loaded or has another vocabulary."""
        if context.draft_executor is None:
            raise LoadError(
                "speculative-algorithm draft needs speculative-draft-model", field="speculative_draft_model"
            )
        self._executor: Executor = context.draft_executor()
        if self._executor.vocab_size != context.vocab_size:
            size = self._executor.vocab_size
            self._executor.close()
            raise LoadError(
                f"the draft model has {size} token ids and the served model {context.vocab_size}: give one with the "
                "same tokenizer",
                field="speculative_draft_model",
            )
        self._free = list(range(self._executor.num_pages))

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        """The second model must be named."""
        if not options.draft_model:
            return ["speculative-algorithm draft needs speculative-draft-model: name the second model"]
        return []

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        """See SpeculativeAlgorithm: catch up on what was decided meanwhile, then guess one token a round, together.

        After more than the one token that a wholly right guess leaves to read nothing is guessed: a step pays for
        reading a piece of a prompt or for guesses, and what guesses cost is learnt from these alone.
        """
        works = [self._begin(ask) for ask in asked]
        going = [work for work in works if work is not None]
        if self._catch_up(going) > 1:
            return [NOTHING if work is None else BEHIND for work in works]
        going = [work for work in going if len(work.pending) == 1]
        while going:
            self._round(going)
            going = [work for work in going if len(work.guesses) < work.limit and self._has_room(work)]
        return [NOTHING if work is None else Proposal(work.guesses, "draft") for work in works]

    def accepted(self, sequence: Drafted, hidden: object) -> None:
        """Not called."""

    def end(self, sequence: Drafted, finished: bool) -> None:
        """Give the draft model's pages back."""
        state, sequence.draft_state = sequence.draft_state, None
        if isinstance(state, _Pages):
            self._free.extend(state.pages)

    def close(self) -> None:
        """Release the draft model."""
        self._executor.close()

    def _begin(self, ask: Ask) -> _Work | None:
        sequence = ask.sequence
        state = sequence.draft_state
        if not isinstance(state, _Pages):
            state = sequence.draft_state = _Pages()
        tokens = sequence.tokens
        equal = _common(state.tokens, tokens, len(tokens) - 1)
        del state.tokens[equal:]  # KV of guesses that were wrong is overwritten
        if not self._extend(state, len(tokens)):
            return None
        plan = sequence.plan
        own = RowPlan(0, plan.params, plan.seed)
        return _Work(state, tokens[equal:], own, ask.limit)

    def _extend(self, state: _Pages, length: int) -> bool:
        need = -(-length // self._executor.page_size) - len(state.pages)
        if need > len(self._free):
            return False
        for _ in range(need):
            state.pages.append(self._free.pop())
        return True

    def _has_room(self, work: _Work) -> bool:
        return self._extend(work.state, len(work.state.tokens) + 1)

    def _catch_up(self, works: list[_Work]) -> int:
        """One step over everything but each sequence's last token; the most tokens read of one sequence."""
        rows: list[tuple[_Work, int]] = []
        left = CATCH_UP
        for work in works:
            count = min(len(work.pending) - 1, left)
            if count > 0:
                rows.append((work, count))
                left -= count
        if rows:
            self._executor.run(self._batch(rows, sample=False))
            self._settle(rows)
        return max((count for _, count in rows), default=0)

    def _round(self, works: list[_Work]) -> None:
        """Guess one token for each."""
        rows = [(work, 1) for work in works]
        logits = self._executor.run(self._batch(rows, sample=True))
        self._settle(rows)
        for row, work in enumerate(works):
            work.plan.row, work.plan.position = row, len(work.state.tokens)
        results = self._executor.sample(logits, [work.plan for work in works])
        for work, result in zip(works, results, strict=True):
            if result.error is not None:
                work.limit = 0
                continue
            work.guesses.append(result.token_id)
            work.pending = [result.token_id]

    @staticmethod
    def _settle(rows: list[tuple[_Work, int]]) -> None:
        for work, count in rows:
            work.state.tokens.extend(work.pending[:count])
            work.pending = work.pending[count:]

    def _batch(self, rows: list[tuple[_Work, int]], *, sample: bool) -> ForwardBatch:
        size = self._executor.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        lengths: list[int] = []
        for work, count in rows:
            start, pages = len(work.state.tokens), work.state.pages
            tokens.extend(work.pending[:count])
            positions.extend(range(start, start + count))
            slots.extend(pages[at // size] * size + at % size for at in range(start, start + count))
            lengths.append(start + count)
        return ForwardBatch(
            token_ids=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            slots=np.array(slots, dtype=np.int64),
            query_lens=np.array([count for _, count in rows], dtype=np.int32),
            context_lens=np.array(lengths, dtype=np.int32),
            page_tables=[work.state.pages for work, _ in rows],
            logit_rows=np.arange(len(rows) if sample else 0, dtype=np.int64),
        )


def _common(first: list[int], second: list[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`."""
    length = min(len(first), limit)
    if first[:length] == second[:length]:
        return length
    return next(at for at in range(length) if first[at] != second[at])
