"""Exact scores of choices from prompt logprobs: which tokens to ask for, and how answers become scores. Pure.

A choice may change how the prefix's last tokens are cut. All choices are therefore scored from the longest token prefix
that the bare prefix and every prefix with choice share: the sums then belong to the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """Where scoring begins: never at position 0, which no model gives a logprob, unless all choices begin alike there.

    Raises:
        BackendError: no token stands before choices that begin differently.
    """
    start = 0
    for column in zip(prefix, *rows, strict=False):
        if len(set(column)) > 1:
            break
        start += 1
    start = min(start, min(len(row) for row in rows) - 1)
    if start <= 0 and len({row[0] for row in rows if row}) != 1:
        raise BackendError(
            "too little text stands before the choices: their first tokens have no probability; append text first"
        )
    return Plan(tuple(tuple(row) for row in rows), start)


def scored(answer: dict[str, Any], tails: Sequence[Sequence[int]]) -> list[ChoiceScore]:
    """Scores of an answer of `/v1/score`, with its exact sums.

    Raises:
        BackendError: the server answered for other tokens.
    """
    entries = answer.get("scores") or []
    if [entry.get("tokens") for entry in entries] != [list(tail) for tail in tails]:
        raise BackendError("the server's scores are not those of the choices' tokens")
    return [ChoiceScore(tuple(entry["token_logprobs"]), None, entry["sum"]) for entry in entries]


def usage(answer: dict[str, Any]) -> dict[str, Any]:
    """Prompt tokens of all choices together and those that the cache had, as every block's meta names them."""
    given = answer.get("usage") or {}
    details = given.get("prompt_tokens_details") or {}
    return {"prompt_tokens": given.get("prompt_tokens"), "cached_tokens": details.get("cached_tokens")}


def logprobs(meta: dict[str, Any], tail: Sequence[int]) -> tuple[float, ...]:
    """Logprobs of the asked tokens. The very first token of a text has none and counts as 0 for every choice.

    Raises:
        BackendError: the server answered for other tokens.
    """
    entries = meta.get("input_token_logprobs") or []
    if [entry[1] for entry in entries] != list(tail):
        raise BackendError("the server's prompt logprobs are not those of the choice's tokens")
    return tuple(0.0 if entry[0] is None else float(entry[0]) for entry in entries)


def without_prefix(scores: Sequence[ChoiceScore], alone: Sequence[tuple[float, ...]]) -> list[ChoiceScore]:
    """The scores with the logprobs that the choices have by themselves."""
    return [replace(score, unconditional=row) for score, row in zip(scores, alone, strict=True)]
