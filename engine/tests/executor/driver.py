"""Drives an Executor without a scheduler: a few sequences, each with its own pages, stepped by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from branchline.engine.executor.pytorch import TorchExecutor
from branchline.engine.types import ForwardBatch, RowPlan, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Line:
    """One sequence: its pages and how many tokens are in them."""

    pages: list[int]
    length: int = 0
    ids: list[int] = field(default_factory=list)


def batch_of(page_size: int, work: Sequence[tuple[Line, Sequence[int]]], every_row: bool = False) -> ForwardBatch:
    """A step that appends the given tokens to each line; asks for logits of the last or of every token."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    for line, new in work:
        for token in new:
            tokens.append(token)
            positions.append(line.length)
            slots.append(line.pages[line.length // page_size] * page_size + line.length % page_size)
            line.length += 1
        rows.extend(range(len(tokens) - len(new), len(tokens)) if every_row else [len(tokens) - 1])
    return ForwardBatch(
        np.array(tokens, np.int32),
        np.array(positions, np.int32),
        np.array(slots, np.int64),
        np.array([len(new) for _, new in work], np.int32),
        np.array([line.length for line, _ in work], np.int32),
        [line.pages for line, _ in work],
        np.array(rows, np.int64),
    )


def logits_of(
    executor: TorchExecutor, work: Sequence[tuple[Line, Sequence[int]]], every_row: bool = False
) -> torch.Tensor:
    """Logits of one step, copied."""
    found = executor.run(batch_of(executor.page_size, work, every_row))
    assert isinstance(found, torch.Tensor)
    return found.clone()


def continue_greedily(
    executor: TorchExecutor, lines: Sequence[Line], prompts: Sequence[Sequence[int]], count: int
) -> None:
    """Append `count` greedy ids to each line's `ids`, all lines in one batch a step."""
    pending: list[Sequence[int]] = list(prompts)
    for _ in range(count):
        logits = executor.run(batch_of(executor.page_size, list(zip(lines, pending, strict=True))))
        answers = executor.sample(logits, [RowPlan(row, GREEDY) for row in range(len(lines))])
        for line, answer in zip(lines, answers, strict=True):
            assert answer.error is None
            line.ids.append(answer.token_id)
        pending = [[answer.token_id] for answer in answers]
