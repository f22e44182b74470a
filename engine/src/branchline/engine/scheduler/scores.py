"""Input logprobs: which prompt positions still need a logits row, and a bounded store of known ones.

A cached page keeps its KV but not its logits, so a scored position p needs row p − 1 computed: the cache may
be used up to there only. The store remembers the raw logprob of each token of whole prompt blocks, so that
a prefix that was scored once is neither recomputed nor read from the model again. Alternatives (top-k, chosen
ids) are not stored: asking for them takes the recompute.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.types import PositionLogprobs

MAX_POSITIONS = 4096  # of one delta


class ScoreStore:
    """Block hash → (tokens, logprob of each of them), least recently used first out."""

    def __init__(self, capacity: int, page_size: int) -> None:
        self._capacity = capacity
        self._page_size = page_size
        self._blocks: OrderedDict[int, tuple[list[int], list[float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def known(self, sequence: Sequence) -> list[float]:
        """Logprobs of positions sequence.scored, +1, … as far as they are stored without a gap."""
        size, values = self._page_size, list[float]()
        position = sequence.scored
        for block in sequence.group.hashes[position // size :]:
            start = position // size * size
            entry = self._blocks.get(block)
            if entry is None or entry[0] != sequence.tokens[start : start + size]:
                break
            self._blocks.move_to_end(block)
            values.extend(entry[1][position - start :])
            position = start + size
        return values

    def keep(self, sequence: Sequence) -> None:
        """Store the whole blocks that the sequence has scores of."""
        size, base = self._page_size, sequence.score_base
        for number, block in enumerate(sequence.group.hashes):
            first = number * size - base
            if first < 0 or first + size > len(sequence.scores):
                continue
            tokens = sequence.tokens[number * size : (number + 1) * size]
            self._blocks[block] = (tokens, sequence.scores[first : first + size])
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()


def begin(sequence: Sequence, input_start: int | None) -> None:
    """Set which positions are wanted. Only sequence 0 of a request scores its prompt."""
    wanted = input_start is not None and sequence.index == 0
    sequence.scored = min(input_start or 0, sequence.prompt_len) if wanted else sequence.prompt_len
    sequence.score_base = 0 if sequence.scored <= 1 else sequence.scored


def match_limit(sequence: Sequence, known: int) -> int:
    """Tokens that may be taken from the cache: never all, never a row that scores the first unknown position."""
    limit = len(sequence.tokens) - 1
    unknown = sequence.scored + known
    if unknown < sequence.prompt_len:
        limit = min(limit, max(unknown - 1, 0))
    return limit


def stored_report(sequence: Sequence, values: list[float]) -> list[PositionLogprobs]:
    """Account for `values` of the next positions; their reports in pieces of MAX_POSITIONS."""
    start = sequence.scored
    take(sequence, values)
    return [
        PositionLogprobs(
            start=first,
            token_ids=sequence.tokens[first : min(first + MAX_POSITIONS, sequence.scored)],
            logprobs=values[first - start : first - start + MAX_POSITIONS],
        )
        for first in range(start, sequence.scored, MAX_POSITIONS)
    ]


def take(sequence: Sequence, values: list[float]) -> None:
    """Append scores of the next positions. Position 0 has none and counts as NaN even if it was not asked for."""
    if sequence.score_base == 0 and sequence.scored == 1 and not sequence.scores:
        sequence.scores.append(math.nan)
    sequence.scores.extend(values)
    sequence.scored += len(values)
