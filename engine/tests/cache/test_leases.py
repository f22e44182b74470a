"""Prefix leases: what is held cannot be evicted, budgets are kept, and nothing is held longer than agreed."""

from __future__ import annotations

import itertools
import random

import pytest
from branchline.engine.cache import CacheContext, RadixCacheBackend, build_cache
from branchline.engine.cache.leases import Budgets, LeaseBook
from branchline.engine.errors import InvalidArgument, NotFound, ResourceExhausted
from branchline.engine.types import LeaseState

SIZE = 4
A, B = list(range(100, 108)), list(range(200, 208))  # two whole pages each


def plant(cache: RadixCacheBackend, tokens: list[int]) -> None:
    pages = cache.allocate(len(tokens) // SIZE)
    assert pages is not None
    _, present = cache.insert(b"", tokens, pages)
    cache.free(pages[:present])


def made(pages: int = 8, worker: int = 4, tenant: int = 4, name: str = "native") -> tuple[RadixCacheBackend, LeaseBook]:
    cache = build_cache(name, CacheContext(pages, SIZE))
    numbers = itertools.count()
    return cache, LeaseBook(cache, SIZE, Budgets(worker, tenant), lambda: f"id{next(numbers)}")


@pytest.mark.parametrize("name", ["native", "reference"])
def test_a_leased_prefix_survives_eviction_until_it_is_released(name: str) -> None:
    cache, book = made(name=name)
    plant(cache, A)
    plant(cache, B)
    lease = book.grant("t", b"", A, 1000, 0.0)
    assert (lease.pages != (), book.pages, len(book)) == (True, 2, 1)
    assert cache.flush() == 2  # B's
    assert len(cache.match(b"", A, len(A))[1]) == 2
    assert book.release("id0", "t", 0.5)
    assert not book.release("id0", "t", 0.5)
    assert cache.flush() == 2
    assert cache.counters() == (8, 0, 0, 0)


def test_only_whole_pages_are_held() -> None:
    cache, book = made()
    plant(cache, A)
    lease = book.grant("t", b"", [*A, 1, 2], 1000, 0.0)
    assert lease.token_ids == tuple(A)


def test_a_lease_runs_out_when_it_said_and_renewing_moves_that() -> None:
    cache, book = made()
    plant(cache, A)
    book.grant("t", b"", A, 1000, 0.0)
    assert book.next_expiry_s == 1.0
    assert book.expire(0.999) == 0
    book.renew("id0", "t", 5000, 0.9)
    assert book.expire(1.5) == 0
    assert book.expire(5.9) == 1
    assert (len(book), book.pages, book.next_expiry_s) == (0, 0, None)
    with pytest.raises(NotFound, match="acquire a new one"):
        book.renew("id0", "t", 1000, 6.0)


def test_a_request_finds_its_lease_held_lost_or_unmatched() -> None:
    cache, book = made()
    plant(cache, A)
    book.grant("t", b"", A, 1000, 0.0)
    state, node = book.use("id0", "t", b"", [*A, 7], 0.1)
    assert state is LeaseState.HELD
    assert node is not None
    assert book.use("id0", "t", b"", B, 0.1) == (LeaseState.UNMATCHED, None)
    assert book.use("id0", "t", b"salt", A, 0.1) == (LeaseState.UNMATCHED, None)
    assert book.use("id0", "other", b"", A, 0.1) == (LeaseState.LOST, None)
    assert book.use("id9", "t", b"", A, 0.1) == (LeaseState.LOST, None)
    assert book.use("id0", "t", b"", A, 1.0) == (LeaseState.LOST, None)
    book.release("id0", "t", 0.2)
    assert cache.flush() == 0  # the request still holds it
    book.leave(node)
    assert cache.flush() == 2


def test_budgets_refuse_with_what_was_asked_and_what_is_held() -> None:
    cache, book = made(worker=4, tenant=2)
    plant(cache, A)
    plant(cache, B)
    book.grant("t", b"", A, 1000, 0.0)
    with pytest.raises(ResourceExhausted, match="your lease budget is 2 pages, 2 are held and 2 more") as refused:
        book.check("t", b"", B, 0.2)
    assert refused.value.retry_after_ms == 800
    book.grant("u", b"", A, 1000, 0.0)  # shared pages count once
    assert (book.pages, len(book)) == (2, 2)
    book.budgets = Budgets(3, 3)
    with pytest.raises(ResourceExhausted, match="worker's lease budget is 3 pages, 2 are held"):
        book.grant("v", b"", B, 1000, 0.0)


def test_a_cache_that_shares_nothing_has_nothing_to_lease() -> None:
    _, book = made(name="none")
    with pytest.raises(InvalidArgument, match="--disable-radix-cache"):
        book.check("t", b"", A, 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_counts_stay_those_of_the_live_leases_whatever_happens(seed: int) -> None:
    draw = random.Random(seed)
    cache, book = made(pages=64, worker=20, tenant=12)
    prompts = [[100 * which + at for at in range(SIZE * draw.randint(1, 6))] for which in range(8)]
    now, users, alive = 0.0, [], []
    for _ in range(2500):
        now += draw.random() * 0.05
        prompt, tenant = draw.choice(prompts), draw.choice("tu")
        action = draw.randrange(7)
        if action == 0:
            missing = len(prompt) // SIZE - len(cache.match(b"", prompt, len(prompt))[1])
            if missing and cache.available() >= len(prompt) // SIZE:
                plant(cache, prompt)
        elif action == 1 and len(cache.match(b"", prompt, len(prompt))[1]) * SIZE == len(prompt):
            try:
                alive.append((book.grant(tenant, b"", prompt, draw.randint(1, 2000), now).lease_id, tenant))
            except ResourceExhausted:
                pass
        elif action == 2 and alive:
            book.release(*draw.choice(alive), now)
        elif action == 3 and alive:
            one, whose = draw.choice(alive)
            state, node = book.use(one, whose, b"", prompt, now)
            assert (node is not None) == (state is LeaseState.HELD)
            if node is not None:
                users.append(node)
        elif action == 4 and users:
            book.leave(users.pop(draw.randrange(len(users))))
        elif action == 5:
            cache.evict(draw.randint(1, 8))
        else:
            book.expire(now)
        book.audit()
        cache.audit()
    for node in users:
        book.leave(node)
    book.clear()
    cache.flush()
    assert (book.pages, cache.counters()) == (0, (64, 0, 0, 0))
