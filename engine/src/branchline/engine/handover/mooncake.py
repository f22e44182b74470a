"""Mooncake's transfer engine as a KV transfer backend: the puller reads from the sender's memory, over TCP or RDMA.

Both sides own a registered arena cut into slots of equal size; a payload names a place in the sender's. Needs the
package mooncake-transfer-engine (or its -non-cuda form) and the system's libibverbs1.
"""

from __future__ import annotations

import os
import queue
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from branchline.engine.errors import LoadError
from branchline.engine.handover.base import TransferContext, TransferFailed

RECEIVING = 8  # transfers at one time
_PLACE = struct.Struct("<QQ")  # address, bytes


class MooncakeTransfer:
    """KvTransferBackend over `mooncake.engine.TransferEngine`, peer to peer: no metadata server."""

    api_version = 1
    inline = False

    def __init__(self, context: TransferContext) -> None:
        """Raises LoadError if the package or what it needs is not installed, or the network can't be used."""
        self._engine: Any = _engine(context)
        self._timeout_s = context.timeout_s
        self._slot = context.piece_bytes
        count = max(context.held_bytes // self._slot, 1)
        self._out = self._arena(count)
        self._in = self._arena(RECEIVING)
        self._free = list(range(count))
        self._landing: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(RECEIVING):
            self._landing.put(slot)
        self.address = f"{context.host}:{self._engine.get_rpc_port()}"

    def hold(self, data: bytes) -> bytes | None:
        """Copy into a free slot; where it lies. None if all are taken."""
        if len(data) > self._slot:
            raise ValueError(f"{len(data)} bytes do not fit a slot of {self._slot}")
        if not self._free:
            return None
        slot = self._free.pop()
        self._out[slot, : len(data)] = np.frombuffer(data, np.uint8)
        return _PLACE.pack(_address(self._out) + slot * self._slot, len(data))

    def drop(self, payload: bytes) -> None:
        """The slot is free again."""
        address, _ = _PLACE.unpack(payload)
        self._free.append((address - _address(self._out)) // self._slot)

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
            status = self._engine.transfer_sync_read(address, _address(self._in) + slot * self._slot, place, size)
            if status != 0:
                raise TransferFailed(f"mooncake could not read from {address}: status {status}")
            return self._in[slot, :size].tobytes()
        finally:
            self._landing.put(slot)

    def close(self) -> None:
        """Unregister both arenas."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.unregister_memory(_address(self._out))
            engine.unregister_memory(_address(self._in))

    def _arena(self, slots: int) -> npt.NDArray[np.uint8]:
        arena = np.zeros((slots, self._slot), np.uint8)
        status = self._engine.register_memory(_address(arena), arena.nbytes)
        if status != 0:
            raise LoadError(
                f"mooncake can't register {arena.nbytes} bytes (status {status}): lower kv-transfer-buffer",
                field="kv_transfer_backend",
            )
        return arena


def _engine(context: TransferContext) -> Any:
    os.environ.setdefault("GLOG_minloglevel", "2")  # errors only: its libraries tell a lot
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise LoadError(
            f"kv-transfer-backend mooncake can't be loaded ({error}): install mooncake-transfer-engine-non-cuda and "
            "the system's libibverbs1, or use --kv-transfer-backend stream",
            field="kv_transfer_backend",
        ) from None
    engine = TransferEngine()
    status = engine.initialize(context.host, "P2PHANDSHAKE", context.protocol, "")
    if status != 0:
        raise LoadError(
            f"mooncake can't use {context.protocol} at {context.host} (status {status}): give another "
            "--kv-transfer-protocol, or use --kv-transfer-backend stream",
            field="kv_transfer_backend",
        )
    return engine


def _address(arena: npt.NDArray[np.uint8]) -> int:
    return int(arena.ctypes.data)
