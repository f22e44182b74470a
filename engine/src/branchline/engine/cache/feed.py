"""Hands cache events to subscribers as a snapshot and then numbered batches.

Runs on the loop's thread, between steps: what the snapshot shows and what the next batch says meet without
a gap or an overlap. Owns no cache; a subscriber that raises is dropped and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from branchline.engine.cache.base import CacheEvent, RadixCacheBackend

MAX_TOKENS = 65_536  # of the stored blocks in one batch: well under 1 MiB on the wire
MAX_BLOCKS = 16_384

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events in order. `sequence` counts from 0 within a subscription, snapshot parts included, and has no gap."""

    epoch: int
    sequence: int
    snapshot: bool
    last: bool  # of the snapshot
    events: list[CacheEvent]


@dataclass(slots=True, eq=False)
class Subscription:
    """One subscriber and the number of its next batch."""

    callback: Callable[[EventBatch], None]
    epoch: int
    sequence: int = 0
    closed: bool = False


class EventFeed:
    """Subscribers of one cache. `epoch` numbers subscriptions upwards from the given start."""

    def __init__(self, cache: RadixCacheBackend, epoch: int, page_size: int) -> None:
        self._cache = cache
        self._epoch = epoch
        self._page_size = page_size
        self._subscriptions: list[Subscription] = []

    def publish(self) -> int:
        """Send what happened since the last call; how many pages were removed."""
        events = self._cache.drain_events()
        if not events:
            return 0
        self._broadcast(events)
        return sum(len(event[1]) for event in events if event[0] == "removed")

    def subscribe(self, callback: Callable[[EventBatch], None]) -> Subscription:
        """Send a snapshot, then register. An empty cache gives one empty snapshot batch."""
        self.publish()
        subscription = Subscription(callback, self._epoch)
        self._epoch += 1
        self._subscriptions.append(subscription)
        pieces = list(self._pieces(self._cache.snapshot())) or [[]]
        for piece in pieces:
            self._send(subscription, piece, snapshot=True, last=piece is pieces[-1])
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Idempotent."""
        subscription.closed = True
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def _broadcast(self, events: list[CacheEvent]) -> None:
        if not self._subscriptions:
            return
        for batch in self._pieces(events):
            for subscription in list(self._subscriptions):
                self._send(subscription, batch, snapshot=False, last=False)

    def _send(self, subscription: Subscription, events: list[CacheEvent], *, snapshot: bool, last: bool) -> None:
        if subscription.closed:
            return
        batch = EventBatch(subscription.epoch, subscription.sequence, snapshot, last, events)
        subscription.sequence += 1
        try:
            subscription.callback(batch)
        except Exception:
            logger.exception("kv event subscriber failed; it is dropped and has to subscribe again")
            self.unsubscribe(subscription)

    def _pieces(self, events: Sequence[CacheEvent]) -> Iterator[list[CacheEvent]]:
        """Cut into batches of bounded size; a long stored run is cut between blocks and re-parented."""
        piece: list[CacheEvent] = []
        tokens = blocks = 0
        for event in events:
            for part in self._parts(event):
                more_tokens = len(part[3]) if part[0] == "stored" else 0
                more_blocks = len(part[2]) if part[0] == "stored" else len(part[1]) if part[0] == "removed" else 0
                if piece and (tokens + more_tokens > MAX_TOKENS or blocks + more_blocks > MAX_BLOCKS):
                    yield piece
                    piece, tokens, blocks = [], 0, 0
                piece.append(part)
                tokens, blocks = tokens + more_tokens, blocks + more_blocks
        if piece:
            yield piece

    def _parts(self, event: CacheEvent) -> Iterator[CacheEvent]:
        if event[0] == "removed":
            for first in range(0, len(event[1]), MAX_BLOCKS):
                yield ("removed", event[1][first : first + MAX_BLOCKS])
        elif event[0] == "stored":
            size = self._page_size
            _, parent, hashes, tokens = event
            step = max(min(MAX_TOKENS // size, MAX_BLOCKS), 1)
            for first in range(0, len(hashes), step):
                run = hashes[first : first + step]
                yield ("stored", parent, run, tokens[first * size : (first + step) * size])
                parent = run[-1]
        else:
            yield event
