"""A batch as the device reads it: arrays to upload, tensors that a decoder takes, and padding to a graph's size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Device tensors of one step's T tokens. `rows` None: logits of every token are wanted."""

    ids: torch.Tensor  # int64 [T]
    source: torch.Tensor  # int64 [T] plan of the step before whose token this is; −1: `ids` has it
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T]
    rows: torch.Tensor | None  # int64 [R]

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> StepInputs:
        """From what `arrays` was uploaded to."""
        return StepInputs(
            tensors["ids"], tensors["source"], tensors["positions"], tensors["slots"], tensors.get("rows")
        )


def arrays(batch: ForwardBatch) -> dict[str, npt.NDArray[Any]]:
    """What of a batch is uploaded for the decoder; page tables are the attention's."""
    tokens = len(batch.token_ids)
    made: dict[str, npt.NDArray[Any]] = {
        "ids": batch.token_ids.astype(np.int64),
        "source": np.full(tokens, -1, dtype=np.int64) if batch.ahead is None else batch.ahead.astype(np.int64),
        "positions": batch.positions.astype(np.int64),
        "slots": batch.slots,
    }
    if len(batch.logit_rows) != tokens:
        made["rows"] = batch.logit_rows
    return made


def is_decode(batch: ForwardBatch) -> bool:
    """Whether every sequence has one new token whose logits are wanted: what graphs are captured of."""
    return len(batch.token_ids) == len(batch.query_lens) == len(batch.logit_rows)


def padded(batch: ForwardBatch, rows: int, page: int, page_size: int) -> ForwardBatch:
    """A decode batch of exactly `rows` sequences: further ones have a single token on a page that nobody owns."""
    missing = rows - len(batch.query_lens)
    if not missing:
        return batch
    ones = np.ones(missing, dtype=np.int32)

    def grown(values: npt.NDArray[Any], filling: int) -> npt.NDArray[Any]:
        return np.concatenate((values, np.full(missing, filling, dtype=values.dtype)))

    return ForwardBatch(
        token_ids=grown(batch.token_ids, 0),
        positions=grown(batch.positions, 0),
        slots=grown(batch.slots, page * page_size),
        query_lens=np.concatenate((batch.query_lens, ones)),
        context_lens=np.concatenate((batch.context_lens, ones)),
        page_tables=[*batch.page_tables, *([page] for _ in range(missing))],
        logit_rows=np.arange(rows, dtype=np.int64),
        ahead=None if batch.ahead is None else grown(batch.ahead, -1),
    )


def dummy(rows: int, page: int, page_size: int) -> ForwardBatch:
    """A decode batch of nobody, to capture with."""
    none = np.zeros(0, dtype=np.int32)
    wide = np.zeros(0, dtype=np.int64)
    return padded(ForwardBatch(none, none, wide, none, none, [], wide), rows, page, page_size)


def graph_sizes(limit: int) -> list[int]:
    """Rows that graphs are captured for, rising, the last at least `limit`: close together where padding costs most."""
    sizes, size = [], 1
    while True:
        sizes.append(size)
        if size >= limit:
            return sizes
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 64
