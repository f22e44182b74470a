"""Building executors: refused options, bfloat16, identity and closing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from branchline.engine.errors import InternalError, LoadError
from branchline.engine.executor.pytorch import build_executor
from branchline.engine.model.load import load_model
from transformers import PreTrainedModel

from .conftest import build
from .driver import Line, logits_of

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "num_pages": 8,
    "page_size": 4,
    "threads": None,
    "attention_backend": "torch_paged",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "abacus"}, "device 'abacus'"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown; use auto, float32"),
    ],
)
def test_unusable_options_are_refused_by_name(
    family: tuple[PreTrainedModel, Path], change: dict[str, str], words: str
) -> None:
    with pytest.raises(LoadError, match=words):
        build_executor(load_model(str(family[1])), **{**OPTIONS, **change})


def test_bfloat16_stays_near_float32(family: tuple[PreTrainedModel, Path]) -> None:
    model = load_model(str(family[1]))
    exact, short = build_executor(model, **OPTIONS), build_executor(model, **{**OPTIONS, "dtype": "bfloat16"})
    prompt = [5, 90, 3, 41, 7, 2]
    expected = logits_of(exact, [(Line([0, 1]), prompt)])
    found = logits_of(short, [(Line([0, 1]), prompt)])
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert exact.numerics_id != short.numerics_id
    assert exact.numerics_id == build_executor(model, **OPTIONS).numerics_id


def test_closed_executor_refuses_to_run(family: tuple[PreTrainedModel, Path]) -> None:
    executor = build(family[1])
    executor.close()
    executor.close()
    with pytest.raises(InternalError, match="closed"):
        logits_of(executor, [(Line([0]), [1])])
