"""KV pages in a torch pool as others may handle them: copied to and from host memory, and out of and into the process.

Pools are [layers, 2, slots, kv_heads, head_dim]. Copies are queued on the device's stream like the steps, so they need
no waiting to come before or after one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from branchline.engine.errors import InternalError, LoadError
from branchline.engine.types import PageMove


class HoldsHost(ABC):
    """The host-memory half; see HostExecutor."""

    page_size: int
    _host: torch.Tensor | None = None

    @property
    @abstractmethod
    def pool(self) -> torch.Tensor:
        """Keys and values of all pages. Raises InternalError once closed."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values."""
        pool = self.pool
        return pool.element_size() * pool.numel() // pool.shape[2] * self.page_size

    def reserve_host(self, slots: int) -> None:
        """Reserve [slots, layers, 2, page_size, kv_heads, head_dim] of host memory, pinned for a GPU."""
        pool = self.pool
        layers, two, _, heads, width = pool.shape
        shape = (slots, layers, two, self.page_size, heads, width)
        try:
            self._host = torch.empty(shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")
        except (RuntimeError, MemoryError) as error:
            raise LoadError(
                f"no memory for {slots} host pages of {self.page_bytes} bytes: lower host-cache-gib",
                field="host_cache_gib",
            ) from error

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Copy pages between the tiers, in this order. On a GPU they are queued on its stream, as the next run is."""
        pool, host, size = self.pool, self._host, self.page_size
        if host is None:
            raise InternalError("no host tier was reserved")
        for store, page, slot in moves:
            on_device = pool[:, :, page * size : (page + 1) * size]
            if store:
                host[slot].copy_(on_device, non_blocking=True)
            else:
                on_device.copy_(host[slot], non_blocking=True)


class HoldsPages(HoldsHost):
    """The other half besides; see PageExecutor."""

    def read_pages(self, pages: Sequence[int]) -> bytes:
        """The bytes of these pages, each [layers, 2, page_size, kv_heads, head_dim], one after the other."""
        pool, size = self.pool, self.page_size
        with torch.inference_mode():
            picked = [pool[:, :, page * size : (page + 1) * size].contiguous() for page in pages]
            return b"".join(page.view(torch.uint8).cpu().numpy().tobytes() for page in picked)

    def write_pages(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        """Fill pages from what `read_pages` gave. Raises ValueError, and writes nothing, for another size."""
        pool, size, each = self.pool, self.page_size, self.page_bytes
        if len(data) != each * len(pages):
            raise ValueError(f"{len(data)} bytes are not {len(pages)} pages of {each}")
        layers, two, _, heads, width = pool.shape
        with torch.inference_mode():
            for number, page in enumerate(pages):
                piece = bytearray(data[number * each : (number + 1) * each])
                filled = torch.frombuffer(piece, dtype=pool.dtype).view(layers, two, size, heads, width)
                pool[:, :, page * size : (page + 1) * size].copy_(filled)
