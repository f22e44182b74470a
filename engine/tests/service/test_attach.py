"""Attach over a real channel: frames, refusals, cancellation, disconnection and the bound."""

from __future__ import annotations

import asyncio
import threading

import grpc
import grpc.aio
import pytest
from branchline.engine.service.generated import engine_pb2 as pb
from served import Attached, request, served, tokens, until
from tiny import expected


async def test_many_requests_of_one_stream_each_get_their_own_tokens() -> None:
    async with served() as engine:
        gateway = Attached(engine.stub)
        welcome = await gateway.hello()
        assert (welcome.engine_id, welcome.contract_revision) == (engine.servicer.engine_id, 1)
        prompts = {handle: [handle, handle + 1, 5] for handle in range(1, 33)}
        for handle, prompt in prompts.items():
            await gateway.submit(handle, request(f"r{handle}", prompt))
        got = await gateway.collect(prompts)
        for handle, prompt in prompts.items():
            assert tokens(got[handle]) == expected(prompt, 8)
            last = got[handle][-1]
            assert last.finish.reason == pb.FINISH_REASON_LENGTH and last.finish.completion_tokens == 8
            assert got[handle][0].prompt.prompt_tokens == 3
            assert not any(delta.HasField("prompt") for delta in got[handle][1:])
        await engine.idle()


async def test_one_step_is_one_frame_whatever_the_number_of_requests() -> None:
    async with served() as engine:
        gateway = Attached(engine.stub)
        await gateway.hello()
        for handle in range(20):
            await gateway.submit(handle, request(f"r{handle}", [handle + 1], max_tokens=40))
        steps: list[int] = []
        ended = 0
        while ended < 20:
            frame = (await gateway.call.read()).frame
            steps.append(frame.step)
            ended += sum(delta.HasField("finish") for delta in frame.deltas)
        assert steps == sorted(set(steps)), "a step came in two frames"


async def test_a_refused_request_ends_with_an_error_delta_and_spares_the_stream() -> None:
    async with served() as engine:
        gateway = Attached(engine.stub)
        await gateway.hello()
        await gateway.submit(1, request("bad", temperature=-1.0))
        await gateway.submit(2, request("good"))
        got = await gateway.collect([1, 2])
        assert got[1][0].error.code == pb.ERROR_CODE_INVALID_ARGUMENT
        assert got[1][0].error.field == "sampling.temperature"
        assert tokens(got[2]) == expected([1, 2, 3], 8)


async def test_a_request_id_is_unique_among_live_requests_of_all_streams() -> None:
    async with served() as engine:
        first, second = Attached(engine.stub), Attached(engine.stub)
        await first.hello()
        await second.hello()
        await first.submit(1, request("same", max_tokens=200))
        await first.call.read()
        await second.submit(9, request("same"))
        await first.submit(2, request("same"))
        refused = (await second.collect([9]))[9][0]
        assert refused.error.field == "request_id" and "same" in refused.error.message
        got = await first.collect([1, 2])
        assert got[2][0].error.field == "request_id"
        await first.submit(3, request("same"))
        assert tokens((await first.collect([3]))[3]) == expected([1, 2, 3], 8)


async def test_cancel_ends_one_request_and_leaves_its_neighbours() -> None:
    async with served() as engine:
        gateway = Attached(engine.stub)
        await gateway.hello()
        await gateway.submit(1, request("a", max_tokens=250))
        await gateway.submit(2, request("b", [4], max_tokens=20))
        await gateway.cancel(1)
        await gateway.cancel(77)  # unknown: no error
        got = await gateway.collect([1, 2])
        assert got[1][-1].finish.reason == pb.FINISH_REASON_ABORT
        assert len(tokens(got[1])) < 250
        assert tokens(got[2]) == expected([4], 20)
        await engine.idle()


@pytest.mark.parametrize("how", ["cancel the call", "half-close", "close the channel"])
async def test_the_end_of_the_stream_aborts_all_its_requests(how: str) -> None:
    async with served(pages=1024) as engine:
        other = grpc.aio.insecure_channel(f"127.0.0.1:{engine.server.port}")
        stub = type(engine.stub)(other)
        gateway = Attached(stub)
        await gateway.hello()
        for handle in range(8):
            await gateway.submit(handle, request(f"r{handle}", [handle + 1], max_tokens=252))
        await gateway.call.read()
        if how == "cancel the call":
            gateway.call.cancel()
        elif how == "half-close":
            await gateway.call.done_writing()
        await asyncio.sleep(0) if how != "close the channel" else await other.close(None)
        await engine.idle()
        assert engine.executor.computed_tokens < 8 * 252, "the abandoned requests ran to their end"
        assert not engine.servicer.streams
        await other.close()


