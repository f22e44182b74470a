"""Subscriptions to cache changes: a chunked snapshot, then numbered batches.

Owns epochs, sequence numbers and the bound of a subscription: a subscriber that does not read is ended, so
that it subscribes again and gets a fresh snapshot. Never slows the loop down.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence

from branchline.engine.errors import EngineError, ResourceExhausted
from branchline.engine.service import wire
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.outbox import Outbox
from branchline.engine.service.ports import Event, Loop

_MAX_BATCHES = 8192
_MAX_BYTES = 256 << 20  # a snapshot of a million pages with its token ids fits


class Epochs:
    """Numbers that never repeat, across restarts too: they start at the clock's microseconds."""

    def __init__(self) -> None:
        self._numbers = itertools.count(time.time_ns() // 1000)

    def next(self) -> int:
        """A fresh epoch."""
        return next(self._numbers)


async def subscribe(
    loop: Loop, epoch: int, page_size: int, include_token_ids: bool, capacity: int = _MAX_BATCHES
) -> AsyncIterator[pb.SubscribeKvEventsResponse]:
    """Batches until the caller leaves. Raises ResourceExhausted if it reads too slowly."""
    box: Outbox[pb.SubscribeKvEventsResponse] = Outbox(capacity, _too_slow, _MAX_BYTES)
    sequence = itertools.count()

    def deliver(events: Sequence[Event], snapshot: bool) -> None:
        if not box.is_open:
            return
        groups = list(wire.batches(wire.to_events(events, page_size, include_token_ids)))
        for position, group in enumerate(groups):
            if not group and not snapshot:
                continue
            box.put(
                pb.SubscribeKvEventsResponse(
                    epoch=epoch,
                    sequence=next(sequence),
                    snapshot=snapshot,
                    snapshot_end=snapshot and position == len(groups) - 1,
                    events=group,
                    page_size=page_size,
                )
            )

    def take(events: Sequence[Event], snapshot: bool) -> None:
        box.post(deliver, events, snapshot)

    token = loop.subscribe_events(take)
    try:
        while (message := await box.get()) is not None:
            yield message
    finally:
        box.close()
        loop.unsubscribe_events(token)


def _too_slow() -> EngineError:
    return ResourceExhausted("the subscriber did not read its events in time: subscribe again for a fresh snapshot")
