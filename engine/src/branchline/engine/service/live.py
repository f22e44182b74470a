"""Which requests are alive and how many of their sequences still run. Event loop only.

Owns the rule that ids are unique among the worker's live requests, whatever stream they came over.
"""

from __future__ import annotations

from dataclasses import dataclass

from branchline.engine.errors import InvalidArgument
from branchline.engine.types import Delta, Request


@dataclass(slots=True)
class _Entry:
    handle: int
    owner: object
    remaining: int


class LiveRequests:
    """Live request ids with their owner (a stream) and the handle its deltas carry."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request, owner: object, handle: int) -> None:
        """Raises InvalidArgument if the id is taken."""
        if request.request_id in self._entries:
            raise InvalidArgument(
                f"request_id {request.request_id!r} is in use by a live request: choose another", field="request_id"
            )
        self._entries[request.request_id] = _Entry(handle, owner, request.sampling.n)

    def discard(self, request_id: str, owner: object) -> None:
        """Forget a request that the loop did not take."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.owner is owner:
            del self._entries[request_id]

    def note(self, delta: Delta, owner: object) -> tuple[int, bool] | None:
        """(handle, whether the request ends with this delta); None if the request is not this owner's any more."""
        entry = self._entries.get(delta.request_id)
        if entry is None or entry.owner is not owner:
            return None
        entry.remaining -= delta.finish is not None
        ended = delta.error is not None or entry.remaining <= 0
        if ended:
            del self._entries[delta.request_id]
        return entry.handle, ended

    def orphan(self, owner: object) -> list[str]:
        """The ids of an owner that is gone. They stay taken until their terminal deltas come."""
        return [request_id for request_id, entry in self._entries.items() if entry.owner is owner]
