"""Adapters by RPC on a real server: names, places, the cache's namespaces, unloading while requests run, refusals."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import branchline.engine.executor  # noqa: F401  (registers the executors)
import grpc
import grpc.aio
import pytest
from adapters import save_adapter, save_llama
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.model.load import inspect_model
from branchline.engine.service import assembly
from branchline.engine.service.adapters import AdapterBook
from branchline.engine.service.generated import engine_pb2 as pb
from harness import EOS, tokenizer_json
from served import Served, contract_error, request, served, until
from tiny import VOCAB, TinyExecutor, expected

PROMPT = list(range(1, 14))
Status = grpc.StatusCode


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and adapters of it: a and c, and `wide` of a larger rank."""
    made = tmp_path_factory.mktemp("adapters")
    save_llama(made / "base", tokenizer_json(), VOCAB, EOS)
    for name, how in {"a": {}, "c": {"seed": 2}, "wide": {"rank": 9}}.items():
        save_adapter(made / name, targets=["q_proj"], **how)
    return made


@pytest.fixture(scope="module")
def book(root: Path) -> Callable[[TinyExecutor], AdapterBook]:
    spec = inspect_model(str(root / "base")).spec
    return lambda executor: AdapterBook(executor, "tiny", spec, limit=2, max_rank=8)


async def load(engine: Served, name: str, path: Path) -> pb.Adapter:
    answer = await engine.stub.LoadAdapter(pb.LoadAdapterRequest(name=name, path=str(path)))
    adapter: pb.Adapter = answer.adapter
    return adapter


def asked(adapter: str | None, request_id: str = "r", **namespace: str) -> pb.GenerateRequest:
    message = request(request_id, PROMPT)
    message.cache_namespace.CopyFrom(pb.CacheNamespace(adapter=adapter, **namespace))
    return message


async def run(engine: Served, message: pb.GenerateRequest) -> tuple[list[int], int]:
    """Output and cached tokens."""
    ids, cached = [], 0
    async for answer in engine.stub.Generate(message):
        for delta in answer.deltas:
            ids += delta.token_ids
            cached += delta.prompt.cached_tokens
    return ids, cached


async def refused(call: Any) -> tuple[Status, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = contract_error(caught.value)
    return caught.value.code(), error.field, error.message


async def test_an_adapter_has_its_own_output_and_pages_whatever_its_name(
    root: Path, book: Callable[[TinyExecutor], AdapterBook]
) -> None:
    async with served(book=book) as engine:
        base, _ = await run(engine, request("r", PROMPT))
        assert base == expected(PROMPT, 8)
        a = await load(engine, "a", root / "a")
        assert (await load(engine, "a", root / "a")).digest == a.digest, "the same one again is no error"
        own, cached = await run(engine, asked("a"))
        assert own != base and cached == 0, "nothing of the base model's pages is used"
        assert await run(engine, asked("a")) == (own, 12)
        assert await run(engine, request("r", PROMPT)) == (base, 12)
        together = await asyncio.gather(run(engine, asked("a", "x")), run(engine, request("y", PROMPT)))
        assert [ids for ids, _ in together] == [own, base]
        listed = await engine.stub.ListAdapters(pb.ListAdaptersRequest())
        assert [(one.name, one.path, one.rank, one.running) for one in listed.adapters] == [
            ("a", str(root / "a"), 4, 0)
        ]
        report = await engine.stub.GetLoad(pb.GetLoadRequest())
        assert (listed.limit, listed.version, report.adapters_version) == (2, 1, 1)
        await load(engine, "b", root / "c")
        other, cached = await run(engine, asked("b"))
        assert other != own and cached == 0
        await engine.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="b"))
        again = await load(engine, "b", root / "a")  # the same weights by another name: pages are the digest's
        assert again.digest == a.digest
        assert (await run(engine, asked("b", adapter_digest=a.digest)))[1] == 12


async def test_leases_and_scores_are_the_adapters_own(root: Path, book: Callable[[TinyExecutor], AdapterBook]) -> None:
    async with served(book=book) as engine:
        await load(engine, "a", root / "a")
        namespace = pb.CacheNamespace(adapter="a")
        lease = await engine.stub.AcquireLease(
            pb.AcquireLeaseRequest(request_id="l", token_ids=PROMPT, ttl_ms=60_000, cache_namespace=namespace)
        )
        for adapter, state in (("a", pb.LEASE_STATE_HELD), (None, pb.LEASE_STATE_UNMATCHED)):
            message = asked(adapter)
            message.lease.CopyFrom(pb.Lease(lease_id=lease.grant.lease_id))
            found = [
                d.lease.state async for one in engine.stub.Generate(message) for d in one.deltas if d.HasField("lease")
            ]
            assert found == [state]
        sums = []
        for given in (namespace, pb.CacheNamespace()):
            scored = pb.ScoreRequest(
                request_id="s", prefix_token_ids=PROMPT, choices=[pb.Tokens(token_ids=[7])], cache_namespace=given
            )
            sums.append((await engine.stub.Score(scored)).scores[0].sum)
        assert sums[0] != sums[1]
        await engine.stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=lease.grant.lease_id))


