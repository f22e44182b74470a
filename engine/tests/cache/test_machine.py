"""Churn through the whole loop over a tiny pool: every operation, in any order, with the books balanced after each.

Requests with shared prefixes come, are leased, aborted, retracted and evicted; pages go to the host and come back;
caches are flushed, leases renewed and lost. The oracle is a page of code: the tokens of a request computed alone.
A short form runs always; `make soak` sets BRANCHLINE_CACHE_OPS to 100,000 operations a policy.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from branchline.engine.cache import CacheEvent
from branchline.engine.errors import EngineError, ErrorCode
from branchline.engine.types import LeaseAsk, LeaseState, Request, SamplingParams
from harness import EOS, Engine
from tiny import expected

OPERATIONS = int(os.environ.get("BRANCHLINE_CACHE_OPS", "1500"))
POLICIES = ("lru", "lfu", "slru", "priority")
PAGE = 4


class Mirror:
    """What a gateway would know from the events alone."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()

    def take(self, batch_events: list[CacheEvent]) -> None:
        for event in batch_events:
            if event[0] == "stored":
                assert self.blocks.isdisjoint(event[2]), "stored twice"
                self.blocks.update(event[2])
            elif event[0] == "removed":
                assert self.blocks.issuperset(event[1]), "removed and not there"
                self.blocks.difference_update(event[1])
            else:
                self.blocks.clear()


