"""The built-in transfer: the bytes go in the hand-over's own gRPC stream. Needs nothing that serving does not.

Owns nothing but a count, so that a slow puller is not read far ahead of.
"""

from __future__ import annotations

from branchline.engine.handover.base import TransferContext


class StreamTransfer:
    """KvTransferBackend whose payloads are the bytes themselves."""

    api_version = 1
    address = ""
    inline = True

    def __init__(self, context: TransferContext) -> None:
        self._most = context.held_bytes
        self._held = 0

    def hold(self, data: bytes) -> bytes | None:
        """The bytes; None while others wait to be acknowledged that fill the window."""
        if self._held and self._held + len(data) > self._most:
            return None
        self._held += len(data)
        return data

    def drop(self, payload: bytes) -> None:
        """They have come over, or never will."""
        self._held -= len(payload)

    def fetch(self, address: str, payload: bytes, size: int) -> bytes:
        """The payload."""
        return payload

    def close(self) -> None:
        """Nothing is open."""
