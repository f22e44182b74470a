"""What transfer engines that read a peer's memory have in common: two registered arenas, cut into equal slots.

A payload names a place in the sender's arena; the puller reads it into a slot of its own. How it is read is the
subclass's.
"""

from __future__ import annotations

import queue
import struct
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from branchline.engine.handover.base import TransferContext, TransferFailed

RECEIVING = 8  # transfers at one time
_PLACE = struct.Struct("<QQ")  # address, bytes


class SlotTransfer(ABC):
    """KvTransferBackend but for registering and reading."""

    api_version = 1
    inline = False
    address = ""

    def __init__(self, context: TransferContext) -> None:
        """Cut and register the arenas. Raises what `_register` raises."""
        self._timeout_s = context.timeout_s
        self._slot = context.piece_bytes
        count = max(context.held_bytes // self._slot, 1)
        self._out = self._arena(count)
        self._in = self._arena(RECEIVING)
        self._free = list(range(count))
        self._landing: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(RECEIVING):
            self._landing.put(slot)

    @abstractmethod
    def _register(self, address: int, size: int) -> None:
        """Let peers read this memory. Raises LoadError."""

    @abstractmethod
    def _read(self, peer: str, local: int, remote: int, size: int) -> None:
        """Read a peer's memory. Raises TransferFailed."""

    def hold(self, data: bytes) -> bytes | None:
        """Copy into a free slot; where it lies. None if all are taken."""
        if len(data) > self._slot:
            raise ValueError(f"{len(data)} bytes do not fit a slot of {self._slot}")
        if not self._free:
            return None
        slot = self._free.pop()
        self._out[slot, : len(data)] = np.frombuffer(data, np.uint8)
        return _PLACE.pack(address_of(self._out) + slot * self._slot, len(data))

    def drop(self, payload: bytes) -> None:
        """The slot is free again."""
        address, _ = _PLACE.unpack(payload)
        self._free.append((address - address_of(self._out)) // self._slot)

    def fetch(self, address: str, payload: bytes, size: int) -> bytes:
        """Read the peer's slot. Raises TransferFailed."""
        if len(payload) != _PLACE.size:
            raise TransferFailed(f"a place has {_PLACE.size} bytes and {len(payload)} came")
        place, length = _PLACE.unpack(payload)
        if length != size or size > self._slot:
            raise TransferFailed(f"{length} bytes are offered and {size} are wanted, at most {self._slot}")
        try:
            slot = self._landing.get(timeout=self._timeout_s)
        except queue.Empty:
            raise TransferFailed(f"no transfer ended within {self._timeout_s:g} s") from None
        try:
            self._read(address, address_of(self._in) + slot * self._slot, place, size)
            return self._in[slot, :size].tobytes()
        finally:
            self._landing.put(slot)

    def _arena(self, slots: int) -> npt.NDArray[np.uint8]:
        arena = np.zeros((slots, self._slot), np.uint8)
        self._register(address_of(arena), arena.nbytes)
        return arena


def address_of(arena: npt.NDArray[np.uint8]) -> int:
    """Where it lies in this process."""
    return int(arena.ctypes.data)
