"""The packaged model in every weight format against transformers in fp32 on the same dequantised weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from branchline.engine.executor.native import NativeExecutor
from branchline.engine.model.source import LoadedModel
from branchline.engine.types import RowPlan
from recast import FORMATS, INT8, recast

from .driver import GREEDY, Line, batch_of, build, continue_greedily

FIXTURE: dict[str, Any] = json.loads((Path(__file__).parents[1] / "fixtures" / "formats.json").read_text())
CHUNK = 300


def loss(executor: NativeExecutor, ids: list[int]) -> float:
    """Mean negative log-likelihood of every id but the first, prefilled in chunks."""
    line, scores = Line(list(range(80))), []
    for at in range(0, len(ids) - 1, CHUNK):
        piece = ids[at : at + CHUNK]
        logits = executor.run(batch_of(executor.page_size, [(line, piece)], every_row=True))
        plans = [
            RowPlan(row, GREEDY, target=token, want_logprob=True)
            for row, token in enumerate(ids[at + 1 : at + 1 + CHUNK])
        ]
        scores += [result.logprob or 0.0 for result in executor.sample(logits, plans)]
    return -sum(scores) / len(scores)


@pytest.mark.parametrize("format_name", FORMATS)
def test_perplexity_is_within_one_percent_of_transformers_on_the_same_weights(
    packaged: LoadedModel, format_name: str
) -> None:
    executor = build(recast(packaged, format_name), pages=128, threads=2)
    found = loss(executor, FIXTURE["text"])
    executor.close()
    ratio = math.exp(found - FIXTURE["formats"][format_name]["loss"])
    assert abs(ratio - 1) < 0.01, f"perplexity is {ratio:.4f} of the reference's"


@pytest.mark.parametrize(("weight_dtype", "format_name"), [("int8", INT8), ("bf16", "BF16"), ("f32", "F32")])
def test_requantised_weights_are_within_one_percent_of_transformers_on_the_same_values(
    packaged: LoadedModel, weight_dtype: str, format_name: str
) -> None:
    executor = build(recast(packaged, "F32"), weight_dtype=weight_dtype, pages=128, threads=2)
    found = loss(executor, FIXTURE["text"])
    executor.close()
    ratio = math.exp(found - FIXTURE["formats"][format_name]["loss"])
    assert abs(ratio - 1) < 0.01, f"perplexity is {ratio:.4f} of the reference's"


@pytest.mark.parametrize("format_name", FORMATS)
def test_greedy_ids_are_those_of_transformers_where_the_choice_is_clear(
    packaged: LoadedModel, format_name: str
) -> None:
    exact = format_name == "F32"
    executor = build(recast(packaged, format_name), dtype="float32" if exact else "auto", pages=128, threads=2)
    lines = [Line(list(range(number, 120, 3))) for number in range(3)]
    answers = FIXTURE["formats"][format_name]["greedy"]
    continue_greedily(executor, lines, FIXTURE["prompts"], len(answers[0]["ids"]))
    executor.close()
    # Activations of 8 bits move logits by a few tenths.
    gap = 1e-3 if exact else 0.5
    for line, answer in zip(lines, answers, strict=True):
        clear = next((step for step, one in enumerate(answer["gaps"]) if one < gap), len(answer["gaps"]))
        assert line.ids[:clear] == answer["ids"][:clear]