async def test_an_unloaded_adapter_ends_its_requests_in_good_order(
    root: Path, book: Callable[[TinyExecutor], AdapterBook]
) -> None:
    async with served(book=book) as engine:
        await load(engine, "a", root / "a")
        wanted, _ = await run(engine, asked("a"))
        gate, inside, real = threading.Event(), threading.Event(), engine.executor.run

        def held(batch: Any) -> Any:
            inside.set()
            assert gate.wait(20)
            return real(batch)

        engine.executor.run = held  # type: ignore[method-assign]
        running = asyncio.create_task(run(engine, asked("a", "long")))
        await until(inside.is_set)
        assert (await engine.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="a"))).running == 1
        status, field, words = await refused(run(engine, asked("a", "late")))
        assert (status, field) == (Status.NOT_FOUND, "cache_namespace.adapter") and "no adapter is loaded" in words
        await load(engine, "a", root / "c")  # the name is free at once, the place of the old one is not
        status, _, words = await refused(load(engine, "d", root / "a"))
        assert status == Status.RESOURCE_EXHAUSTED and "1 unloaded ones still have requests" in words
        assert engine.executor.adapters == {1, 2}
        gate.set()
        assert (await running)[0] == wanted, "it went on with the old weights"
        await until(lambda: engine.executor.adapters == {2})
        await load(engine, "d", root / "a")


async def test_what_is_wrong_is_refused_by_name(root: Path, book: Callable[[TinyExecutor], AdapterBook]) -> None:
    async with served(book=book) as engine:
        await load(engine, "a", root / "a")
        for name, path, status, field, words in [
            ("", root / "a", Status.INVALID_ARGUMENT, "name", "name '' is no adapter's"),
            ("x:y", root / "a", Status.INVALID_ARGUMENT, "name", "'x:y'"),
            ("x", "", Status.INVALID_ARGUMENT, "path", "path '' is none"),
            ("x", "\0", Status.INVALID_ARGUMENT, "path", "is none"),
            ("x", root / "nowhere", Status.INVALID_ARGUMENT, "path", "there is no adapter_config.json"),
            ("x", root / "wide", Status.INVALID_ARGUMENT, "path", "has rank 9 and max-adapter-rank is 8"),
            ("a", root / "c", Status.INVALID_ARGUMENT, "name", "is that of another adapter"),
        ]:
            found = await refused(load(engine, name, path))  # type: ignore[arg-type]
            assert found[:2] == (status, field) and words in found[2], found
        for message, status, words in [
            (asked("b"), Status.NOT_FOUND, "adapter 'b' is not loaded: there are a"),
            (asked("a", adapter_digest="0"), Status.NOT_FOUND, "it was loaded anew"),
            (asked(None, adapter_digest="0"), Status.INVALID_ARGUMENT, "name the adapter too"),
        ]:
            found = await refused(run(engine, message))
            assert found[0] == status and words in found[2], found
        found = await refused(engine.stub.UnloadAdapter(pb.UnloadAdapterRequest(name="b")))
        assert found == (Status.NOT_FOUND, "name", "adapter 'b' is not loaded: there are a")
        listed = await engine.stub.ListAdapters(pb.ListAdaptersRequest())
        assert [one.name for one in listed.adapters] == ["a"]


async def test_a_worker_without_adapters_says_so() -> None:
    async with served() as engine:
        found = await refused(load(engine, "a", Path("a")))
        assert found[0] == Status.UNIMPLEMENTED and "runs no adapters" in found[2]
        assert (await engine.stub.ListAdapters(pb.ListAdaptersRequest())).limit == 0


def config(root: Path, **changes: Any) -> EngineConfig:
    given = {
        "model": str(root / "base"),
        "max_total_tokens": 256,
        "grammar_backend": "none",
        "adapter": (f"a={root}/a",),
    }
    return EngineConfig(**{**given, **changes})


def test_adapters_of_the_options_are_loaded_and_choose_the_executor(root: Path) -> None:
    engine = assembly.build(config(root), lambda *_: None)
    try:
        assert isinstance(engine, assembly.Engine) and engine.adapters is not None
        assert engine.model.executor == "torch" and [one.name for one in engine.adapters.all()] == ["a"]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"executor": "native"}, "the executor native runs no adapters: start the worker with --executor torch"),
        ({"adapter": ("a=/nowhere",)}, "'a=/nowhere' can't be loaded: adapter /nowhere: there is no adapter_config"),
        ({"max_adapter_rank": 3}, "max-adapter-rank is 3"),
    ],
)
def test_options_that_can_not_be_honoured_end_the_start(root: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        assembly.build(config(root, **changes), lambda *_: None)


def test_options_are_checked_together(root: Path) -> None:
    found = config(root, adapter=("a", "b:c=x", "d=x", "d=y"), max_adapters=3).faults()
    assert [fault.partition(":")[0] for fault in found] == [
        "adapter 'a' is not NAME=PATH",
        "adapter 'b",
        "adapter names 'd' twice",
        "adapter is given 4 times and max-adapters is 3",
    ]
