"""Two real servers: one computes prompts, the other one pulls their pages and decodes. Wrong pages show in tokens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
from adapters import save_adapter, save_llama
from branchline.engine.model.load import inspect_model
from branchline.engine.service.adapters import AdapterBook
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.types import ForwardBatch
from harness import EOS, tokenizer_json
from served import PAGE, Served, changed, contract_error, request, served, tokens, until
from tiny import VOCAB, TinyExecutor, expected

PROMPT = [(7 * at) % 90 for at in range(43)]
WHOLE = (len(PROMPT) - 1) // PAGE


@contextlib.asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[Served, Served]]:
    """A prefill and a decode worker; nothing may be held at the end."""
    given = {"prefill": {}, "decode": {}, **options}
    async with (
        served(**{"model": changed(role="prefill"), **given["prefill"]}) as prefill,
        served(**{"model": changed(role="decode"), **given["decode"]}) as decode,
    ):
        yield prefill, decode
        # A room that nobody came to, and a fetch that was under way at an abort, hold their pages for up to 30 s.
        await prefill.idle(45.0)
        await decode.idle(45.0)


def half_of_prefill(room: int, request_id: str = "p", prompt: list[int] = PROMPT) -> pb.GenerateRequest:
    message = request(request_id, prompt, max_tokens=0)
    message.disaggregation.CopyFrom(pb.Disaggregation(bootstrap_room=room, half=pb.DISAGGREGATION_HALF_PREFILL))
    return message


def half_of_decode(prefill: Served, room: int, request_id: str = "d", **sampling: Any) -> pb.GenerateRequest:
    message = request(request_id, sampling.pop("prompt", PROMPT), **sampling)
    message.disaggregation.CopyFrom(
        pb.Disaggregation(
            bootstrap_host="127.0.0.1",
            bootstrap_port=prefill.server.port,
            bootstrap_room=room,
            half=pb.DISAGGREGATION_HALF_DECODE,
        )
    )
    return message


async def answer(engine: Served, message: pb.GenerateRequest) -> list[pb.SequenceDelta]:
    return [delta async for part in engine.stub.Generate(message) for delta in part.deltas]


async def refusal(engine: Served, message: pb.GenerateRequest) -> pb.Error:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer(engine, message)
    return contract_error(caught.value)


async def both(prefill: Served, decode: Served, **sampling: Any) -> list[pb.SequenceDelta]:
    """What the decode half of a pair says."""
    _, deltas = await asyncio.gather(
        answer(prefill, half_of_prefill(9)), answer(decode, half_of_decode(prefill, 9, **sampling))
    )
    return deltas


def held_at_step(engine: Served, number: int) -> threading.Event:
    """Lets an engine wait before a step until the event is set."""
    gate, go_on = threading.Event(), engine.executor.run

    def run(batch: ForwardBatch) -> Any:
        if engine.executor.steps == number:
            assert gate.wait(20), "the test goes on before"
        return go_on(batch)

    engine.executor.run = run  # type: ignore[method-assign]
    return gate


async def settled(prefill: Served) -> None:
    """Give up rooms that the test left full."""
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def expire() -> None:
        prefill.handovers.rooms.expire(float("inf"))
        loop.call_soon_threadsafe(done.set)

    prefill.loop.post(expire)
    await done.wait()


async def test_a_pair_answers_as_one_worker_does_and_computes_the_prompt_once() -> None:
    async with pair() as (prefill, decode):
        deltas = await both(prefill, decode)
        assert tokens(deltas) == expected(PROMPT, 8)
        assert deltas[0].prompt.cached_tokens == WHOLE * PAGE
        assert decode.executor.computed_tokens == len(PROMPT) - WHOLE * PAGE + 7
        assert decode.handovers.counters.received_pages == prefill.handovers.counters.sent_pages == WHOLE


async def test_pages_of_an_adapter_are_for_the_same_weights_alone(tmp_path: Path) -> None:
    spec = inspect_model(str(save_llama(tmp_path / "base", tokenizer_json(), VOCAB, EOS))).spec
    for name, seed in (("one", 1), ("two", 2)):
        save_adapter(tmp_path / name, targets=["q_proj"], seed=seed)

    def book(executor: TinyExecutor) -> AdapterBook:
        return AdapterBook(executor, "tiny", spec, limit=2, max_rank=8)

    async with pair(
        prefill={"model": changed(role="prefill"), "book": book}, decode={"model": changed(role="decode"), "book": book}
    ) as (prefill, decode):

        async def halves(room: int) -> list[pb.SequenceDelta]:
            first, second = half_of_prefill(room), half_of_decode(prefill, room)
            for message in (first, second):
                message.cache_namespace.adapter = "x"
            return (await asyncio.gather(answer(prefill, first), answer(decode, second)))[1]

        for engine, name in ((prefill, "one"), (decode, "one")):
            await engine.stub.LoadAdapter(pb.LoadAdapterRequest(name="x", path=str(tmp_path / name)))
        deltas = await halves(5)
        assert deltas[0].prompt.cached_tokens == WHOLE * PAGE and tokens(deltas) != expected(PROMPT, 8)
        await decode.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="x"))
        await decode.stub.LoadAdapter(pb.LoadAdapterRequest(name="x", path=str(tmp_path / "two")))
        with pytest.raises(grpc.aio.AioRpcError, match="of another prompt or namespace"):
            await halves(6)
        await settled(prefill)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_either_half_may_come_long_before_the_other(first: str) -> None:
    async with pair() as (prefill, decode):
        if first == "prefill":
            await answer(prefill, half_of_prefill(9))
            deltas = await answer(decode, half_of_decode(prefill, 9))
        else:
            waiting = asyncio.create_task(answer(decode, half_of_decode(prefill, 9)))
            await until(lambda: decode.handovers.counters.pulls == 1)
            await answer(prefill, half_of_prefill(9))
            deltas = await waiting
        assert tokens(deltas) == expected(PROMPT, 8)


async def test_pages_go_out_while_the_rest_of_the_prompt_is_still_computed() -> None:
    prompt = [(5 * at) % 90 for at in range(200)]
    async with pair(prefill={"step_tokens": 16}) as (prefill, decode):
        gate = held_at_step(prefill, 6)
        decoding = asyncio.create_task(answer(decode, half_of_decode(prefill, 9, prompt=prompt)))
        await until(lambda: prefill.handovers.rooms.next_expiry_s is not None)  # the pull waits for its request
        computing = asyncio.create_task(answer(prefill, half_of_prefill(9, prompt=prompt)))
        await until(lambda: decode.handovers.counters.received_pages >= 20)
        assert not computing.done()
        gate.set()
        await computing
        assert tokens(await decoding) == expected(prompt, 8)


async def test_what_the_decode_half_has_already_is_not_sent_again() -> None:
    async with pair() as (prefill, decode):
        await answer(decode, request("before", PROMPT[:20]))
        deltas = await both(prefill, decode)
        assert tokens(deltas) == expected(PROMPT, 8)
        assert prefill.handovers.counters.sent_pages == WHOLE - 20 // PAGE


async def test_a_prompt_within_one_page_needs_no_pull() -> None:
    async with pair(prefill={"wait_s": 0.1}) as (prefill, decode):
        assert tokens(await answer(decode, half_of_decode(prefill, 9, prompt=[1, 2, 3]))) == expected([1, 2, 3], 8)
        assert decode.handovers.counters.pulls == 0


async def test_several_sequences_share_what_came() -> None:
    async with pair() as (prefill, decode):
        deltas = await both(prefill, decode, n=3)
        for index in range(3):
            assert tokens(delta for delta in deltas if delta.index == index) == expected(PROMPT, 8)
        assert decode.handovers.counters.received_pages == WHOLE


async def test_a_pool_that_is_too_small_for_what_comes_computes_the_rest_itself() -> None:
    async with pair(decode={"pages": 13}) as (prefill, decode):
        held = await decode.stub.AcquireLease(pb.AcquireLeaseRequest(request_id="l", token_ids=[8] * 8, ttl_ms=60000))
        waiting = asyncio.create_task(answer(decode, request("long", [5] * 9, max_tokens=20)))
        deltas = await both(prefill, decode, max_tokens=2)
        assert tokens(deltas) == expected(PROMPT, 2)
        assert tokens(await waiting) == expected([5] * 9, 20)
        await decode.stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=held.grant.lease_id))


async def test_a_hand_over_between_different_numerics_is_refused_and_says_so() -> None:
    async with pair() as (prefill, decode):
        decode.executor.numerics_id = "tiny-2"
        computing = asyncio.create_task(answer(prefill, half_of_prefill(9)))
        error = await refusal(decode, half_of_decode(prefill, 9))
        await computing
        assert error.field == "disaggregation" and "tiny-2" in error.message
        assert error.code == pb.ERROR_CODE_UNAVAILABLE
        await settled(prefill)


async def test_a_room_of_another_prompt_gives_nothing() -> None:
    async with pair() as (prefill, decode):
        await answer(prefill, half_of_prefill(9, prompt=[4] * 43))
        error = await refusal(decode, half_of_decode(prefill, 9))
        assert "another prompt" in error.message
        await settled(prefill)


async def test_bytes_that_were_changed_on_their_way_are_never_used() -> None:
    async with pair() as (prefill, decode):
        honest = prefill.executor.read_pages

        def forged(pages: Sequence[int]) -> bytes:
            data = honest(pages)
            prefill.handovers.rooms._checksum = lambda _: 1  # type: ignore[assignment]
            return data

        prefill.executor.read_pages = forged  # type: ignore[method-assign]
        computing = asyncio.create_task(answer(prefill, half_of_prefill(9)))
        error = await refusal(decode, half_of_decode(prefill, 9))
        assert "checksum" in error.message
        await computing
        assert decode.handovers.counters.received_pages == 0


async def test_two_live_requests_can_not_have_one_room() -> None:
    async with pair() as (prefill, decode):
        await answer(prefill, half_of_prefill(9))
        error = await refusal(prefill, half_of_prefill(9, "q"))
        assert error.field == "disaggregation.bootstrap_room" and "9 is in use" in error.message
        assert tokens(await answer(decode, half_of_decode(prefill, 9))) == expected(PROMPT, 8)


async def test_a_room_that_nobody_comes_to_gives_its_pages_back_in_time() -> None:
    async with pair(prefill={"wait_s": 0.2}) as (prefill, _):
        await answer(prefill, half_of_prefill(9))
        await until(lambda: prefill.handovers.counters.expired_rooms == 1)


async def test_a_pull_whose_prompt_never_comes_fails_in_time() -> None:
    async with pair(prefill={"wait_s": 0.2}) as (prefill, decode):
        error = await refusal(decode, half_of_decode(prefill, 9))
        assert error.code == pb.ERROR_CODE_UNAVAILABLE and "room 9" in error.message


async def test_a_pull_from_nobody_fails_at_once() -> None:
    async with pair() as (prefill, decode):
        await prefill.server.stop()
        error = await refusal(decode, half_of_decode(prefill, 9))
        assert (error.code, error.field) == (pb.ERROR_CODE_UNAVAILABLE, "disaggregation")


async def test_a_prompt_that_fails_ends_the_pull() -> None:
    async with pair() as (prefill, decode):
        prefill.executor.lost = True
        decoding = asyncio.create_task(refusal(decode, half_of_decode(prefill, 9)))
        await until(lambda: prefill.handovers.rooms.next_expiry_s is not None)
        assert (await refusal(prefill, half_of_prefill(9))).code == pb.ERROR_CODE_INTERNAL
        assert "ended early" in (await decoding).message


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_an_abort_of_either_half_leaves_nothing_behind(half: str) -> None:
    async with pair(prefill={"step_tokens": 4}) as (prefill, decode):
        computing = asyncio.create_task(answer(prefill, half_of_prefill(9)))
        decoding = asyncio.create_task(answer(decode, half_of_decode(prefill, 9, max_tokens=150)))
        await until(lambda: decode.handovers.counters.received_pages > 0)
        engine, request_id = (prefill, "p") if half == "prefill" else (decode, "d")
        await engine.stub.Abort(pb.AbortRequest(request_id=request_id))
        await asyncio.gather(computing, decoding, return_exceptions=True)


async def test_what_an_aborted_request_held_is_counted_as_free_when_its_answer_ends() -> None:
    async with pair(prefill={"step_tokens": 4}) as (prefill, decode):
        gate = held_at_step(prefill, 6)
        decoding = asyncio.create_task(answer(decode, half_of_decode(prefill, 9)))
        await until(lambda: prefill.handovers.rooms.next_expiry_s is not None)  # the pull waits for its request
        computing = asyncio.create_task(answer(prefill, half_of_prefill(9)))
        await until(lambda: decode.loop.stats().pages_protected > 0)
        await decode.stub.Abort(pb.AbortRequest(request_id="d"))
        await asyncio.gather(decoding, return_exceptions=True)
        assert decode.loop.stats().pages_protected == 0
        gate.set()
        await computing


async def test_a_pull_that_is_cut_frees_the_room_at_once() -> None:
    async with pair() as (prefill, _):
        await answer(prefill, half_of_prefill(9))
        call = prefill.stub.PullKv()
        opened = pb.PullOpen(room=9, numerics_id="tiny-1", page_size=PAGE, page_bytes=8 * PAGE, pages=0)
        opened.backends.append("stream")
        await call.write(pb.PullKvRequest(open=opened))
        await call.read()
        call.cancel()
        await until(lambda: prefill.handovers.counters.rooms == 0)


async def test_a_prompt_that_is_called_off_after_it_was_computed_frees_its_room_at_once() -> None:
    async with pair() as (prefill, decode):
        for number in (8, 9):
            await answer(prefill, half_of_prefill(number, f"p{number}"))
        assert prefill.handovers.counters.rooms == 2 and prefill.loop.stats().pages_protected == WHOLE
        assert (await prefill.stub.Abort(pb.AbortRequest(request_id="p8"))).aborted == 0
        await until(lambda: prefill.handovers.counters.rooms == 1)
        assert tokens(await answer(decode, half_of_decode(prefill, 9))) == expected(PROMPT, 8), "the other one stays"
        await answer(prefill, half_of_prefill(8))
        await prefill.stub.Abort(pb.AbortRequest(abort_all=True))
        await until(lambda: prefill.handovers.counters.rooms == 0)
        assert prefill.handovers.counters.expired_rooms == 0


async def test_a_storm_of_pairs_with_aborts_leaves_right_answers_and_no_page_behind() -> None:
    """Forty requests over three prefixes, a third of them aborted at a random moment."""
    random = Random(5)
    async with pair(prefill={"step_tokens": 24, "pages": 64}, decode={"step_tokens": 24, "pages": 64}) as (one, other):
        prompts = [[(base * 7 + at) % 90 for at in range(30 + 10 * base)] for base in range(3)]

        async def ask(number: int) -> None:
            prompt = prompts[number % 3][: random.randrange(20, 50)] + [number % 90] * 3
            await asyncio.sleep(random.random() / 5)
            halves = asyncio.gather(
                answer(one, half_of_prefill(number, f"p{number}", prompt)),
                answer(other, half_of_decode(one, number, f"d{number}", prompt=prompt)),
                return_exceptions=True,
            )
            if number % 3 == 0:
                await asyncio.sleep(random.random() / 10)
                await other.stub.Abort(pb.AbortRequest(request_id=f"d{number}"))
                await one.stub.Abort(pb.AbortRequest(request_id=f"p{number}"))
                await halves
                return
            _, deltas = await halves
            assert not isinstance(deltas, BaseException), deltas
            assert tokens(deltas) == expected(prompt, 8)

        await asyncio.gather(*(ask(number) for number in range(40)))
        await settled(one)


async def test_a_worker_of_role_prefill_refuses_to_generate_alone_and_one_of_decode_to_prefill_for_others() -> None:
    async with pair() as (prefill, decode):
        error = await refusal(prefill, request())
        assert error.code == pb.ERROR_CODE_UNIMPLEMENTED and "role prefill" in error.message
        error = await refusal(decode, half_of_prefill(9))
        assert error.field == "disaggregation.half" and "role decode" in error.message
        assert tokens(await answer(decode, request("alone", PROMPT))) == expected(PROMPT, 8)
        assert (await prefill.stub.GetModelInfo(pb.GetModelInfoRequest())).role == "prefill"
