"""Event batches are bounded, numbered and re-parented where a run of blocks is cut."""

from __future__ import annotations

import pytest
from branchline.engine.cache import CacheContext, build_cache, feed
from branchline.engine.cache.feed import EventBatch, EventFeed


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_TOKENS", 8)
    monkeypatch.setattr(feed, "MAX_BLOCKS", 3)


def planted(pages: int) -> tuple[EventFeed, list[int], object]:
    cache = build_cache("native", CacheContext(32, 4))
    tokens = list(range(pages * 4))
    taken = cache.allocate(pages)
    assert taken is not None
    cache.insert(b"", tokens, taken)
    return EventFeed(cache, epoch=9, page_size=4), cache.block_hashes(b"", tokens), cache


@pytest.mark.usefixtures("small")
def test_a_long_snapshot_comes_in_bounded_parts_and_only_the_last_says_so() -> None:
    subscribers, hashes, _ = planted(7)
    batches: list[EventBatch] = []
    subscribers.subscribe(batches.append)
    assert [batch.sequence for batch in batches] == [0, 1, 2, 3]
    assert [batch.last for batch in batches] == [False, False, False, True]
    parts = [event for batch in batches for event in batch.events]
    assert [len(part[3]) for part in parts if part[0] == "stored"] == [8, 8, 8, 4]
    assert [hash_ for part in parts if part[0] == "stored" for hash_ in part[2]] == hashes
    assert [part[1] for part in parts if part[0] == "stored"][1:] == [hashes[1], hashes[3], hashes[5]]
    assert [token for part in parts if part[0] == "stored" for token in part[3]] == list(range(28))


@pytest.mark.usefixtures("small")
def test_many_removals_come_in_bounded_batches() -> None:
    subscribers, hashes, cache = planted(7)
    batches: list[EventBatch] = []
    subscribers.subscribe(batches.append)
    del batches[:]
    assert cache.flush() == 7  # type: ignore[attr-defined]
    assert subscribers.publish() in (0, 7), "a wholly emptied tree may be told as cleared"
    assert all(len(event[1]) <= 3 for batch in batches for event in batch.events if event[0] == "removed")
    gone = {hash_ for batch in batches for event in batch.events if event[0] == "removed" for hash_ in event[1]}
    cleared = any(event[0] == "cleared" for batch in batches for event in batch.events)
    assert cleared or gone == set(hashes)


def test_an_empty_cache_gives_one_empty_last_snapshot() -> None:
    cache = build_cache("none", CacheContext(4, 4))
    subscribers = EventFeed(cache, epoch=1, page_size=4)
    batches: list[EventBatch] = []
    subscription = subscribers.subscribe(batches.append)
    assert batches == [EventBatch(1, 0, True, True, [])]
    subscribers.unsubscribe(subscription)
    subscribers.unsubscribe(subscription)


def test_publishing_counts_what_was_removed_even_with_no_subscriber() -> None:
    subscribers, _, cache = planted(5)
    subscribers.publish()
    assert cache.evict(2) == 2  # type: ignore[attr-defined]
    assert subscribers.publish() == 2
    assert subscribers.publish() == 0
