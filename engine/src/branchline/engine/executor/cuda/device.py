"""What the executor needs of a GPU's runtime: queued copies, marks in the queue, pinned memory and graphs.

One interface with two implementations, so that everything above runs on a CPU unchanged. What may be done when is a
contract that a recording implementation in the tests checks:

- memory given to `send` is not written, and memory given to `fetch` is not read, before a later mark was waited for;
- `send`, `fetch`, `mark` and whatever waits for the device are not called inside a capture;
- a graph reads its inputs from memory that exists before the capture: new values get there by `send`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 2  # runs before a capture: lazily made handles and workspaces must not be made inside one


class Mark(Protocol):
    """A place in the device's queue."""

    def wait(self) -> None:
        """Until everything queued before it is done."""


class Graph(Protocol):
    """A captured piece of work."""

    def replay(self) -> None:
        """Queue it once more, on the very memory that it was captured on."""


class Device(Protocol):
    """One device with one queue. Not thread-safe."""

    device: torch.device

    def pinned(self, count: int) -> torch.Tensor:
        """`count` bytes (uint8) of host memory that copies can be queued from and to."""

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from pinned memory to the device; both contiguous, of one dtype and size."""

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from the device to pinned memory."""

    def mark(self) -> Mark:
        """A mark behind everything queued so far."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Record what `run` queues. It is run a few times for real before, and must bear that."""


class _Done:
    """The mark of a device that never lags behind."""

    def wait(self) -> None:
        """Nothing is queued."""


class _Again:
    """The graph of a device without graphs: the work is done anew, on the same memory."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        """Run it."""
        self._run()


class HostDevice:
    """A CPU: everything is done when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pinned(self, count: int) -> torch.Tensor:
        """Plain memory."""
        return torch.empty(count, dtype=torch.uint8)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def mark(self) -> Mark:
        """Always passed."""
        return _Done()

    def capture(self, run: Callable[[], None]) -> Graph:
        """Keep the work itself."""
        run()
        return _Again(run)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        """Block without spinning on the interpreter's lock."""
        self._event.synchronize()


class CudaDevice:
    """A GPU by way of torch: the thread's current stream is the queue, all graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(self.device)
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, count: int) -> torch.Tensor:
        """Page-locked memory."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy."""
        target.copy_(source, non_blocking=True)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        """An event on the current stream."""
        return _CudaMark(torch.cuda.current_stream(self.device))

    def capture(self, run: Callable[[], None]) -> Graph:
        """Warm up on a stream of its own, then capture."""
        aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self.device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may ask the runtime for something meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph


def open_device(device: torch.device) -> Device:
    """The implementation for a torch device."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice(device)
