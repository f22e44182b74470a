"""Exact scores of choices from prompt logprobs: which tokens to ask for, and how answers become scores. Pure.

A choice may change how the prefix's last tokens are cut. All choices are therefore scored from the longest token prefix
that the bare prefix and every prefix with choice share: the sums then belong to the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from branchline.lang.backends.base import ChoiceScore
from branchline.lang.errors import BackendError


@dataclass(frozen=True, slots=True)
class Plan:
    """Token ids of prefix and choice, per choice, and the first position that is scored."""

    rows: tuple[tuple[int, ...], ...]
    start: int

    @property
    def tails(self) -> tuple[tuple[int, ...], ...]:
        """The scored tokens of each choice."""
        return tuple(row[self.start :] for row in self.rows)


def plan(prefix: Sequence[int], rows: Sequence[Sequence[int]]) -> Plan:
    """Where scoring begins: never at position 0, which no model gives a logprob, unless nothing stands before."""
    start = 0
    for column in zip(prefix, *rows, strict=False):
        if len(set(column)) > 1:
            break
        start += 1
    shortest = min(len(row) for row in rows)
    return Plan(tuple(tuple(row) for row in rows), min(start, shortest - 1))


def logprobs(meta: dict[str, Any], tail: Sequence[int]) -> tuple[float, ...]:
    """Logprobs of the asked tokens. The very first token of a text has none and counts as 0 for every choice.

    Raises:
        BackendError: the server answered for other tokens.
    """
    entries = meta.get("input_token_logprobs") or []
    if [entry[1] for entry in entries] != list(tail):
        raise BackendError("the server's prompt logprobs are not those of the choice's tokens")
    return tuple(0.0 if entry[0] is None else float(entry[0]) for entry in entries)


def scores(
    rows: Sequence[tuple[float, ...]], unconditional: Sequence[tuple[float, ...]] | None
) -> tuple[ChoiceScore, ...]:
    """One score a choice."""
    return tuple(
        ChoiceScore(row, unconditional[index] if unconditional is not None else None) for index, row in enumerate(rows)
    )
