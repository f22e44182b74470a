"""How a select is decided from the logprobs of its choices. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from branchline.lang.backends.base import ChoiceScore
from branchline.lang.errors import BackendError
from branchline.lang.ir import Select

TIE = 1e-6  # nats: closer than this is noise of the arithmetic, and the first choice wins


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _greedy(scores: Sequence[ChoiceScore]) -> int:
    """Column by column, keep the choices whose token is among the best; short choices go on with their mean."""
    width = max(len(score.token_logprobs) for score in scores)
    rows = [
        [*score.token_logprobs, *[_mean(score.token_logprobs)] * (width - len(score.token_logprobs))]
        for score in scores
    ]
    left = list(range(len(rows)))
    for column in range(width):
        best = max(rows[index][column] for index in left)
        left = [index for index in left if rows[index][column] >= best - TIE]
        if len(left) == 1:
            break
    return left[0]


def values(select: Select, scores: Sequence[ChoiceScore]) -> list[float]:
    """The method's score of each choice, in nats (greedy_token_selection: the first token's)."""
    if select.method == "exact":
        return [sum(score.token_logprobs) if score.total is None else score.total for score in scores]
    if select.method == "unconditional_likelihood_normalized":
        out = []
        for score in scores:
            if score.unconditional is None or len(score.unconditional) != len(score.token_logprobs):
                raise BackendError("the unconditional logprobs of a choice are missing or of another length")
            out.append(_mean([a - b for a, b in zip(score.token_logprobs, score.unconditional, strict=True)]))
        return out
    if select.method == "greedy_token_selection":
        return [score.token_logprobs[0] if score.token_logprobs else 0.0 for score in scores]
    return [_mean(score.token_logprobs) for score in scores]


def probabilities(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Softmax over the choices."""
    best = max(scores)
    if best == -math.inf:
        return [1.0 / len(scores)] * len(scores)
    weights = [math.exp((score - best) / temperature) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def pick(select: Select, scores: Sequence[ChoiceScore]) -> tuple[int, dict[str, Any]]:
    """Index of the picked choice, and what it was picked by."""
    for choice, score in zip(select.choices, scores, strict=True):
        if any(math.isnan(value) for value in score.token_logprobs):
            raise BackendError(f"a logprob of choice {choice!r} is not a number")
    ranked = values(select, scores)
    sums = [sum(score.token_logprobs) if score.total is None else score.total for score in scores]
    meta: dict[str, Any] = {
        "scores": ranked,
        "probabilities": probabilities(sums),
        "normalized_prompt_logprobs": [_mean(score.token_logprobs) for score in scores],
        "input_token_logprobs": [list(score.token_logprobs) for score in scores],
    }
    if select.temperature > 0:
        weights = probabilities(ranked, select.temperature)
        return random.Random(select.seed).choices(range(len(ranked)), weights)[0], meta
    if select.method == "greedy_token_selection":
        return _greedy(scores), meta
    best = max(ranked)
    return next(index for index, value in enumerate(ranked) if value >= best - TIE), meta
