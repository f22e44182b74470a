"""Decode steps as graphs: one a number of rows, captured once, filled and replayed from then on.

Owns each graph's inputs, plan and outputs. A step with fewer rows than its graph is padded with rows that live on a
page of nobody. Everything that a replay reads lies where it lay at the capture.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from branchline.engine.attention.base import GraphAttention
from branchline.engine.executor.cuda.decoder import Output, PagedDecoder
from branchline.engine.executor.cuda.device import Device, Graph
from branchline.engine.executor.cuda.staging import Layout, Staging
from branchline.engine.executor.cuda.step import StepInputs, arrays, dummy, padded
from branchline.engine.types import ForwardBatch


@dataclass(slots=True)
class _Captured:
    """One size. `memory` holds the inputs, `plan` what attention reads, `output` what a replay writes."""

    memory: torch.Tensor
    plan: object
    graph: Graph
    output: Output


class DecodeGraphs:
    """Graphs of one decoder. `sizes` rise; `pages` is the most that one sequence has; `page` is nobody's."""

    def __init__(
        self,
        device: Device,
        decoder: PagedDecoder,
        attention: GraphAttention,
        staging: Staging,
        tokens: torch.Tensor,
        *,
        sizes: Sequence[int],
        pages: int,
        page: int,
        page_size: int,
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._attention = attention
        self._staging = staging
        self._tokens = tokens
        self._sizes = list(sizes)
        self._pages = pages
        self._page = page
        self._page_size = page_size
        self._captured: dict[int, _Captured] = {}

    def fits(self, rows: int) -> bool:
        """Whether there is a graph for so many rows."""
        return rows <= self._sizes[-1]

    def capture_all(self) -> None:
        """Capture every size now, the largest first, whose memory the others then share."""
        for size in reversed(self._sizes):
            self._of(size)

    def run(self, batch: ForwardBatch) -> Output:
        """Queue a decode step; its output is overwritten by the next step of the same graph."""
        rows = len(batch.query_lens)
        size = self._sizes[bisect.bisect_left(self._sizes, rows)]
        captured = self._of(size)
        filled = padded(batch, size, self._page, self._page_size)
        self._staging.upload(arrays(filled), into=captured.memory)
        self._staging.plan(lambda: self._attention.update(captured.plan, filled))
        captured.graph.replay()
        return Output(captured.output.logits[:rows], captured.output.hidden[:rows])

    def _of(self, size: int) -> _Captured:
        found = self._captured.get(size)
        if found is None:
            found = self._captured[size] = self._capture(size)
        return found

    def _capture(self, size: int) -> _Captured:
        batch = dummy(size, self._page, self._page_size)
        given = arrays(batch)
        memory = torch.zeros(Layout.of(given).nbytes, dtype=torch.uint8, device=self._device.device)
        inputs = StepInputs.of(self._staging.upload(given, into=memory))
        plan = self._attention.prepare(size, self._pages)
        self._staging.plan(lambda: self._attention.update(plan, batch))
        spec, kind = self._decoder.spec, self._decoder.weights.embedding
        output = Output(
            torch.empty((size, spec.vocab_size), device=kind.device),
            torch.empty((size, spec.hidden), dtype=kind.dtype, device=kind.device),
        )

        def step() -> None:
            found = self._decoder.forward(inputs, self._tokens, plan)
            output.logits.copy_(found.logits)
            output.hidden.copy_(found.hidden)

        return _Captured(memory, plan, self._device.capture(step), output)
