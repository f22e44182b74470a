"""What every radix cache backend must do, whichever pages it keeps."""

from __future__ import annotations

import random
from collections.abc import Callable

from branchline.engine.cache import CacheContext, RadixCacheBackend

Make = Callable[[CacheContext], RadixCacheBackend]
PAGES, SIZE = 24, 4


def _is_whole(cache: RadixCacheBackend) -> None:
    cache.audit()
    counters = cache.counters()
    assert sum(counters) == PAGES, f"{counters} pages of {PAGES}: free, evictable, protected, private"
    assert cache.available() == counters[0] + counters[1], "available is free plus evictable"


def _plant(cache: RadixCacheBackend, tokens: list[int], namespace: bytes = b"") -> list[int]:
    """Put whole pages into the tree, unless they are there; those that are not the tree's are freed."""
    count = len(tokens) // SIZE
    pages = cache.allocate(count)
    assert pages is not None and len(set(pages)) == count and all(0 <= page < PAGES for page in pages)
    _, present = cache.insert(namespace, tokens[: count * SIZE], pages)
    own = set(cache.match(namespace, tokens, len(tokens))[1])
    cache.free([page for page in pages[:present] if page not in own])
    return pages


def pages_are_conserved_through_any_operations(make: Make) -> None:
    """Free, evictable, protected and private pages are the pool at every moment."""
    cache = make(CacheContext(PAGES, SIZE))
    generator = random.Random(1)
    held: list[tuple[int, list[int]]] = []
    for _ in range(400):
        tokens = [generator.randrange(3) for _ in range(SIZE * generator.randint(1, 5))]
        match generator.randrange(5):
            case 0 if cache.available() >= len(tokens) // SIZE:
                _plant(cache, tokens)
            case 1:
                node, pages = cache.match(b"", tokens, len(tokens))
                cache.lock(node)
                held.append((node, pages))
            case 2 if held:
                cache.unlock(held.pop(generator.randrange(len(held)))[0])
            case 3:
                before = cache.counters()[1]
                dropped = cache.evict(2)
                assert 0 <= dropped <= min(2, before)
            case _:
                pages_or_none = cache.allocate(2)
                if pages_or_none is not None:
                    cache.free(pages_or_none)
        _is_whole(cache)
    for node, _ in held:
        cache.unlock(node)
    cache.flush()
    assert cache.counters() == (PAGES, 0, 0, 0)


def a_prefix_is_found_in_whole_pages_up_to_the_limit(make: Make) -> None:
    """Of what was inserted, in its own namespace only. A backend that does not share finds nothing, ever."""
    cache = make(CacheContext(PAGES, SIZE))
    tokens = list(range(4 * SIZE))
    pages = _plant(cache, tokens)
    for limit in range(len(tokens) + 3):
        _, found = cache.match(b"", [*tokens, 99, 98], limit)
        assert found == (pages[: min(limit, len(tokens)) // SIZE] if cache.shares else [])
    assert cache.match(b"other", tokens, len(tokens))[1] == []
    assert cache.match(b"", [7, *tokens], len(tokens))[1] == []
    _is_whole(cache)


def what_is_locked_is_not_evicted(make: Make) -> None:
    """And is evictable again once it is unlocked."""
    cache = make(CacheContext(PAGES, SIZE))
    tokens = list(range(3 * SIZE))
    _plant(cache, tokens)
    node, pages = cache.match(b"", tokens, len(tokens))
    cache.lock(node)
    cache.evict(PAGES)
    cache.flush()
    assert cache.match(b"", tokens, len(tokens))[1] == pages
    _is_whole(cache)
    cache.unlock(node)
    cache.flush()
    assert cache.match(b"", tokens, len(tokens))[1] == [] and cache.available() == PAGES


def an_allocation_that_can_not_be_had_changes_nothing(make: Make) -> None:
    """Even if a part of it could."""
    cache = make(CacheContext(PAGES, SIZE))
    kept = cache.allocate(PAGES - 2)
    assert kept is not None
    before = cache.counters()
    assert cache.allocate(3) is None and cache.counters() == before
    rest = cache.allocate(2)
    assert rest is not None and not set(rest) & set(kept)
    cache.free(kept)
    cache.free(rest)
    assert cache.counters() == (PAGES, 0, 0, 0)


def pages_freed_under_an_epoch_come_back_when_it_is_retired(make: Make) -> None:
    """Not before: a step that reads them may still run."""
    cache = make(CacheContext(PAGES, SIZE))
    pages = cache.allocate(PAGES)
    assert pages is not None
    cache.free(pages, epoch=7)
    assert cache.allocate(1) is None
    cache.retire(6)
    assert cache.allocate(1) is None
    cache.retire(7)
    assert cache.available() == PAGES


def events_add_up_to_the_snapshot(make: Make) -> None:
    """Blocks are told by their chained hashes, parents first when they come and children first when they go."""
    cache = make(CacheContext(PAGES, SIZE))
    resident: set[int] = set()
    generator = random.Random(2)
    for _ in range(60):
        tokens = [generator.randrange(2) for _ in range(SIZE * generator.randint(1, 4))]
        if cache.available() >= len(tokens) // SIZE:
            _plant(cache, tokens)
        cache.evict(generator.randrange(3))
        for event in cache.drain_events():
            if event[0] == "stored":
                assert len(event[3]) == SIZE * len(event[2])
                resident.update(event[2])
            elif event[0] == "removed":
                assert set(event[1]) <= resident
                resident.difference_update(event[1])
            else:
                resident.clear()
        assert resident == {block for event in cache.snapshot() for block in event[2]}
    tokens = list(range(2 * SIZE))
    assert len(cache.block_hashes(b"", tokens)) == 2
    assert cache.block_hashes(b"", tokens) != cache.block_hashes(b"x", tokens)


CHECKS = (
    pages_are_conserved_through_any_operations,
    a_prefix_is_found_in_whole_pages_up_to_the_limit,
    what_is_locked_is_not_evicted,
    an_allocation_that_can_not_be_had_changes_nothing,
    pages_freed_under_an_epoch_come_back_when_it_is_retired,
    events_add_up_to_the_snapshot,
)
