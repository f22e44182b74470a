"""Subscriptions to cache changes on the wire: a chunked snapshot, then numbered batches.

Owns the bound of a subscription: a subscriber that does not read is ended, so that it subscribes again and
gets a fresh snapshot. Numbers and pieces are the feed's (cache/feed.py). Never slows the loop down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from branchline.engine.cache.feed import EventBatch
from branchline.engine.errors import EngineError, ResourceExhausted
from branchline.engine.loop import EngineLoop
from branchline.engine.service import wire
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.outbox import Outbox

MAX_BATCHES = 8192
MAX_BYTES = 256 << 20  # a snapshot of a million pages with its token ids fits


async def subscribe(
    loop: EngineLoop, page_size: int, include_token_ids: bool, capacity: int = MAX_BATCHES
) -> AsyncGenerator[pb.SubscribeKvEventsResponse]:
    """Batches until the caller leaves. Raises ResourceExhausted if it reads too slowly."""
    box: Outbox[pb.SubscribeKvEventsResponse] = Outbox(capacity, _too_slow, MAX_BYTES)

    def deliver(batch: EventBatch) -> None:
        if box.is_open:
            box.put(wire.to_events(batch, page_size, include_token_ids))

    # Subscribing waits for the end of a step, so it must not wait on the event loop.
    unsubscribe = await asyncio.to_thread(loop.subscribe_events, lambda batch: box.post(deliver, batch))
    try:
        while (message := await box.get()) is not None:
            yield message
    finally:
        box.close()
        unsubscribe()


def _too_slow() -> EngineError:
    return ResourceExhausted("the subscriber did not read its events in time: subscribe again for a fresh snapshot")
