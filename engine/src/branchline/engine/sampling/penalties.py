"""A sequence's token counts, and what they do to its logits.

Repetition scales logits of ids seen in prompt or output; frequency and presence subtract for output ids only.
Counts are kept as columns that grow, so that a step costs the number of distinct ids, not the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.types import SamplingParams


class PenaltyState:
    """Distinct ids of one sequence with their output counts. Mutated by `observe` only."""

    __slots__ = ("_columns", "counts", "ids", "params", "used")

    def __init__(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.params = params
        known = list(dict.fromkeys(prompt)) if params.repetition_penalty != 1.0 else []
        self._columns = {token: column for column, token in enumerate(known)}
        self.used = len(known)
        self.ids = np.zeros(max(64, 2 * self.used), dtype=np.int64)
        self.ids[: self.used] = known
        self.counts = np.zeros(len(self.ids), dtype=np.float32)

    def with_ahead(self, token_ids: tuple[int, ...]) -> PenaltyState:
        """A copy that has observed these too, for a row behind guessed tokens."""
        made = PenaltyState((), self.params)
        made._columns = dict(self._columns)
        made.used, made.ids, made.counts = self.used, self.ids.copy(), self.counts.copy()
        for token_id in token_ids:
            made.observe(token_id)
        return made

    def observe(self, token_id: int) -> None:
        """Count one generated token."""
        column = self._columns.get(token_id)
        if column is None:
            column = self._columns[token_id] = self.used
            if column == len(self.ids):
                self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)))
                self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
            self.ids[column] = token_id
            self.used += 1
        self.counts[column] += 1


def penalty_state(prompt: tuple[int, ...], params: SamplingParams) -> PenaltyState | None:
    """State for these options, or None if none of them penalises."""
    if params.repetition_penalty == 1.0 and params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
        return None
    return PenaltyState(prompt, params)


def penalise(logits: torch.Tensor, states: list[tuple[int, PenaltyState]]) -> None:
    """Change float32 `logits` [rows, vocab] in place for the given (row, state) pairs."""
    found = columns(states)
    if found:
        apply(logits, {name: torch.from_numpy(array).to(logits.device) for name, array in found.items()})


def columns(states: list[tuple[int, PenaltyState]]) -> dict[str, npt.NDArray[Any]]:
    """What `apply` needs of these (row, state) pairs, an entry a penalised logit; empty if there is none."""
    states = [(row, state) for row, state in states if state.used]
    if not states:
        return {}
    sizes = [state.used for _, state in states]

    def spread(values: list[float]) -> npt.NDArray[np.float32]:
        return np.repeat(np.asarray(values, dtype=np.float32), sizes)

    return {
        "penalised_rows": np.repeat(np.asarray([row for row, _ in states], dtype=np.int64), sizes),
        "penalised_ids": np.concatenate([state.ids[: state.used] for _, state in states]),
        "counts": np.concatenate([state.counts[: state.used] for _, state in states]),
        "repetition": spread([state.params.repetition_penalty for _, state in states]),
        "frequency": spread([state.params.frequency_penalty for _, state in states]),
        "presence": spread([state.params.presence_penalty for _, state in states]),
    }


def apply(logits: torch.Tensor, found: Mapping[str, torch.Tensor]) -> None:
    """Change float32 `logits` [rows, vocab] in place by what `columns` gave, on their device. Waits for nothing."""
    where = (found["penalised_rows"], found["penalised_ids"])
    values, counts, repetition = logits[where], found["counts"], found["repetition"]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= found["frequency"] * counts
    values -= found["presence"] * (counts > 0)
    logits[where] = values
