"""A worker that embeds or ranks over gRPC: results, refusals by field, and what it says of itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.service import embedding
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.generated import engine_pb2_grpc
from branchline.engine.service.server import EngineServer, ServerOptions
from encoders import bert, classifier, pooled, save
from served import contract_error, served
from tiny import VOCAB

LIMIT = 60


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tmp_path_factory.mktemp("embedder"), bert())
    return pooled(folder, "pooling_mode_mean_tokens", normalise=True)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("ranker"), classifier("bert"))


def build(folder: Path, given: frozenset[str] = frozenset(), **options: Any) -> embedding.Encoder:
    return embedding.build(EngineConfig(model=str(folder), **options), folder, lambda *_: None, given)


@contextlib.asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[tuple[embedding.Encoder, Any]]:
    encoder = build(folder, **options)
    server = EngineServer(encoder.servicer({}), ServerOptions())
    encoder.loop.start()
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield encoder, engine_pb2_grpc.EngineStub(channel)  # type: ignore[no-untyped-call]
    finally:
        assert await server.drain(0.0)


def asked(*inputs: list[int], task: int = pb.EMBED_TASK_EMBED, **fields: Any) -> pb.EmbedRequest:
    texts = [pb.EmbedInput(token_ids=ids) for ids in inputs]
    return pb.EmbedRequest(**{"request_id": "r", "inputs": texts, "task": task, **fields})


async def test_each_text_has_the_vector_it_has_alone(embedder: Path) -> None:
    async with serving(embedder) as (encoder, stub):
        texts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
        found = await stub.Embed(asked(*texts))
        for text, result in zip(texts, found.results, strict=True):
            assert list(result.values) == encoder.network.embed(text).tolist(), "bit by bit"
            assert np.linalg.norm(result.values) == pytest.approx(1, abs=1e-6)
        short = await stub.Embed(asked(texts[0], dimensions=7))
        assert len(short.results[0].values) == 7


async def test_a_pair_has_its_score(ranker: Path) -> None:
    async with serving(ranker) as (encoder, stub):
        request = asked([5, 6, 7, 8], task=pb.EMBED_TASK_RANK)
        request.inputs[0].type_ids.extend([0, 0, 1, 1])
        found = await stub.Embed(request)
        assert list(found.results[0].values) == encoder.network.rank([5, 6, 7, 8], [0, 0, 1, 1]).tolist()


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (asked(), grpc.StatusCode.INVALID_ARGUMENT, "inputs"),
        (asked([1], []), grpc.StatusCode.INVALID_ARGUMENT, "inputs[1].token_ids"),
        (asked([1] * 41), grpc.StatusCode.INVALID_ARGUMENT, "inputs[0].token_ids"),
        (asked([VOCAB]), grpc.StatusCode.INVALID_ARGUMENT, "inputs[0].token_ids"),
        (asked(*[[1]] * 2050), grpc.StatusCode.INVALID_ARGUMENT, "inputs"),
        (asked([1], request_id=""), grpc.StatusCode.INVALID_ARGUMENT, "request_id"),
        (asked([1], dimensions=0), grpc.StatusCode.INVALID_ARGUMENT, "dimensions"),
        (asked([1], dimensions=33), grpc.StatusCode.INVALID_ARGUMENT, "dimensions"),
        (asked([1], task=0), grpc.StatusCode.INVALID_ARGUMENT, "task"),
        (asked([1], task=pb.EMBED_TASK_RANK), grpc.StatusCode.UNIMPLEMENTED, "task"),
        (
            asked(inputs=[pb.EmbedInput(token_ids=[1, 2], type_ids=[0])]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "inputs[0].type_ids",
        ),
        (
            asked(inputs=[pb.EmbedInput(token_ids=[1], type_ids=[2])]),
            grpc.StatusCode.INVALID_ARGUMENT,
            "inputs[0].type_ids",
        ),
    ],
)
async def test_bad_requests_name_their_field(
    embedder: Path, request_: pb.EmbedRequest, code: grpc.StatusCode, field: str
) -> None:
    async with serving(embedder) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Embed(request_)
        assert (refused.value.code(), contract_error(refused.value).field) == (code, field)


async def test_a_deadline_and_a_client_that_leaves_end_the_work(embedder: Path) -> None:
    async with serving(embedder) as (encoder, stub):
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Embed(asked([1], deadline_ms=0))
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call = stub.Embed(asked(*[[1] * 40] * 2000, request_id="left"))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

        async def idle() -> None:
            while encoder.loop.stats().running or encoder.loop.stats().waiting:
                await asyncio.sleep(0.01)

        await asyncio.wait_for(idle(), LIMIT)
        assert encoder.loop.stats().steps < 2000


async def test_whatever_generates_or_caches_is_refused_in_words(embedder: Path) -> None:
    async with serving(embedder) as (_, stub):
        generate = pb.GenerateRequest(request_id="g", token_ids=[1])
        with pytest.raises(grpc.aio.AioRpcError, match="does not generate") as refused:
            async for _ in stub.Generate(generate):
                pass
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        score = pb.ScoreRequest(request_id="s", prefix_token_ids=[1], choices=[pb.Tokens(token_ids=[2])])
        with pytest.raises(grpc.aio.AioRpcError, match="does not generate"):
            await stub.Score(score)
        for call in (
            stub.GetCacheTree(pb.GetCacheTreeRequest()),
            stub.RenewLease(pb.RenewLeaseRequest(lease_id="a", ttl_ms=1)),
            stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id="a")),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="no prefix cache"):
                await call
        assert (await stub.FlushCache(pb.FlushCacheRequest())).flushed_pages == 0


async def test_a_model_that_generates_does_not_embed() -> None:
    async with served() as engine:
        with pytest.raises(grpc.aio.AioRpcError, match="generates and does not embed"):
            await engine.stub.Embed(asked([1]))
        assert list((await engine.stub.GetModelInfo(pb.GetModelInfoRequest())).tasks) == ["generate"]


async def test_the_worker_tells_its_tasks_and_its_load(embedder: Path, ranker: Path) -> None:
    async with serving(embedder, served_model_name=("mini",)) as (_, stub):
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (list(info.tasks), info.embedding_size, info.context_length) == (["embed"], 32, 40)
        assert (list(info.served_model_names), info.executor) == (["mini"], "numpy")
        await stub.Embed(asked([1, 2]))
        stats = (await stub.GetServerInfo(pb.GetServerInfoRequest())).cache
        assert (stats.prompt_tokens, stats.lookups) == (2, 1)
    async with serving(ranker) as (_, stub):
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert list(info.tasks) == ["rank"] and not info.HasField("embedding_size")


async def test_metrics_count_requests(embedder: Path) -> None:
    async with serving(embedder, metrics_port=0) as (encoder, stub):
        await stub.Embed(asked([1, 2], [3]))
        assert encoder.metrics is not None
        read = encoder.metrics.registry.get_sample_value
        assert read("branchline_engine_e2e_request_latency_seconds_count") == 1
        assert read("branchline_engine_prompt_tokens_total") == 3
        assert read("branchline_engine_sequences_finished_total", {"reason": "stop"}) == 1


@pytest.mark.parametrize("name", ["quantization", "role", "speculative_algorithm"])
def test_options_of_generation_are_refused_where_a_user_sets_them(embedder: Path, name: str) -> None:
    with pytest.raises(LoadError, match=name.replace("_", "-")):
        build(embedder, frozenset({name}))


def test_a_context_length_above_the_checkpoints_is_refused(embedder: Path) -> None:
    with pytest.raises(LoadError, match="41"):
        build(embedder, context_length=41)
