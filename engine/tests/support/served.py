"""A real server on a free port over a real loop with the tiny executor, and the client side of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from branchline import _native
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.handover import Handovers, KvTransferBackend, TransferContext, build_backends
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.service.adapters import AdapterBook
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.generated import engine_pb2_grpc
from branchline.engine.service.handover import PeerOptions, Pulls
from branchline.engine.service.limits import ModelInfo
from branchline.engine.service.server import EngineServer, ServerOptions
from branchline.engine.service.servicer import EngineServicer
from harness import EOS, vocabulary
from tiny import VOCAB, TinyExecutor

PAGE = 4
MODEL = ModelInfo(
    model_path="tiny.gguf",
    served_names=("tiny", "tiny.gguf"),
    architecture="TinyForCausalLM",
    vocab_size=VOCAB,
    context_length=256,
    page_size=PAGE,
    dtype="float32",
    numerics_id="tiny-1",
    weight_version="v1",
    max_request_tokens=256,
    executor="tiny",
    eos_ids=(EOS,),
    tokenizer_json=b'{"x":"' + b"y" * (5 << 19) + b'"}',
    chat_template="{{ messages }}",
    eos_token="</s>",
)


def built_in() -> dict[str, KvTransferBackend]:
    """The transfer backends of an engine that has nothing else installed."""
    return build_backends("stream", TransferContext("127.0.0.1", 1 << 20, 1 << 16))


class Served:
    """One running server. `executor` may be slowed down or broken by tests."""

    def __init__(
        self,
        model: ModelInfo,
        pages: int,
        stream_buffer: int,
        options: ServerOptions,
        backends: Callable[[], dict[str, KvTransferBackend]],
        wait_s: float,
        step_tokens: int,
        book: Callable[[TinyExecutor], AdapterBook] | None,
    ) -> None:
        self.executor = TinyExecutor(pages, PAGE)
        cache = build_cache("native", CacheContext(pages, PAGE))
        self.handovers = Handovers(cache, self.executor, backends(), wait_s)
        self.loop = EngineLoop(
            self.executor,
            cache,
            vocabulary(),
            LoopOptions(
                SchedulerOptions(
                    context_length=model.context_length,
                    max_step_tokens=step_tokens,
                    max_running_requests=min(64, step_tokens),
                ),
                model.eos_ids,
            ),
            draw_seed=lambda: 7,
            handovers=self.handovers,
        )
        self.servicer = EngineServicer(
            self.loop, model, _native.namespace, options={"page_size": PAGE}, components=("executors=tiny (test)",),
            stream_buffer=stream_buffer, adapter_book=None if book is None else book(self.executor),
        )  # fmt: skip
        self.server = EngineServer(self.servicer, options)
        self.channel: Any = None
        self.stub: Any = None

    async def idle(self, limit_s: float = 20.0) -> None:
        """Wait until nothing is left running or waiting; then no page may be held."""
        await until(
            lambda: (lambda s: s.running == s.waiting == s.pages_protected == s.pages_private == 0)(self.loop.stats()),
            limit_s,
        )
        await asyncio.to_thread(self.loop.audit)


@contextlib.asynccontextmanager
async def served(
    *,
    model: ModelInfo = MODEL,
    pages: int = 256,
    stream_buffer: int = 16384,
    backends: Callable[[], dict[str, KvTransferBackend]] = built_in,
    wait_s: float = 20.0,
    step_tokens: int = 512,
    book: Callable[[TinyExecutor], AdapterBook] | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """A running server and a channel to it; afterwards the loop is closed and must hold nothing."""
    made = Served(model, pages, stream_buffer, ServerOptions(**options), backends, wait_s, step_tokens, book)
    pulls = made.handovers.puller = Pulls(made.handovers, PeerOptions(options.get("token", "")))
    made.loop.start()
    await made.server.start()
    made.channel = grpc.aio.insecure_channel(f"127.0.0.1:{made.server.port}")
    made.stub = engine_pb2_grpc.EngineStub(made.channel)
    try:
        yield made
    finally:
        await pulls.close()
        await made.channel.close()
        await made.server.stop()
        await asyncio.to_thread(made.loop.close)
        made.handovers.close()


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for a condition; fails past the limit."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.002)


def request(request_id: str = "r", prompt: Iterable[int] = (1, 2, 3), **sampling: Any) -> pb.GenerateRequest:
    """Greedy, eight tokens, unless told otherwise."""
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
    return pb.GenerateRequest(request_id=request_id, token_ids=prompt, sampling=pb.SamplingParams(**given))


def changed(**fields: Any) -> ModelInfo:
    """The tiny model with other facts."""
    return replace(MODEL, **fields)


class Attached:
    """The gateway's side of one Attach stream."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Attach()

    async def hello(self) -> pb.Welcome:
        """Greet and return the answer."""
        await self.call.write(pb.AttachRequest(hello=pb.Hello(gateway_id="g", contract_revision=1)))
        answer = await self.call.read()
        return answer.welcome

    async def submit(self, handle: int, message: pb.GenerateRequest) -> None:
        """Send a request."""
        await self.call.write(pb.AttachRequest(submit=pb.Submit(handle=handle, request=message)))

    async def cancel(self, handle: int) -> None:
        """Cancel a request."""
        await self.call.write(pb.AttachRequest(cancel=pb.Cancel(handle=handle)))

    async def collect(self, handles: Iterable[int], sequences: int = 1) -> dict[int, list[pb.SequenceDelta]]:
        """All deltas by handle until each has its terminal ones."""
        got: dict[int, list[pb.SequenceDelta]] = {handle: [] for handle in handles}
        left = {handle: sequences for handle in got}
        while left:
            frame = (await self.call.read()).frame
            for delta in frame.deltas:
                got[delta.handle].append(delta)
                ended = sequences if delta.HasField("error") else int(delta.HasField("finish"))
                left[delta.handle] -= ended
                if left[delta.handle] <= 0:
                    del left[delta.handle]
        return got


def tokens(deltas: Iterable[pb.SequenceDelta]) -> list[int]:
    """Ids of all deltas."""
    return [token for delta in deltas for token in delta.token_ids]


def contract_error(error: grpc.aio.AioRpcError) -> pb.Error:
    """The contract's error of a failed call."""
    for key, value in error.trailing_metadata() or ():
        if key == "branchline-error-bin":
            return pb.Error.FromString(value if isinstance(value, bytes) else value.encode())
    raise AssertionError("the status carries no contract error")
