"""NVIDIA's NIXL as a KV transfer backend: the puller reads from the sender's memory by way of UCX.

UCX takes the fastest network it finds: RDMA, shared memory or TCP. Needs the package nixl for the CUDA version at hand;
no GPU is used.
"""

from __future__ import annotations

import base64
import importlib
import threading
import time
import uuid
from typing import Any

from branchline.engine.errors import LoadError
from branchline.engine.handover.base import TransferContext, TransferFailed
from branchline.engine.handover.slots import SlotTransfer

MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
POLL_S = 0.0002


class NixlTransfer(SlotTransfer):
    """KvTransferBackend over a NIXL agent. `address` is the agent's own description, in base64."""

    def __init__(self, context: TransferContext) -> None:
        """Raises LoadError if the package is not installed or UCX can't start."""
        api = _api()
        try:
            config = api.nixl_agent_config(backends=["UCX"])
            self._agent: Any = api.nixl_agent(f"branchline-{uuid.uuid4().hex}", config)
        except Exception as error:
            raise LoadError(
                f"nixl can't start ({type(error).__name__}: {error}): use --kv-transfer-backend stream",
                field="kv_transfer_backend",
            ) from error
        self._registered: list[Any] = []
        self._peers: dict[str, str] = {}
        self._lock = threading.Lock()  # an agent is used by one thread at a time
        super().__init__(context)
        self.address = base64.b64encode(self._agent.get_agent_metadata()).decode()

    def _register(self, address: int, size: int) -> None:
        self._registered.append(self._agent.register_memory([(address, size, 0, "")], mem_type="DRAM"))

    def _read(self, peer: str, local: int, remote: int, size: int) -> None:
        try:
            with self._lock:
                handle = self._begin(peer, local, remote, size)
            self._finish(handle)
        except TransferFailed:
            raise
        except Exception as error:  # the library has many kinds
            raise TransferFailed(f"nixl could not read: {type(error).__name__}: {error}") from error

    def _begin(self, peer: str, local: int, remote: int, size: int) -> Any:
        agent = self._agent
        if peer not in self._peers:
            name = agent.add_remote_agent(base64.b64decode(peer))
            self._peers[peer] = name.decode() if isinstance(name, bytes) else name
        ours = agent.get_xfer_descs([(local, size, 0)], mem_type="DRAM")
        theirs = agent.get_xfer_descs([(remote, size, 0)], mem_type="DRAM")
        handle = agent.initialize_xfer("READ", ours, theirs, self._peers[peer])
        agent.transfer(handle)
        return handle

    def _finish(self, handle: Any) -> None:
        until = time.monotonic() + self._timeout_s
        try:
            while True:
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
                if state == "DONE":
                    return
                if state != "PROC":
                    raise TransferFailed(f"nixl could not read: state {state}")
                if time.monotonic() > until:
                    raise TransferFailed(f"nixl did not read within {self._timeout_s:g} s")
                time.sleep(POLL_S)
        finally:
            with self._lock:
                self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Forget the peers and the arenas."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            for name in self._peers.values():
                agent.remove_remote_agent(name)
            for registered in self._registered:
                agent.deregister_memory(registered)


def _api() -> Any:
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise LoadError(
        "kv-transfer-backend nixl can't be loaded: install the package nixl-cu12 or nixl-cu13, whichever CUDA is "
        "there, or use --kv-transfer-backend stream",
        field="kv_transfer_backend",
    )
