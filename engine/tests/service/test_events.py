"""Cache events over the wire: snapshot, numbering, slow subscribers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from branchline import _native
from branchline.engine.errors import ResourceExhausted
from branchline.engine.service import events
from branchline.engine.service.generated import engine_pb2 as pb
from served import PAGE, request, served, until

PROMPT = list(range(1, 1 + 4 * PAGE))


async def plant(engine: Any, name: str, prompt: list[int]) -> None:
    async for _ in engine.stub.Generate(request(name, prompt, max_tokens=0)):
        pass


async def test_snapshot_then_batches_without_a_gap_and_hashes_as_the_gateway_computes_them() -> None:
    async with served() as engine:
        await plant(engine, "a", PROMPT)
        call = engine.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(include_token_ids=True))
        first = await call.read()
        assert (first.sequence, first.snapshot, first.snapshot_end, first.page_size) == (0, True, True, PAGE)
        stored = first.events[0].stored
        space = _native.namespace(None, None, None, "v1")
        assert list(stored.block_hashes) == _native.block_hashes(space, PROMPT, PAGE)
        assert list(stored.token_ids) == PROMPT
        await plant(engine, "b", [9] * PAGE)
        await engine.stub.FlushCache(pb.FlushCacheRequest())
        numbers, kinds = [], set()
        while not kinds & {"removed", "cleared"}:
            batch = await call.read()
            assert batch.epoch == first.epoch and not batch.snapshot
            numbers.append(batch.sequence)
            kinds |= {event.WhichOneof("change") for event in batch.events}
        assert numbers == list(range(1, 1 + len(numbers)))
        assert "stored" in kinds
        call.cancel()


async def test_an_empty_cache_gives_one_empty_snapshot_and_ids_stay_out_unless_asked_for() -> None:
    async with served() as engine:
        call = engine.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        first = await call.read()
        assert first.snapshot_end and not first.events
        await plant(engine, "a", PROMPT)
        stored = (await call.read()).events[0].stored
        assert stored.block_hashes and not stored.token_ids
        call.cancel()


async def test_a_new_subscription_has_a_new_epoch() -> None:
    async with served() as engine:
        epochs = set()
        for _ in range(3):
            call = engine.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
            epochs.add((await call.read()).epoch)
            call.cancel()
        assert len(epochs) == 3


async def test_a_subscriber_that_does_not_read_is_ended_and_may_subscribe_again() -> None:
    async with served() as engine:
        slow = events.subscribe(engine.loop, PAGE, False, capacity=3)
        assert (await anext(slow)).snapshot
        for number in range(12):
            await plant(engine, f"r{number}", [number + 1] * PAGE)
        with pytest.raises(ResourceExhausted, match="subscribe again"):
            for _ in range(12):
                await anext(slow)
        again = events.subscribe(engine.loop, PAGE, False)
        snapshot = await anext(again)
        assert sum(len(event.stored.block_hashes) for event in snapshot.events) == 12
        await again.aclose()


async def test_leaving_ends_the_subscription() -> None:
    async with served() as engine:
        call = engine.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest())
        await call.read()
        call.cancel()
        feed = engine.loop._feed  # the only place that knows its subscribers
        await until(lambda: not feed._subscriptions)
        await asyncio.to_thread(engine.loop.audit)
