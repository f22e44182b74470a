"""Eviction policies: what each keeps, what a plugin's must be, and that evicting asks them nothing any more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from branchline import registry
from branchline.engine.cache import CacheContext, RadixCacheBackend, build_cache
from branchline.engine.cache.eviction import ranks, use_level
from branchline.registry import RegistryError, eviction_policies

POLICIES = ("lru", "lfu", "slru", "priority")
SHARING = ("native", "reference")
A, B, C, D = ([first] * 4 for first in (1, 2, 3, 4))


def plant(cache: RadixCacheBackend, tokens: list[int], priority: int = 0) -> None:
    """One page, unlocked."""
    pages = cache.allocate(1)
    assert pages is not None
    _, present = cache.insert(b"", tokens, pages, priority)
    cache.free(pages[:present])


def use(cache: RadixCacheBackend, tokens: list[int], priority: int = 0, times: int = 1) -> None:
    """Requests that begin on a prefix."""
    for _ in range(times):
        cache.credit(cache.match(b"", tokens, len(tokens))[0], priority)


def kept(cache: RadixCacheBackend) -> list[int]:
    """First tokens of what is left, without touching it."""
    return sorted(node.token_ids[0] for node in cache.view(0, 100, 1, []).nodes)


@pytest.fixture
def own() -> Iterator[registry.Registry[object]]:
    """The registry; what a test adds is taken out again."""
    before = dict(eviction_policies._entries)
    yield eviction_policies
    eviction_policies._entries.clear()
    eviction_policies._entries.update(before)


def test_the_policies_are_registered_and_listed() -> None:
    assert set(POLICIES) <= set(eviction_policies.names())
    assert eviction_policies in registry.all_registries()


@pytest.mark.parametrize("backend", SHARING)
@pytest.mark.parametrize(("policy", "left"), [("lru", [1, 4]), ("lfu", [2, 3]), ("slru", [3, 4]), ("priority", [1, 2])])
def test_each_policy_keeps_what_it_is_for(policy: str, left: list[int], backend: str) -> None:
    cache = build_cache(backend, CacheContext(4, 4, policy))
    plant(cache, A, priority=1)
    plant(cache, B, priority=2)
    plant(cache, C)
    plant(cache, D)
    if policy == "slru":  # only what was used again is protected
        use(cache, C)
        use(cache, D, times=9)
        use(cache, C)
    else:
        use(cache, B, times=3, priority=2)
        use(cache, C, times=2)
        use(cache, D)
        use(cache, A, priority=1)
    assert cache.evict(2) == 2
    assert kept(cache) == left
    cache.audit()


@pytest.mark.parametrize("backend", SHARING)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_takes_a_prefix_before_what_follows_it_nor_what_is_held(policy: str, backend: str) -> None:
    cache = build_cache(backend, CacheContext(8, 4, policy))
    plant(cache, A, priority=-5)
    pages = cache.allocate(2)
    assert pages is not None
    _, present = cache.insert(b"", [*A, *B], pages, 5)
    cache.free(pages[:present])
    use(cache, [*A, *B], times=7, priority=9)
    plant(cache, C, priority=9)
    held = cache.match(b"", C, 4)[0]
    cache.lock(held)
    assert cache.evict(1) == 1 and kept(cache) == [1, 3], "B goes, whatever it is worth beside A"
    assert cache.evict(9) == 1 and kept(cache) == [3]
    cache.unlock(held)
    assert cache.flush() == 1
    cache.audit()


def test_a_looked_up_prefix_is_not_a_used_one() -> None:
    cache = build_cache("native", CacheContext(4, 4, "lfu"))
    plant(cache, A)
    plant(cache, B)
    for _ in range(9):
        cache.match(b"", A, 4)
    use(cache, B)
    assert cache.evict(1) == 1 and kept(cache) == [2]


def test_levels_of_use_are_exact_and_then_double() -> None:
    assert [use_level(uses) for uses in (0, 1, 31, 32, 63, 64, 2**31, 2**40)] == [0, 1, 31, 32, 32, 33, 58, 63]
    assert ranks("lfu").of(40, 0) == 32 and ranks("slru").of(40, 0) == 1 and ranks("priority").of(0, 900) == 255


def test_a_plugin_may_rank_by_both(own: registry.Registry[object]) -> None:
    @own.register("both")
    class Both:
        def rank(self, uses: int, priority: int) -> int:
            """Use within four classes of priority."""
            return min(uses, 10) + 11 * ((priority + 128) // 64)

    for backend in SHARING:
        cache = build_cache(backend, CacheContext(4, 4, "both"))
        plant(cache, A, priority=100)
        plant(cache, B)
        plant(cache, C)
        use(cache, B, times=3)
        assert cache.evict(1) == 1 and kept(cache) == [1, 2]
        assert cache.evict(1) == 1 and kept(cache) == [1]


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (lambda self, uses, priority: 300, "the rank 300: give an integer from 0 to 255"),
        (lambda self, uses, priority: 0.5, "the rank 0.5"),
        (lambda self, uses, priority: max(9 - uses, 0), "use level 1 with priority -128 rank 8, less than"),
        (lambda self, uses, priority: int(priority < 3), "use level 0 with priority 3 rank 0"),
    ],
)
def test_a_plugin_whose_ranks_are_no_order_is_refused(rank: object, words: str, own: registry.Registry[object]) -> None:
    own.register("odd")(lambda: type("Odd", (), {"rank": rank})())
    with pytest.raises(RegistryError, match=r"eviction policy 'odd'") as refused:
        build_cache("native", CacheContext(4, 4, "odd"))
    assert words in str(refused.value)


def test_a_plugin_without_rank_is_refused_when_it_registers(own: registry.Registry[object]) -> None:
    with pytest.raises(RegistryError, match="does not conform to EvictionPolicy"):
        own.register("nothing")(type("Nothing", (), {}))


@pytest.mark.parametrize("backend", SHARING)
def test_a_view_tells_what_an_operator_asks_and_touches_nothing(backend: str) -> None:
    cache = build_cache(backend, CacheContext(8, 4))
    cache.tick(500)
    plant(cache, A)
    plant(cache, B)
    cache.tick(900)
    use(cache, A)
    node = cache.match(b"", B, 4)[0]
    cache.lock(node)
    cache.tick(2000)
    view = cache.view(0, 10, 2, [node])
    assert (view.next, view.nodes_total, view.namespaces_total) == (0, 2, 1)
    first, second = sorted(view.nodes, key=lambda shown: shown.token_ids)
    assert (first.token_ids, first.uses, first.age_ms, first.locks, first.leases) == ([1, 1], 1, 1100, 0, 0)
    assert (second.token_ids, second.uses, second.age_ms, second.locks, second.leases) == ([2, 2], 0, 1100, 1, 1)
    assert {shown.pages for shown in view.nodes} == {1} and first.namespace_hash == second.namespace_hash
    piece = cache.view(0, 1, 0, [])
    assert len(piece.nodes) == 1 and piece.next > 0 and piece.nodes[0].token_ids == []
    assert len(cache.view(piece.next, 1, 0, []).nodes) == 1
    cache.unlock(node)
    assert cache.evict(1) == 1 and kept(cache) == [2], "what was shown is still the older one"
