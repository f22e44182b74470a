"""One behaviour suite for every radix cache backend, and a comparison of the native one with the oracle."""

from __future__ import annotations

import random

import pytest
from branchline import registry
from branchline.engine.cache import CacheContext, CacheEvent, RadixCacheBackend, build_cache
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cases.loader import case

ALL = ("native", "reference", "none")
SHARING = ("native", "reference")
POLICIES = ("lru", "lfu", "slru", "priority")


def build(name: str, pages: int = 8, page_size: int = 4) -> RadixCacheBackend:
    return build_cache(name, CacheContext(pages, page_size))


def plant(cache: RadixCacheBackend, tokens: list[int], page_size: int = 4, namespace: bytes = b"") -> list[int]:
    """Put whole pages of tokens into the tree, unlocked; what the tree had is given back. The pages taken."""
    pages = cache.allocate(len(tokens) // page_size)
    assert pages is not None
    _, present = cache.insert(namespace, tokens, pages)
    cache.free(pages[:present])
    return pages


@pytest.mark.parametrize("name", ALL)
def test_a_built_in_backend_is_found_by_name_and_conforms(name: str) -> None:
    assert name in registry.radix_cache_backends.names()
    cache = build(name)
    for member in ("match", "lock", "unlock", "allocate", "insert", "free", "retire", "evict", "flush", "audit"):
        assert callable(getattr(cache, member))
    assert cache.shares is (name != "none")


def test_an_unknown_backend_names_the_registering_call_and_what_there_is() -> None:
    with pytest.raises(registry.RegistryError, match=r"radix_cache_backends\.register") as refused:
        build("nativ")
    assert all(name in str(refused.value) for name in ALL)


@pytest.mark.parametrize(("pages", "size", "words"), [(0, 4, "num_pages is 0"), (4, 0, "page_size is 0")])
def test_an_empty_pool_is_refused(pages: int, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CacheContext(pages, size)


@pytest.mark.parametrize("name", SHARING)
def test_an_unknown_eviction_policy_is_refused(name: str) -> None:
    with pytest.raises(registry.RegistryError, match="unknown eviction policy 'mru'"):
        build_cache(name, CacheContext(8, 4, eviction="mru"))


@pytest.mark.parametrize("name", ALL)
def test_allocation_gives_distinct_pages_until_there_are_none(name: str) -> None:
    cache = build(name)
    first, second = cache.allocate(5), cache.allocate(3)
    assert first is not None and second is not None
    assert sorted(first + second) == list(range(8))
    assert cache.allocate(1) is None and cache.allocate(0) == []
    assert cache.counters() == (0, 0, 0, 8)
    cache.free(first)
    assert cache.available() == 5 and cache.counters() == (5, 0, 0, 3)
    cache.audit()


@pytest.mark.parametrize("name", ALL)
def test_a_failed_allocation_changes_nothing(name: str) -> None:
    cache = build(name)
    plant(cache, list(range(8)))
    before = cache.counters()
    assert cache.allocate(9) is None
    assert cache.counters() == before
    cache.audit()


@pytest.mark.parametrize("name", ALL)
def test_a_page_is_freed_once_and_only_by_its_owner(name: str) -> None:
    cache = build(name)
    pages = cache.allocate(2)
    assert pages is not None
    cache.free(pages[:1])
    for wrong in (pages[:1], [pages[1], pages[1]], [7], [99]):
        with pytest.raises(ValueError):
            cache.free(wrong)
    assert cache.counters() == (7, 0, 0, 1)
    cache.audit()


@pytest.mark.parametrize("name", ALL)
def test_a_free_waits_for_its_epoch(name: str) -> None:
    cache = build(name)
    pages = cache.allocate(8)
    assert pages is not None
    cache.free(pages[:4], 3)
    assert cache.counters() == (0, 0, 0, 8) and cache.allocate(1) is None
    cache.retire(2)
    assert cache.available() == 0
    cache.retire(3)
    assert cache.counters() == (4, 0, 0, 4)
    cache.free(pages[4:], 3)
    assert cache.counters() == (8, 0, 0, 0), "an epoch that is over takes effect at once"
    cache.audit()


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("limit", range(14))
def test_a_match_is_in_whole_pages_and_within_its_limit(name: str, limit: int) -> None:
    cache = build(name)
    pages = plant(cache, list(range(12)))
    _, found = cache.match(b"", [*range(12), 50], limit)
    assert found == pages[: min(limit, 12) // 4]


@pytest.mark.parametrize("name", ALL)
def test_namespaces_never_meet(name: str) -> None:
    cache = build(name)
    plant(cache, list(range(8)), namespace=b"one")
    for other in (b"", b"two", b"onee"):
        assert cache.match(other, list(range(8)), 8)[1] == []


@pytest.mark.parametrize("name", SHARING)
def test_duplicates_stay_with_their_owner(name: str) -> None:
    cache = build(name)
    plant(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    pages = cache.allocate(3)
    assert pages is not None
    node, present = cache.insert(b"", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], pages)
    assert present == 2
    cache.lock(node)
    assert cache.counters() == (3, 0, 3, 2)
    cache.free(pages[:2])
    with pytest.raises(ValueError):
        cache.free(pages[2:])
    cache.unlock(node)
    assert cache.counters() == (5, 3, 0, 0)
    cache.audit()


def test_without_a_tree_every_inserted_page_stays_its_owners() -> None:
    cache = build("none")
    pages = cache.allocate(2)
    assert pages is not None
    assert cache.insert(b"", list(range(8)), pages)[1] == 2
    assert cache.match(b"", list(range(8)), 8) == (0, [])
    assert cache.evict(3) == cache.flush() == 0 and cache.drain_events() == cache.snapshot() == []
    cache.free(pages)
    assert cache.counters() == (8, 0, 0, 0)


@pytest.mark.parametrize("name", SHARING)
def test_a_lock_protects_the_whole_path_and_locks_count(name: str) -> None:
    cache = build(name)
    plant(cache, list(range(12)))
    node, pages = cache.match(b"", list(range(8)), 8)
    cache.lock(node)
    cache.lock(node)
    assert cache.evict(9) == 1, "only the page behind the lock goes"
    cache.unlock(node)
    assert cache.evict(9) == 0
    assert cache.match(b"", list(range(8)), 8)[1] == pages
    cache.unlock(node)
    assert cache.flush() == 2 and cache.counters() == (8, 0, 0, 0)


@pytest.mark.parametrize("name", SHARING)
def test_allocation_evicts_the_least_recently_used_leaf_first(name: str) -> None:
    cache = build(name, pages=4)
    for start in (0, 100, 200, 300):
        plant(cache, list(range(start, start + 4)))
    cache.match(b"", list(range(4)), 4)
    assert cache.allocate(2) is not None
    assert [len(cache.match(b"", list(range(start, start + 4)), 4)[1]) for start in (0, 100, 200, 300)] == [1, 0, 0, 1]


@pytest.mark.parametrize("name", SHARING)
def test_cache_events_on_node_split(name: str) -> None:
    steps = case("cache-events-on-node-split")["right"]["events"]
    cache = build(name)
    first, second = list(range(1, 13)), [1, 2, 3, 4, 5, 6, 7, 8, 99, 98, 97, 96]
    hashes, others = cache.block_hashes(b"", first), cache.block_hashes(b"", second)
    plant(cache, first)
    stored = [hash_ for event in cache.drain_events() if event[0] == "stored" for hash_ in event[2]]
    assert stored == hashes and len(steps[0]) == len(stored)
    plant(cache, second)
    assert cache.drain_events() == [("stored", hashes[1], [others[2]], [99, 98, 97, 96])]
    assert cache.evict(1) == 1
    assert cache.drain_events() == [("removed", [hashes[2]])]


@pytest.mark.parametrize("name", SHARING)
def test_cache_block_hash_is_chained(name: str) -> None:
    given = case("cache-block-hash-is-chained")["given"]
    cache = build(name)
    plant(cache, given["tokens"])
    plant(cache, given["other"])
    events = cache.drain_events()
    hashes = {hash_ for event in events if event[0] == "stored" for hash_ in event[2]}
    assert len(hashes) == 4
    assert set(cache.block_hashes(b"", given["tokens"]) + cache.block_hashes(b"", given["other"])) == hashes
    snapshot = {hash_: event[1] for event in cache.snapshot() for hash_ in event[2][:1]}
    assert set(snapshot) <= hashes


@pytest.mark.parametrize("name", SHARING)
def test_a_snapshot_names_parents_first_and_all_that_is_resident(name: str) -> None:
    cache = build(name, pages=64)
    generator = random.Random(1)
    for _ in range(12):
        plant(cache, [generator.randrange(2) for _ in range(12)])
    seen: set[int] = set()
    parents: set[int] = set()
    for _, parent, hashes, tokens in cache.snapshot():
        assert len(tokens) == 4 * len(hashes)
        parents.add(parent)
        assert parent in seen or not seen & {parent}
        seen.update(hashes)
    assert len(parents - seen) == 1, "only the namespace's root is no block"
    assert len(seen) == cache.counters()[1]


class Content:
    """What an executor would hold: each page's whole prefix, in both tiers."""

    def __init__(self, pages: int, host: int) -> None:
        self.device: list[list[int] | None] = [None] * pages
        self.host: list[list[int] | None] = [None] * host

    def move(self, cache: RadixCacheBackend) -> None:
        for store, page, slot in cache.drain_moves():
            if store:
                self.host[slot], self.device[page] = self.device[page], None
            else:
                self.device[page], self.host[slot] = self.host[slot], None

    def write(self, cache: RadixCacheBackend, pages: list[int], tokens: list[int], size: int) -> None:
        self.move(cache)
        for number, page in enumerate(pages):
            self.device[page] = tokens[: (number + 1) * size]

    def check(self, cache: RadixCacheBackend, pages: list[int], tokens: list[int], size: int) -> None:
        self.move(cache)
        for number, page in enumerate(pages):
            assert self.device[page] == tokens[: (number + 1) * size], "a page has another prefix's content"


class Pair(RuleBasedStateMachine):
    """The same operations on the native backend and on the oracle; pages are mapped, not compared."""

    @initialize(
        pages=st.integers(1, 12), size=st.integers(1, 3), policy=st.sampled_from(POLICIES), host=st.integers(0, 6)
    )
    def begin(self, pages: int, size: int, policy: str, host: int) -> None:
        self.size, self.total = size, pages
        self.caches = [build_cache(name, CacheContext(pages, size, policy, host)) for name in SHARING]
        self.content = [Content(pages, host) for _ in SHARING]
        self.held: list[tuple[list[int], list[int]]] = []  # private pages of both
        self.locked: list[tuple[int, int]] = []
        self.resident: list[set[tuple[int, ...]]] = [set(), set()]
        self.paths: list[dict[int, tuple[int, ...]]] = [{}, {}]
        self.epoch = 0

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        first, second = (cache.allocate(count) for cache in self.caches)
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert len(set(first)) == len(set(second)) == count
            self.held.append((first, second))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), later=st.booleans())
    def free(self, data: st.DataObject, later: bool) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.epoch += later
        for cache, mine in zip(self.caches, pages, strict=True):
            cache.free(mine, self.epoch if later else 0)

    @rule()
    def retire(self) -> None:
        for cache in self.caches:
            cache.retire(self.epoch)

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=9), limit=st.integers(0, 9), hold=st.booleans(),
        priority=st.none() | st.integers(-2, 2),
    )  # fmt: skip
    def match(self, tokens: list[int], limit: int, hold: bool, priority: int | None) -> None:
        found = [cache.match(b"", tokens, limit) for cache in self.caches]
        assert len(found[0][1]) == len(found[1][1])
        for number, (_, pages) in enumerate(found):
            self.content[number].check(self.caches[number], pages, tokens, self.size)
        if priority is not None:
            for cache, (node, _) in zip(self.caches, found, strict=True):
                cache.credit(node, priority)
        if hold:
            for cache, (node, _) in zip(self.caches, found, strict=True):
                cache.lock(node)
            self.locked.append((found[0][0], found[1][0]))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        nodes = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        for cache, node in zip(self.caches, nodes, strict=True):
            cache.unlock(node)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), hold=st.booleans(), priority=st.integers(-2, 2))
    def insert(self, data: st.DataObject, hold: bool, priority: int) -> None:
        both = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        count = len(both[0])
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=count * self.size, max_size=count * self.size))
        results = [cache.insert(b"", tokens, pages, priority) for cache, pages in zip(self.caches, both, strict=True)]
        assert results[0][1] == results[1][1]
        for number, pages in enumerate(both):
            self.content[number].write(self.caches[number], pages, tokens, self.size)
        rest = results[0][1]
        if rest:
            self.held.append((both[0][:rest], both[1][:rest]))
        if hold and count:
            for cache, (node, _) in zip(self.caches, results, strict=True):
                cache.lock(node)
            self.locked.append((results[0][0], results[1][0]))

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        assert len({cache.evict(count) for cache in self.caches}) == 1

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), limit=st.integers(0, 9))
    def fetch(self, tokens: list[int], limit: int) -> None:
        assert len({cache.fetch(b"", tokens, limit) for cache in self.caches}) == 1

    @rule()
    def flush(self) -> None:
        assert len({cache.flush() for cache in self.caches}) == 1

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "caches"):
            return
        counters = [cache.counters() for cache in self.caches]
        assert counters[0] == counters[1] and sum(counters[0]) == self.total
        assert self.caches[0].available() == self.caches[1].available() == counters[0][0] + counters[0][1]
        for number, cache in enumerate(self.caches):
            cache.audit()
            self.content[number].move(cache)
            self.follow(number, cache.drain_events())
        assert self.resident[0] == self.resident[1]
        host = [cache.host_counters() for cache in self.caches]
        assert host[0] == host[1]
        assert len(self.resident[0]) == counters[0][1] + counters[0][2] + host[0][1]

    def follow(self, number: int, events: list[CacheEvent]) -> None:
        """Apply events; hashes differ between the two, so blocks are named by their whole path."""
        paths, resident = self.paths[number], self.resident[number]
        for event in events:
            if event[0] == "stored":
                path = paths.get(event[1], ())
                for at, hash_ in enumerate(event[2]):
                    path = (*path, *event[3][at * self.size : (at + 1) * self.size])
                    assert path not in resident
                    paths[hash_] = path
                    resident.add(path)
            elif event[0] == "removed":
                resident.difference_update(paths[hash_] for hash_ in event[1])
            else:
                resident.clear()


Pair.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNativeAgainstReference = Pair.TestCase
