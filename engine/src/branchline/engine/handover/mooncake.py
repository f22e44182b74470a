"""Mooncake's transfer engine as a KV transfer backend: the puller reads from the sender's memory, over TCP or RDMA.

Peer to peer, without a metadata server. Needs the package mooncake-transfer-engine (or its -non-cuda form) and the
system's libibverbs1.
"""

from __future__ import annotations

import os
from typing import Any

from branchline.engine.errors import LoadError
from branchline.engine.handover.base import TransferContext, TransferFailed
from branchline.engine.handover.slots import SlotTransfer, address_of


class MooncakeTransfer(SlotTransfer):
    """KvTransferBackend over `mooncake.engine.TransferEngine`."""

    def __init__(self, context: TransferContext) -> None:
        """Raises LoadError if the package or what it needs is not installed, or the network can't be used."""
        self._engine: Any = _engine(context)
        super().__init__(context)
        self.address = f"{context.host}:{self._engine.get_rpc_port()}"

    def _register(self, address: int, size: int) -> None:
        status = self._engine.register_memory(address, size)
        if status != 0:
            raise LoadError(
                f"mooncake can't register {size} bytes (status {status}): lower kv-transfer-buffer",
                field="kv_transfer_backend",
            )

    def _read(self, peer: str, local: int, remote: int, size: int) -> None:
        status = self._engine.transfer_sync_read(peer, local, remote, size)
        if status != 0:
            raise TransferFailed(f"mooncake could not read from {peer}: status {status}")

    def close(self) -> None:
        """Unregister both arenas."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.unregister_memory(address_of(self._out))
            engine.unregister_memory(address_of(self._in))


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