class Machine:
    """One engine, what was asked of it, and what must hold after every operation."""

    def __init__(self, policy: str, seed: int, host: int) -> None:
        self.draw = random.Random(seed)
        self.engine = Engine(pages=24, page_size=PAGE, host=host, eviction=policy, max_running_requests=6)
        self.mirror = Mirror()
        self.engine.loop.subscribe_events(lambda batch: self.mirror.take(batch.events))
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()
        self.leases: list[str] = []
        self.granted = 0
        self.done: Counter[str] = Counter()
        self.number = 0

    def prompt(self) -> list[int]:
        """One of few stems, cut or continued: most requests share pages with some others."""
        stem = random.Random(self.draw.randrange(5))
        tokens = [stem.randrange(EOS) for _ in range(self.draw.randrange(4, 28))]
        return tokens + [self.draw.randrange(EOS) for _ in range(self.draw.choice([0, 0, 1, 9]))]

    def submit(self) -> None:
        self.number += 1
        name, tokens = f"r{self.number}", self.prompt()
        new = self.draw.randrange(0, 16)
        lease = None
        if self.draw.random() < 0.15:
            lease = LeaseAsk(tenant="t", ttl_ms=self.draw.randrange(50, 4000))
        elif self.leases and self.draw.random() < 0.3:
            lease = LeaseAsk(tenant="t", lease_id=self.draw.choice(self.leases))
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        request = Request(name, tuple(tokens), params, priority=self.draw.randrange(-2, 3), lease=lease)
        self.engine.loop.submit(request, self.take)
        self.prompts[name] = (tokens, new)

    def take(self, step: int, deltas: list) -> None:  # type: ignore[type-arg]
        for delta in deltas:
            if delta.lease is not None and delta.lease.lease_id:
                assert delta.lease.state is LeaseState.HELD
                self.leases.append(delta.lease.lease_id)
                self.granted += 1
        self.engine.take(step, deltas)

    def abort(self) -> None:
        name = f"r{self.draw.randint(max(1, self.number - 8), max(1, self.number))}"
        if self.engine.loop.abort(name):
            self.aborted.add(name)

    def renew(self) -> None:
        if self.leases:
            try:
                self.engine.loop.renew_lease(self.draw.choice(self.leases), "t", 2000)
            except EngineError as error:
                assert error.code is ErrorCode.NOT_FOUND

    def release(self) -> None:
        if self.leases:
            self.engine.loop.release_lease(self.leases.pop(self.draw.randrange(len(self.leases))), "t")

    def evict(self) -> None:
        evictable = self.engine.cache.counters()[1]
        wanted = self.draw.randrange(8)
        assert self.engine.cache.evict(wanted) == min(wanted, evictable)

    def match(self) -> None:
        tokens = self.prompt()
        node, pages = self.engine.cache.match(b"", tokens, len(tokens))
        assert len(pages) <= len(tokens) // PAGE
        self.engine.cache.lock(node)
        assert self.engine.cache.match(b"", tokens, len(tokens))[1][: len(pages)] == pages
        self.engine.cache.unlock(node)

    def fetch(self) -> None:
        tokens = self.prompt()
        before = len(self.engine.cache.match(b"", tokens, len(tokens))[1])
        came = self.engine.cache.fetch(b"", tokens, len(tokens))
        assert len(self.engine.cache.match(b"", tokens, len(tokens))[1]) == before + came

    def wait(self) -> None:
        self.engine.clock.now += self.draw.choice([0.01, 0.3, 3.0])

    def operate(self) -> None:
        """One operation, then everything that must hold."""
        loop = self.engine.loop
        operation = self.draw.choices(
            (self.submit, loop.step, self.abort, self.evict, self.match, self.fetch, self.wait, self.renew,
             self.release, loop.flush),
            (8, 30, 2, 3, 3, 3, 3, 1, 1, 0.3),
        )[0]  # fmt: skip
        operation()
        self.done[operation.__name__] += 1
        self.check()

    def check(self) -> None:
        engine, cache = self.engine, self.engine.cache
        counters, host = cache.counters(), cache.host_counters()
        assert sum(counters) == 24, "a page is nowhere or twice"
        cache.audit()
        loop = engine.loop
        loop._leases.audit()
        loop._publish()
        view = cache.view(0, 10_000, 0, loop._leases.nodes())
        on_device = sum(node.pages for node in view.nodes if not node.on_host)
        assert on_device == counters[1] + counters[2] and len(view.nodes) == view.nodes_total
        assert sum(node.pages for node in view.nodes if node.on_host) == host[1] <= host[0]
        assert len(self.mirror.blocks) == on_device + host[1], "the mirror has what is resident, on either tier"
        held = sum(node.pages for node in view.nodes if node.locks)
        assert held == counters[2] and all(node.leases <= node.locks for node in view.nodes)

    def finish(self) -> None:
        """Let everything end; each request that was not aborted says what it says alone."""
        for _ in range(20_000):
            self.engine.loop.step()
            if not self.engine.loop.busy:
                break
        self.engine.clock.now += 10_000.0
        self.engine.loop.step()
        assert self.engine.cache.counters()[2:] == (0, 0), "something is still held"
        for name, (tokens, new) in self.prompts.items():
            if name in self.engine.errors:
                assert self.engine.errors[name].code is ErrorCode.RESOURCE_EXHAUSTED
            elif name not in self.aborted:
                answer = self.engine.answers[name, 0]
                said = expected(tokens, new)
                assert answer.finish is not None
                assert answer.token_ids == said[: len(answer.token_ids)]
                assert len(answer.token_ids) == new or "pool" in answer.finish.message


@pytest.mark.timeout(60 + OPERATIONS // 50)
@pytest.mark.parametrize("host", [0, 10])
@pytest.mark.parametrize("policy", POLICIES)
def test_any_operations_keep_the_books_and_change_no_answer(policy: str, host: int) -> None:
    machine = Machine(policy, seed=POLICIES.index(policy) * 2 + (host > 0), host=host)
    for _ in range(OPERATIONS):
        machine.operate()
    machine.finish()
    stats = machine.engine.loop.stats()
    assert stats.hits > 0 and stats.retractions > 0 and machine.aborted and machine.granted
    if host:
        assert stats.host_stored_pages > 0 and stats.host_fetched_pages > 0
    assert min(machine.done.values()) > 0 and len(machine.done) == 10