async def test_sequences_of_one_request_share_its_handle_and_all_end() -> None:
    async with served() as engine:
        gateway = Attached(engine.stub)
        await gateway.hello()
        await gateway.submit(5, request("n", n=3, temperature=1.0, seed=11))
        got = (await gateway.collect([5], sequences=3))[5]
        assert {delta.index for delta in got} == {0, 1, 2}
        assert sum(delta.HasField("finish") for delta in got) == 3
        await gateway.submit(5, request("n"))  # the handle is free again only as the stream is told
        assert tokens((await gateway.collect([5]))[5]) == expected([1, 2, 3], 8)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([pb.AttachRequest(submit=pb.Submit(handle=1, request=request()))], "submit"),
        ([pb.AttachRequest(cancel=pb.Cancel(handle=1))], "cancel"),
        ([pb.AttachRequest()], "message"),
        ([pb.AttachRequest(hello=pb.Hello()), pb.AttachRequest(hello=pb.Hello())], "hello"),
        (
            [
                pb.AttachRequest(hello=pb.Hello()),
                pb.AttachRequest(submit=pb.Submit(handle=1, request=request("a", max_tokens=250))),
                pb.AttachRequest(submit=pb.Submit(handle=1, request=request("b"))),
            ],
            "handle",
        ),
    ],
)
async def test_breaking_the_protocol_ends_the_stream_with_words(messages: list[pb.AttachRequest], field: str) -> None:
    async with served() as engine:
        call = engine.stub.Attach()
        for message in messages:
            await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
            await call
        if caught.value.code() is not None:
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert field in caught.value.details()
        await engine.idle()


async def test_a_peer_that_stops_for_a_while_loses_nothing() -> None:
    async with served(pages=1024) as engine:
        late = Attached(engine.stub)
        await late.hello()
        wide = pb.LogprobParams(output=True, top_k=48)
        gate = threading.Event()
        engine.executor.run = _gated(engine.executor.run, gate)  # type: ignore[method-assign]
        for handle in range(32):
            message = request(f"s{handle}", [handle + 1], max_tokens=240)
            message.logprobs.CopyFrom(wide)
            await late.submit(handle, message)
        await until(lambda: engine.loop.stats().running + engine.loop.stats().waiting > 0)
        gate.set()
        await engine.idle()  # all is written before anything is read
        answers = await late.collect(list(range(32)))
        for handle in range(32):
            deltas = answers[handle]
            assert tokens(deltas) == expected([handle + 1], 240)
            assert [i for delta in deltas for i in delta.logprobs.token_ids] == tokens(deltas)
            assert sum(len(delta.logprobs.top) for delta in deltas) == 240
            assert [delta.HasField("finish") for delta in deltas] == [False] * (len(deltas) - 1) + [True]
            assert len(deltas) <= 240


async def test_a_peer_that_does_not_read_loses_its_stream_and_nothing_else() -> None:
    async with served(stream_buffer=64, pages=1024) as engine:
        slow, quick = Attached(engine.stub), Attached(engine.stub)
        await slow.hello()
        await quick.hello()
        wide = pb.LogprobParams(output=True, top_k=96)
        gate = threading.Event()
        engine.executor.run = _gated(engine.executor.run, gate)  # type: ignore[method-assign]
        for handle in range(64):
            message = request(f"s{handle}", [handle + 1], max_tokens=240)
            message.logprobs.CopyFrom(wide)
            await slow.submit(handle, message)
        await until(lambda: engine.loop.stats().running + engine.loop.stats().waiting > 0)
        gate.set()
        await engine.idle()  # its requests are aborted although it never read
        await quick.submit(1, request("q"))
        assert tokens((await quick.collect([1]))[1]) == expected([1, 2, 3], 8)
        frames = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await slow.call.read() is not grpc.aio.EOF:
                frames += 1
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert frames < 64 + 240, "what it did not read was kept"
        await until(lambda: len(engine.servicer.streams) == 1)


def _gated(run, gate):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    def wait_and_run(batch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        gate.wait(20)
        return run(batch)

    return wait_and_run


async def test_a_failing_step_ends_its_requests_with_an_error_and_the_next_ones_are_served() -> None:
    async with served() as engine:
        engine.executor.faults[1] = RuntimeError("device lost")
        gateway = Attached(engine.stub)
        await gateway.hello()
        await gateway.submit(1, request("a"))
        failed = (await gateway.collect([1]))[1][-1]
        assert failed.error.code == pb.ERROR_CODE_INTERNAL and "device lost" in failed.error.message
        await gateway.submit(2, request("b"))
        assert tokens((await gateway.collect([2]))[2]) == expected([1, 2, 3], 8)


async def test_large_input_logprobs_come_in_pieces_below_a_mebibyte_without_a_gap() -> None:
    prompt = [index % 90 for index in range(2000)]
    from served import changed

    async with served(model=changed(context_length=4096, max_request_tokens=4096), pages=1024) as engine:
        gateway = Attached(engine.stub)
        await gateway.hello()
        message = request("big", prompt, max_tokens=1)
        message.logprobs.CopyFrom(pb.LogprobParams(output=True, top_k=96, input_start=0, token_ids=range(95)))
        await gateway.submit(1, message)
        seen: list[int] = []
        reports = 0
        while True:
            answer = await gateway.call.read()
            assert answer.ByteSize() <= 1 << 20
            for delta in answer.frame.deltas:
                reports += delta.HasField("prompt")
                if delta.HasField("input_logprobs"):
                    assert delta.input_logprobs.start == len(seen)
                    seen += delta.input_logprobs.token_ids
                    assert len(delta.input_logprobs.top) == len(delta.input_logprobs.token_ids)
            if any(delta.HasField("finish") for delta in answer.frame.deltas):
                break
        assert seen == prompt and reports == 1


async def test_bytes_that_are_no_message_end_the_stream_alone() -> None:
    async with served() as engine:
        raw = engine.channel.stream_stream("/branchline.engine.v1.Engine/Attach")()
        await raw.write(pb.AttachRequest(hello=pb.Hello()).SerializeToString())
        await raw.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await raw.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        gateway = Attached(engine.stub)
        await gateway.hello()
        await gateway.submit(1, request())
        assert tokens((await gateway.collect([1]))[1]) == expected([1, 2, 3], 8)
