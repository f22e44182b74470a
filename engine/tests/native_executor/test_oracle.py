"""The packaged small model against recorded answers of transformers, and quantised weights against exact ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from branchline.engine.executor.native import NativeExecutor
from branchline.engine.model.source import LoadedModel
from branchline.engine.types import RowPlan

from .driver import GREEDY, Line, batch_of, build, continue_greedily

FIXTURE = Path(__file__).parents[1] / "fixtures" / "greedy.json"
ENTRIES: list[dict[str, Any]] = json.loads(FIXTURE.read_text())["entries"]
GAP = 1e-3


def clear_steps(entry: dict[str, Any]) -> int:
    """Steps before the first near-tie, where equality is required."""
    return next((step for step, gap in enumerate(entry["gaps"]) if gap < GAP), len(entry["gaps"]))


def test_greedy_continuations_in_one_batch_equal_those_of_transformers(exact: NativeExecutor) -> None:
    lines = [Line(list(range(number, 512, len(ENTRIES)))) for number in range(len(ENTRIES))]
    continue_greedily(exact, lines, [entry["prompt"] for entry in ENTRIES], 64)
    for line, entry in zip(lines, ENTRIES, strict=True):
        clear = clear_steps(entry)
        assert line.ids[:clear] == entry["ids"][:clear]


def test_input_logprobs_equal_those_of_transformers(exact: NativeExecutor) -> None:
    for entry in ENTRIES:
        prompt = entry["prompt"]
        found = _logprobs(exact, prompt)
        assert all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(found, entry["input_logprobs"], strict=True))


def _logprobs(executor: NativeExecutor, ids: list[int], chunk: int = 512) -> list[float]:
    """Logprob of every id but the first, given those before it."""
    line, found = Line(list(range(64))), []
    for at in range(0, len(ids) - 1, chunk):
        piece = ids[at : at + chunk]
        logits = executor.run(batch_of(executor.page_size, [(line, piece)], every_row=True))
        targets = ids[at + 1 : at + 1 + len(piece)]
        plans = [RowPlan(row, GREEDY, target=token, want_logprob=True) for row, token in enumerate(targets)]
        found += [result.logprob or 0.0 for result in executor.sample(logits, plans)]
    return found


def _perplexity(executor: NativeExecutor) -> float:
    """Of all fixture texts with their continuations: about 1,500 tokens."""
    scores = [score for entry in ENTRIES for score in _logprobs(executor, entry["prompt"] + entry["ids"])]
    return math.exp(-sum(scores) / len(scores))


@pytest.mark.parametrize("dtype", ["auto", "int8", "bfloat16"])
def test_perplexity_of_other_weight_types_is_within_one_percent_of_float32(
    exact: NativeExecutor, packaged: LoadedModel, dtype: str
) -> None:
    executor = build(packaged, dtype=dtype, threads=2)
    found, expected = _perplexity(executor), _perplexity(exact)
    executor.close()
    assert abs(found / expected - 1) < 0.01, f"{found} against {expected}"
