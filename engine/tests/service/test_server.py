"""Health, reflection, credentials, draining and the port."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import grpc
import grpc.aio
import pytest
from branchline.engine.errors import LoadError
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.generated import engine_pb2_grpc
from branchline.engine.service.server import SERVICE
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from served import Attached, request, served, tokens, until
from tiny import expected

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: Any, service: str = "") -> int:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_an_idle_worker_is_serving(service: str) -> None:
    async with served() as engine:
        assert await health(engine.channel, service) == SERVING


async def test_a_step_that_does_not_end_turns_health_and_its_end_turns_it_back() -> None:
    async with served(step_timeout_s=0.05) as engine:
        gate, run = threading.Event(), engine.executor.run

        def stuck(batch: Any) -> Any:
            gate.wait(20)
            return run(batch)

        engine.executor.run = stuck  # type: ignore[method-assign]
        reader = asyncio.ensure_future(_all(engine.stub.Generate(request())))
        await until(lambda: not engine.server.is_serving())
        while await health(engine.channel) != NOT_SERVING:
            await asyncio.sleep(0.01)
        gate.set()
        assert tokens(await reader) == expected([1, 2, 3], 8)
        while await health(engine.channel) != SERVING:
            await asyncio.sleep(0.01)


async def _all(call: Any) -> list[pb.SequenceDelta]:
    return [delta async for answer in call for delta in answer.deltas]


async def test_draining_ends_running_requests_well_and_refuses_new_ones() -> None:
    async with served() as engine:
        gateway = Attached(engine.stub)
        await gateway.hello()
        gate, run = threading.Event(), engine.executor.run

        def held(batch: Any) -> Any:
            gate.wait(20)
            return run(batch)

        engine.executor.run = held  # type: ignore[method-assign]
        await gateway.submit(1, request("old", max_tokens=30))
        await until(lambda: engine.loop.stats().running == 1 or (engine.executor.steps == 0 and engine.loop.busy))
        draining = asyncio.ensure_future(engine.server.drain(20))
        await until(lambda: engine.servicer.draining)
        assert await health(engine.channel) == NOT_SERVING
        await gateway.submit(2, request("new"))
        refused = (await gateway.collect([2]))[2][-1]
        assert refused.error.code == pb.ERROR_CODE_UNAVAILABLE and refused.error.retry_after_ms > 0
        gate.set()
        assert tokens((await gateway.collect([1]))[1]) == expected([1, 2, 3], 30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.call.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        await draining


async def test_a_drain_that_takes_too_long_aborts_what_is_left() -> None:
    async with served() as engine:
        gateway = Attached(engine.stub)
        await gateway.hello()
        run = engine.executor.run
        pace = threading.Event()

        def slow(batch: Any) -> Any:
            pace.wait(0.02)
            return run(batch)

        engine.executor.run = slow  # type: ignore[method-assign]
        await gateway.submit(1, request("old", max_tokens=250))
        await gateway.call.read()
        draining = asyncio.ensure_future(engine.server.drain(0.05))
        got = (await gateway.collect([1]))[1]
        assert got[-1].finish.reason == pb.FINISH_REASON_ABORT
        await draining


async def test_reflection_lists_and_describes_the_service() -> None:
    async with served() as engine:
        stub = reflection_pb2_grpc.ServerReflectionStub(engine.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {one.name for one in (await call.read()).list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= listed
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()


TRIES = ["", "Bearer", "Bearer k", "Bearer k-0123456789abcdeX", "Bearer k-0123456789abcdef0", "k-0123456789abcdef",
         "Basic k-0123456789abcdef"]  # fmt: skip


@pytest.mark.parametrize("given", TRIES)
async def test_a_wrong_token_is_refused_with_the_same_words_on_every_kind_of_call(given: str) -> None:
    metadata = (("authorization", given),) if given else ()
    async with served(token="k-0123456789abcdef") as engine:
        details = set()
        for call in (
            engine.stub.GetLoad(pb.GetLoadRequest(), metadata=metadata),
            engine.stub.Generate(request(), metadata=metadata),
            engine.stub.Attach(metadata=metadata),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                if hasattr(call, "read"):
                    await call.read()
                else:
                    await call
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            details.add(caught.value.details())
        assert len(details) == 1 and "0123456789" not in details.pop()
        assert await health(engine.channel) == SERVING, "health needs no token"


async def test_the_right_token_is_served() -> None:
    metadata = (("authorization", "Bearer k-0123456789abcdef"),)
    async with served(token="k-0123456789abcdef") as engine:
        assert (await engine.stub.GetLoad(pb.GetLoadRequest(), metadata=metadata)).pages_total == 256
        assert tokens(await _all(engine.stub.Generate(request(), metadata=metadata))) == expected([1, 2, 3], 8)


async def test_a_taken_port_is_a_clear_error() -> None:
    async with served() as first:
        with pytest.raises(LoadError, match=f"can't listen on 127.0.0.1:{first.server.port}"):
            async with served(port=first.server.port):
                pass


async def test_missing_certificate_files_are_named() -> None:
    with pytest.raises(LoadError, match=r"no/such\.pem"):
        async with served(tls_cert="no/such.pem", tls_key="no/such.pem"):
            pass


async def test_a_client_without_a_certificate_is_refused_and_one_with_it_is_served(certificates: Any) -> None:
    files = certificates
    async with served(tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.cert) as engine:
        address = f"localhost:{engine.server.port}"
        root = files.read(files.cert)
        bare = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root))
        known = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root, files.read(files.key), root))
        with pytest.raises(grpc.aio.AioRpcError):
            await engine_pb2_grpc.EngineStub(bare).GetLoad(pb.GetLoadRequest(), timeout=10)
        answer = await engine_pb2_grpc.EngineStub(known).GetLoad(pb.GetLoadRequest(), timeout=10)
        assert answer.pages_total == 256
        await bare.close()
        await known.close()
