"""Our forward pass against transformers' on random checkpoints of every family."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from .conftest import build
from .driver import Line, logits_of

Family = tuple[PreTrainedModel, Path]
PROMPT = [random.Random(3).randrange(97) for _ in range(45)]


def expected(theirs: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return theirs(torch.tensor([ids])).logits[0]


def test_logits_of_every_position_equal_those_of_transformers(family: Family) -> None:
    theirs, folder = family
    executor = build(folder)
    found = logits_of(executor, [(Line(list(range(40, 60))), PROMPT)], every_row=True)
    assert (found - expected(theirs, PROMPT)).abs().max() < 1e-4


@pytest.mark.parametrize("cuts", [[1] * 45, [20, 25], [7, 1, 30, 6, 1], [44, 1]])
def test_chunks_give_the_same_logits_as_one_pass(family: Family, cuts: list[int]) -> None:
    theirs, folder = family
    executor = build(folder)
    line, at, pieces = Line([9, 3, 77, 12, 5, 60, 61, 62, 2, 90, 91, 30]), 0, []
    for cut in cuts:
        pieces.append(logits_of(executor, [(line, PROMPT[at : at + cut])], every_row=True))
        at += cut
    assert (torch.cat(pieces) - expected(theirs, PROMPT)).abs().max() < 1e-4


@pytest.mark.parametrize("attention", ["torch_paged", "reference"])
def test_rows_of_a_mixed_batch_equal_their_own_runs(family: Family, attention: str) -> None:
    theirs, folder = family
    executor = build(folder, attention=attention)
    chance = random.Random(11)
    pages = list(range(256))
    chance.shuffle(pages)
    lines = [Line([pages.pop() for _ in range(12)]) for _ in range(9)]
    texts = [[chance.randrange(97) for _ in range(chance.randrange(2, 47))] for _ in lines]
    warm = [chance.randrange(1, len(text)) for text in texts]
    for line, text, length in zip(lines, texts, warm, strict=True):
        logits_of(executor, [(line, text[:length])])
    # Half of the lines add one token, the others all that is left, in one step.
    steps = [
        1 if number % 2 else len(text) - length for number, (text, length) in enumerate(zip(texts, warm, strict=True))
    ]
    work = [(line, text[a : a + n]) for line, text, a, n in zip(lines, texts, warm, steps, strict=True)]
    found = logits_of(executor, work)
    for row, (text, length, step) in enumerate(zip(texts, warm, steps, strict=True)):
        assert (found[row] - expected(theirs, text[: length + step])[-1]).abs().max() < 1e-4


def test_only_wanted_rows_get_logits(family: Family) -> None:
    _, folder = family
    executor = build(folder)
    found = logits_of(executor, [(Line([0, 1]), PROMPT[:6]), (Line([2, 3]), PROMPT[:3])])
    assert found.shape == (2, 97)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_size_does_not_change_logits(family: Family, page_size: int) -> None:
    theirs, folder = family
    executor = build(folder, page_size=page_size)
    line = Line(list(range(60, 0, -1)))
    logits_of(executor, [(line, PROMPT[:30])])
    found = logits_of(executor, [(line, PROMPT[30:])])
    assert (found[0] - expected(theirs, PROMPT)[-1]).abs().max() < 1e-4


def test_nan_in_foreign_slots_reaches_no_row(family: Family) -> None:
    theirs, folder = family
    executor = build(folder)
    executor.decoder.pool.fill_(float("nan"))
    lines = [Line([8, 3, 14, 1]), Line([30, 20, 25, 10]), Line([40, 41, 42, 43])]
    lengths = (3, 9, 12)
    for line, length in zip(lines, lengths, strict=True):
        logits_of(executor, [(line, PROMPT[:length])])
    found = logits_of(executor, [(line, [PROMPT[length]]) for line, length in zip(lines, lengths, strict=True)])
    for row, length in enumerate(lengths):
        assert (found[row] - expected(theirs, PROMPT[: length + 1])[-1]).abs().max() < 1e-4
