"""What a KV transfer backend is: the protocol, its build context, and the values of one hand-over.

A backend moves bytes between two processes; it knows nothing of pages, requests or torch. Who may have which bytes,
and for how long, is decided in rooms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from branchline.engine.errors import EngineError

FIELD = "disaggregation"
"""The field that errors of a hand-over name, so that a gateway can tell them from the request's own faults."""


class TransferFailed(Exception):
    """Bytes could not be moved; the message says why."""


@dataclass(frozen=True, slots=True)
class TransferContext:
    """All that a backend's factory may know."""

    host: str  # the address that peers reach this process at
    held_bytes: int  # most that is held for peers at one time
    piece_bytes: int  # most in one `hold`
    timeout_s: float = 30.0  # of one fetch
    protocol: str = "tcp"  # or rdma


class KvTransferBackend(Protocol):
    """Moves bytes to a peer that asks for them. A factory raises LoadError if it can't work on this machine."""

    api_version: int
    address: str
    """Where peers fetch from, in the backend's own words; empty if it needs none."""
    inline: bool
    """Whether `hold` gives the bytes themselves, so that `fetch` never waits."""

    def hold(self, data: bytes) -> bytes | None:
        """Keep bytes until `drop`; what a peer needs to fetch them, or None if too much is held. Loop's thread."""

    def drop(self, payload: bytes) -> None:
        """Nobody fetches this any more. Loop's thread."""

    def fetch(self, address: str, payload: bytes, size: int) -> bytes:
        """The bytes that a peer holds. May wait, on any thread but the loop's. Raises TransferFailed."""

    def close(self) -> None:
        """Release memory and connections; idempotent."""


@dataclass(frozen=True, slots=True)
class PullAsk:
    """Which prompt's pages a puller wants, and what both sides must agree on."""

    room: int
    numerics_id: str
    page_size: int
    page_bytes: int
    pages: int  # wanted, from the prompt's start
    last_hash: int  # of the last of them
    skip: int = 0  # leading ones that the puller has
    backends: tuple[str, ...] = ("stream",)


@dataclass(frozen=True, slots=True)
class Pages:
    """A run of pages on its way: `payload` is what the backend made of their bytes."""

    first: int
    count: int
    payload: bytes
    checksum: int


class Sender(Protocol):
    """Takes what a room has for its puller. Called on the loop's thread; must not block."""

    def accepted(self, backend: str, address: str) -> None:
        """The room is there."""

    def pages(self, pages: Pages) -> None:
        """Some pages, in order."""

    def ended(self, pages: int) -> None:
        """All were sent."""

    def failed(self, error: EngineError) -> None:
        """Nothing more will come."""


class Receiver(Protocol):
    """Takes what a pull brings. May be called on any thread."""

    def pages(self, first: int, count: int, data: bytes, done: Callable[[], None]) -> None:
        """Checked bytes of some pages, in order; `done` once they are in the cache."""

    def ended(self) -> None:
        """All have come."""

    def failed(self, error: EngineError) -> None:
        """Nothing more will come."""


@dataclass(slots=True)
class Counters:
    """Sums since the start, but for `rooms` and `pulls`, which are as of now."""

    rooms: int = 0
    pulls: int = 0
    sent_pages: int = 0
    received_pages: int = 0
    failed_pulls: int = 0
    expired_rooms: int = 0
    received_bytes: int = 0
