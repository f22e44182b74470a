"""Host arrays on their way to the device: one pinned buffer and one copy an upload.

Buffers go round; one is written again only when the mark behind its last copy has passed, so an upload that is still
in the queue is never overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.executor.cuda.device import Device, Mark

ALIGNMENT = 16  # bytes; the widest that vectorised loads want
FIRST = 1 << 16  # bytes of a buffer before anything asks for more
BUFFERS = 8  # two steps in flight, up to four uploads each

Array = npt.NDArray[Any]
T = TypeVar("T")
_TORCH = {
    np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each named array lies in an upload."""

    places: tuple[tuple[str, int, tuple[int, ...], np.dtype[Any]], ...]
    nbytes: int

    @staticmethod
    def of(arrays: Mapping[str, Array]) -> Layout:
        """One behind the other, aligned."""
        places, at = [], 0
        for name, array in arrays.items():
            places.append((name, at, array.shape, array.dtype))
            at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return Layout(tuple(places), at)

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arrays as tensors on uint8 memory of at least `nbytes`."""
        found = {}
        for name, at, shape, dtype in self.places:
            kind = _TORCH[dtype]
            piece = memory[at : at + int(np.prod(shape)) * dtype.itemsize]
            found[name] = piece.view(kind).view(shape)
        return found


class Staging:
    """Uploads in the order of their calls."""

    def __init__(self, device: Device, buffers: int = BUFFERS) -> None:
        self._device = device
        self._memory = [device.pinned(FIRST) for _ in range(buffers)]
        self._marks: list[Mark | None] = [None] * buffers
        self._turn = 0
        self._planned: Mark | None = None

    def plan(self, make: Callable[[], T]) -> T:
        """Let an attention backend plan, once what its plan before queued has been copied.

        Backends have pinned buffers of their own that a plan writes. The wait is short: that plan's copies stand right
        behind the step before it, which has been collected by now.
        """
        if self._planned is not None:
            self._planned.wait()
        made = make()
        self._planned = self._device.mark()
        return made

    def upload(self, arrays: Mapping[str, Array], into: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """int32, int64 and float32 arrays as device tensors of the same shapes.

        `into` is uint8 device memory that is filled in place of new memory, for graphs: with arrays of the same names
        and shapes each value comes to lie where it did before. Raises ValueError if it is too small.
        """
        layout = Layout.of(arrays)
        if into is not None and into.numel() < layout.nbytes:
            raise ValueError(f"{layout.nbytes} bytes do not fit a graph's inputs of {into.numel()}")
        if into is None:
            into = torch.empty(max(layout.nbytes, 1), dtype=torch.uint8, device=self._device.device)
        memory = self._next(layout.nbytes)
        host = memory.numpy()
        for (_, at, _, _), array in zip(layout.places, arrays.values(), strict=True):
            host[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if layout.nbytes:
            self._device.send(into[: layout.nbytes], memory[: layout.nbytes])
        self._marks[self._turn] = self._device.mark()
        return layout.views(into)

    def _next(self, count: int) -> torch.Tensor:
        """The next buffer that nothing is being copied from, large enough."""
        self._turn = (self._turn + 1) % len(self._memory)
        mark, self._marks[self._turn] = self._marks[self._turn], None
        if mark is not None:
            mark.wait()
        if self._memory[self._turn].numel() < count:
            self._memory[self._turn] = self._device.pinned(1 << (count - 1).bit_length())
        return self._memory[self._turn]
