"""The forward pass in float32 against transformers on random checkpoints of every family."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from branchline.engine.model.load import load_model
from random_families import FAMILIES, save
from transformers import PreTrainedModel

from .driver import F32, Line, build, logits_of

Family = tuple[PreTrainedModel, Path]
PROMPT = [random.Random(3).randrange(97) for _ in range(45)]


@pytest.fixture(params=[name for name in FAMILIES if "experts" not in name], scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """transformers' model with random weights, and the folder it was saved to."""
    folder = tmp_path_factory.mktemp("family")
    return save(request.param, folder), folder


def expected(theirs: PreTrainedModel, ids: list[int]) -> F32:
    with torch.inference_mode():
        logits: F32 = theirs(torch.tensor([ids])).logits[0].numpy()
    return logits


def test_logits_of_every_position_equal_those_of_transformers(family: Family, isa: str) -> None:
    theirs, folder = family
    executor = build(load_model(str(folder)), dtype="float32", page_size=4, isa=isa)
    found = logits_of(executor, [(Line(list(range(40, 60))), PROMPT)], every_row=True)
    assert np.abs(found - expected(theirs, PROMPT)).max() < 1e-4


@pytest.mark.parametrize("page_size", [1, 3, 16, 32])
def test_page_size_does_not_change_logits(family: Family, page_size: int) -> None:
    theirs, folder = family
    executor = build(load_model(str(folder)), dtype="float32", page_size=page_size)
    line = Line(list(range(60, 0, -1)))
    logits_of(executor, [(line, PROMPT[:30])])
    found = logits_of(executor, [(line, PROMPT[30:])])
    assert np.abs(found[0] - expected(theirs, PROMPT)[-1]).max() < 1e-4
