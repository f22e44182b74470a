"""The seam of `PageCache` and the hash functions."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from branchline import _native

NAMESPACE = _native.namespace(None, None, None, "v1")


def planted(cache: _native.PageCache, tokens: list[int], page_size: int = 4) -> int:
    pages = cache.allocate(len(tokens) // page_size)
    assert pages is not None
    node, present = cache.insert(NAMESPACE, tokens, pages)
    cache.free(pages[:present])
    return node


def test_a_request_finds_what_another_left() -> None:
    cache = _native.PageCache(16, 4)
    planted(cache, list(range(12)))
    node, pages = cache.match(NAMESPACE, list(range(12)), 11)
    assert pages == [0, 1]
    cache.lock(node)
    assert cache.counters() == (13, 1, 2, 0)
    assert cache.available() == 14
    cache.unlock(node)
    cache.audit()
    assert cache.match(_native.namespace("salt", None, None, "v1"), list(range(12)), 12) == (0, [])


def test_allocation_evicts_or_changes_nothing() -> None:
    cache = _native.PageCache(4, 4)
    planted(cache, list(range(8)))
    assert cache.allocate(5) is None
    assert cache.counters() == (2, 2, 0, 0)
    assert sorted(cache.allocate(3) or []) == [1, 2, 3]
    assert cache.counters() == (0, 1, 0, 3)


def test_frees_wait_for_their_epoch() -> None:
    cache = _native.PageCache(2, 4)
    pages = cache.allocate(2)
    assert pages is not None
    cache.free(pages, epoch=3)
    assert cache.counters() == (0, 0, 0, 2)
    cache.retire(2)
    assert cache.available() == 0
    cache.retire(3)
    assert cache.counters() == (2, 0, 0, 0)


def test_events_chain_hashes_and_match_block_hashes() -> None:
    cache = _native.PageCache(8, 2)
    planted(cache, [1, 2, 3, 4], page_size=2)
    hashes = _native.block_hashes(NAMESPACE, [1, 2, 3, 4, 5], 2)
    [(kind, root, stored, tokens)] = cache.snapshot()
    assert (kind, stored, tokens) == ("stored", hashes, [1, 2, 3, 4])
    assert cache.drain_events() == [("stored", root, hashes, [1, 2, 3, 4])]
    planted(cache, [1, 2, 9, 9], page_size=2)
    assert cache.drain_events() == [("stored", hashes[0], _native.block_hashes(NAMESPACE, [1, 2, 9, 9], 2)[1:], [9, 9])]
    assert cache.evict(1) == 1
    assert cache.drain_events() == [("removed", [hashes[1]])]
    assert cache.flush() == 2
    assert cache.drain_events() == [("cleared",)]
    assert cache.snapshot() == []


def test_without_sharing_the_caller_keeps_its_pages() -> None:
    cache = _native.PageCache(4, 2, share=False)
    pages = cache.allocate(2)
    assert pages is not None
    assert cache.insert(NAMESPACE, [1, 2, 3, 4], pages) == (0, 2)
    cache.lock(0)
    cache.unlock(0)
    cache.free(pages)
    assert cache.counters() == (4, 0, 0, 0)


def test_wrong_values_are_value_errors_that_name_them() -> None:
    for arguments, match in [((0, 4), "num_pages is 0"), ((4, 0), "page_size is 0")]:
        with pytest.raises(ValueError, match=match):
            _native.PageCache(*arguments)
    with pytest.raises(ValueError, match="the eviction policy has 3 entries"):
        _native.PageCache(4, 4, policy=[0, 1, 2])
    with pytest.raises(ValueError, match="ranks use level 1 with priority -128 below"):
        _native.PageCache(4, 4, policy=bytes([1] * 256 + [0] * 63 * 256))
    cache = _native.PageCache(4, 2)
    with pytest.raises(ValueError, match="node 77 does not exist"):
        cache.lock(77)
    node = planted(cache, [1, 2], page_size=2)
    with pytest.raises(ValueError, match="is not locked"):
        cache.unlock(node)
    with pytest.raises(ValueError, match="page 0 is not private"):
        cache.free([0])
    with pytest.raises(ValueError, match="page 9 does not exist"):
        cache.free([9])
    with pytest.raises(ValueError, match="pages has 1 entries for 4 tokens"):
        cache.insert(NAMESPACE, [1, 2, 3, 4], [1])
    for function in (_native.block_hashes,):
        with pytest.raises(ValueError, match="page_size is 0"):
            function(NAMESPACE, [1], 0)
    with pytest.raises(ValueError, match="page_size is 0"):
        _native.page_demand(0, 1, 0)
    cache.audit()
    assert cache.counters() == (3, 1, 0, 0)


@pytest.mark.parametrize("token_ids", [[-1], [2**32], ["x"], None, "ab", 3])
def test_wrong_ids_change_nothing(token_ids: Any) -> None:
    cache = _native.PageCache(4, 1)
    with pytest.raises((ValueError, TypeError)):
        cache.match(NAMESPACE, token_ids, 1)
    with pytest.raises((ValueError, TypeError)):
        cache.insert(NAMESPACE, token_ids, [0])
    with pytest.raises((ValueError, TypeError)):
        cache.free(token_ids)
    with pytest.raises((ValueError, TypeError)):
        _native.block_hashes(NAMESPACE, token_ids, 1)
    assert cache.counters() == (4, 0, 0, 0)


@pytest.mark.parametrize("count", [-1, 2**64])
def test_counts_out_of_range_are_overflow_errors(count: int) -> None:
    cache = _native.PageCache(4, 1)
    for call in (cache.allocate, cache.evict, cache.retire, cache.lock, cache.unlock):
        with pytest.raises(OverflowError):
            call(count)
    with pytest.raises(TypeError):
        cache.match("text", [1], 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        cache.allocate("1")  # type: ignore[arg-type]


def test_namespace_keeps_its_fields_apart() -> None:
    names = [
        _native.namespace("X", None, None, ""),
        _native.namespace(None, "X", None, ""),
        _native.namespace(None, None, "X", ""),
        _native.namespace(None, None, None, "X"),
        _native.namespace("", None, None, ""),
        _native.namespace(None, None, None, ""),
    ]
    assert len(set(names)) == 6


def test_page_demand_uses_the_partial_tail_first() -> None:
    rows = [(63, 64), (64, 65), (0, 64), (10, 200), (128, 128), (0, 1)]
    assert [_native.page_demand(prefix, length, 64) for prefix, length in rows] == [0, 1, 1, 3, 0, 1]


@pytest.mark.parametrize("make", [lambda ids: array("I", ids), lambda ids: np.array(ids * 2, np.uint32)[::2]])
def test_ids_in_an_array_are_read_whether_or_not_they_lie_in_a_row(make: Any) -> None:
    cache, ids = _native.PageCache(8, 4), [5, 6, 7, 8] * 2
    order = np.array(ids * 2)[::2].tolist() if isinstance(make(ids), np.ndarray) else ids
    planted(cache, order)
    assert cache.match(NAMESPACE, make(ids), 8)[1] == [0, 1]
    assert _native.block_hashes(NAMESPACE, make(ids), 4) == _native.block_hashes(NAMESPACE, order, 4)


def test_an_array_that_was_read_can_grow() -> None:
    cache, ids = _native.PageCache(8, 4), array("I", range(8))
    cache.match(NAMESPACE, ids, 8)
    cache.insert(NAMESPACE, ids, cache.allocate(2) or [])
    ids.append(8)  # a buffer that is still held would make this a BufferError
    assert cache.match(NAMESPACE, ids, 9)[1] == [0, 1]
    assert cache.match(NAMESPACE, array("I"), 9)[1] == []
