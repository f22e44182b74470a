"""Page tables as arrays, kept from step to step.

A sequence's list of pages only grows while it runs, so a step costs what was appended, not the whole list. Lists are
known by identity: whoever changes pages that are there already makes a new list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchline.engine.types import ForwardBatch

I32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Row:
    """One list's pages so far. The list is held, so that its identity stays its own."""

    pages: list[int]
    array: I32
    filled: int = 0


class PageRows:
    """The rows of the latest step."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def padded(self, batch: ForwardBatch, page_size: int) -> I32:
        """int32 [B, widest]: each sequence's pages, the rest filled with its first one."""
        counts = (-(-batch.context_lens // page_size)).tolist()
        result = np.empty((len(counts), max(counts)), dtype=np.int32)
        kept: dict[int, _Row] = {}
        for line, pages, count in zip(result, batch.page_tables, counts, strict=True):
            row = kept[id(pages)] = self._row(pages, count)
            line[:count] = row.array[:count]
            line[count:] = row.array[0]
        self._rows = kept
        return result

    def joined(self, batch: ForwardBatch, page_size: int) -> tuple[I32, I32]:
        """(int32 [B + 1] where each begins, int32 [total] pages): the sequences' pages one after the other."""
        counts = -(-batch.context_lens // page_size)
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        kept: dict[int, _Row] = {}
        pieces = []
        for pages, count in zip(batch.page_tables, counts.tolist(), strict=True):
            row = kept[id(pages)] = self._row(pages, count)
            pieces.append(row.array[:count])
        self._rows = kept
        return starts, np.concatenate(pieces)

    def _row(self, pages: list[int], count: int) -> _Row:
        row = self._rows.get(id(pages))
        if row is None or row.pages is not pages or row.filled > len(pages):
            row = _Row(pages, np.empty(max(8, 2 * count), dtype=np.int32))
        if row.filled < count:
            if len(row.array) < count:
                row.array = np.concatenate((row.array, np.empty(count, dtype=np.int32)))
            row.array[row.filled : count] = pages[row.filled : count]
            row.filled = count
        return row
