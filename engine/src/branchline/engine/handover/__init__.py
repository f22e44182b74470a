"""Prefill/decode hand-over: the pages of a prompt that one worker computes and another one decodes from.

`rooms` is the half that computes, `landing` the half that pulls; `stream`, `mooncake` and `nixl` are registered
transfer backends, imported when asked for. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Protocol

from branchline import _native, registry
from branchline.engine.cache import RadixCacheBackend
from branchline.engine.errors import LoadError
from branchline.engine.handover.base import (
    Counters,
    KvTransferBackend,
    PullAsk,
    Receiver,
    TransferContext,
    TransferFailed,
)
from branchline.engine.handover.landing import Landing, Landings
from branchline.engine.handover.rooms import RoomBook
from branchline.engine.types import PageExecutor, Request

__all__ = [
    "Handovers",
    "KvTransferBackend",
    "Landing",
    "PullAsk",
    "Puller",
    "Receiver",
    "TransferContext",
    "TransferFailed",
    "build_backends",
]

logger = logging.getLogger(__name__)

BUILT_IN = "stream"
registry.kv_transfer_backends.register_lazy(BUILT_IN, "branchline.engine.handover.stream:StreamTransfer", api_version=1)
registry.kv_transfer_backends.register_lazy(
    "mooncake", "branchline.engine.handover.mooncake:MooncakeTransfer", api_version=1
)
registry.kv_transfer_backends.register_lazy("nixl", "branchline.engine.handover.nixl:NixlTransfer", api_version=1)


class Puller(Protocol):
    """Brings a room's pages from another worker. Any thread."""

    def pull(self, host: str, port: int, ask: PullAsk, receiver: Receiver) -> Callable[[], None]:
        """Begin; what is returned ends it early."""


class Handovers:
    """Both halves of one worker. Loop's thread only, but for `puller`, which the service sets before it starts."""

    def __init__(
        self,
        cache: RadixCacheBackend,
        executor: PageExecutor,
        backends: dict[str, KvTransferBackend],
        timeout_s: float,
    ) -> None:
        self.counters = Counters()
        self.rooms = RoomBook(cache, executor, backends, self.counters, _native.checksum, timeout_s)
        self.landings = Landings(cache, executor, self.counters)
        self.backends = backends
        self.puller: Puller | None = None
        self._executor = executor

    def pages(self) -> set[int]:
        """Pages that are locked for hand-overs."""
        return self.rooms.pages() | self.landings.pages()

    def ask(self, request: Request, landing: Landing, hashes: list[int]) -> PullAsk:
        """What to ask the other half for."""
        own = self._executor
        assert request.handover is not None, "only requests with a hand-over are pulled"
        return PullAsk(
            request.handover.room,
            own.numerics_id,
            own.page_size,
            own.page_bytes,
            landing.wanted,
            hashes[landing.wanted - 1],
            len(landing.pages),
            tuple(self.backends),
        )

    def computed(self, request: Request, tokens: int) -> None:
        """So many tokens of a request are computed, their whole pages in the tree."""
        if request.handover is not None and request.handover.prefill:
            self.rooms.computed(request.request_id, min(tokens, len(request.token_ids)))

    def scheduled(self, request: Request) -> None:
        """A request runs: what has landed for it is its own now."""
        if request.handover is not None:
            self.landings.drop(request.request_id)

    def ended(self, request: Request, now: float) -> None:
        """A request is over, however it ended."""
        if request.handover is not None:
            self.landings.drop(request.request_id)
            self.rooms.ended(request.request_id, now)

    def close(self) -> None:
        """Close the backends."""
        for backend in self.backends.values():
            backend.close()


def build_backends(name: str, context: TransferContext) -> dict[str, KvTransferBackend]:
    """The backends to offer, the liked one first; the built-in one is always among them.

    `auto` is Mooncake where it is installed. Raises RegistryError or LoadError for a named one that does not work.
    """
    wanted = name
    if name == "auto":
        wanted = "mooncake" if importlib.util.find_spec("mooncake") is not None else BUILT_IN
    try:
        made = {wanted: _build(wanted, context)}
    except LoadError as error:
        if name != "auto":
            raise
        logger.warning("mooncake is installed and does not work here; pages go over gRPC: %s", error)
        made = {}
    if BUILT_IN not in made:
        made[BUILT_IN] = _build(BUILT_IN, context)
    return made


def _build(name: str, context: TransferContext) -> KvTransferBackend:
    factory = registry.kv_transfer_backends.get(name)
    backend = factory(context)
    registry.kv_transfer_backends.verify(name, backend)
    return backend  # type: ignore[return-value]
