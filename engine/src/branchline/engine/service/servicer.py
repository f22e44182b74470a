"""The Engine service: each method converts, calls the loop and converts back.

Owns nothing but the wiring of its parts; runs on the event loop. What waits for the end of a step goes to a
thread. Errors become gRPC statuses here, with the contract's Error in `branchline-error-bin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from branchline import __version__
from branchline.engine.errors import EngineError, InvalidArgument, Unavailable, Unimplemented
from branchline.engine.loop import EngineLoop
from branchline.engine.scheduler.load import LoopStats
from branchline.engine.service import adapters, attach, events, handover, leases, scoring, tree, wire
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.generated import engine_pb2_grpc
from branchline.engine.service.limits import MAX_CHUNK, ModelInfo
from branchline.engine.service.validate import NamespaceEncoder, no_adapters, refuse_unknown, to_request
from branchline.engine.types import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]
ERROR_KEY = "branchline-error-bin"

STATUSES = {
    pb.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    pb.ERROR_CODE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    pb.ERROR_CODE_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    pb.ERROR_CODE_RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.ERROR_CODE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    pb.ERROR_CODE_DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    pb.ERROR_CODE_UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    pb.ERROR_CODE_INTERNAL: grpc.StatusCode.INTERNAL,
    pb.ERROR_CODE_CANCELLED: grpc.StatusCode.CANCELLED,
}


class EngineServicer(engine_pb2_grpc.EngineServicer):  # type: ignore[misc, unused-ignore]
    """One worker's methods. `options` and `components` are shown by GetServerInfo as they are."""

    def __init__(
        self,
        loop: EngineLoop,
        model: ModelInfo,
        encode: NamespaceEncoder,
        *,
        options: dict[str, object] | None = None,
        components: Sequence[str] = (),
        stream_buffer: int = 16384,
        adapter_book: adapters.AdapterBook | None = None,
    ) -> None:
        self.loop = loop
        self.streams: set[attach.Stream] = set()
        self.engine_id = uuid.uuid4().hex
        self.stream_buffer = stream_buffer
        self.draining = False
        self._adapters = adapter_book
        self._model = model
        self._encode = encode
        self._options = json.dumps(options or {}, default=str, sort_keys=True)
        self._components = components
        self._started = time.monotonic()

    def validate(self, message: pb.GenerateRequest) -> Request:
        """The request, or an EngineError; Unavailable while draining."""
        if self.draining:
            raise Unavailable("the worker is draining: send the request to another one", retry_after_ms=1000)
        find = no_adapters if self._adapters is None else self._adapters.find
        return to_request(message, self._model, self._encode, find)

    @property
    def _book(self) -> adapters.AdapterBook:
        if self._adapters is None:
            raise Unimplemented("this worker runs no adapters: leave adapter out", field=adapters.FIELD)
        return self._adapters

    def end_streams(self) -> None:
        """End every stream once what it still holds is written."""
        for stream in tuple(self.streams):
            stream.outbox.fail(Unavailable("the worker is shutting down: attach to another one"))

    # ---- requests -----------------------------------------------------------------------------

    async def Attach(self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context) -> None:
        """All requests of one gateway; see attach.attach."""
        await _pump(attach.attach(self, request_iterator, context.peer()), context)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """One request; dropping the call aborts it."""
        await _pump(attach.generate(self, request, context.peer()), context)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End one request by its exact id, or all."""
        await self._known(request, context)
        if request.abort_all:
            return pb.AbortResponse(aborted=self.loop.abort_all())
        if not request.request_id:
            missing = InvalidArgument("request_id is empty: give the id, or set abort_all", field="request_id")
            await refuse(context, wire.to_error(missing))
        return pb.AbortResponse(aborted=self.loop.abort(request.request_id))

    # ---- leases ---------------------------------------------------------------------------------

    async def AcquireLease(self, request: pb.AcquireLeaseRequest, context: Context) -> pb.AcquireLeaseResponse:
        """Compute a prefix if need be and hold it."""
        return await self._answered(request, context, leases.acquire(self, request, context.peer()))

    async def RenewLease(self, request: pb.RenewLeaseRequest, context: Context) -> pb.RenewLeaseResponse:
        """Let a lease end later, or earlier."""
        return await self._answered(request, context, leases.renew(self, request))

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Context) -> pb.ReleaseLeaseResponse:
        """End a lease."""
        return await self._answered(request, context, leases.release(self, request))

    # ---- adapters -------------------------------------------------------------------------------

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Read an adapter and make it ready."""
        return await self._answered(request, context, self._with_book(adapters.load, request))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Take an adapter's name away; its requests end with it."""
        return await self._answered(request, context, self._with_book(adapters.unload, request))

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        """What requests may name."""
        if self._adapters is None:
            await self._known(request, context)
            return pb.ListAdaptersResponse()
        return await self._answered(request, context, adapters.listed(self._adapters, request))

    async def _with_book(
        self, answer: Callable[[adapters.AdapterBook, Any], Coroutine[Any, Any, T]], request: Any
    ) -> T:
        return await answer(self._book, request)

    # ---- information --------------------------------------------------------------------------

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """What is loaded."""
        await self._known(request, context)
        model = self._model
        return pb.GetModelInfoResponse(
            model_path=model.model_path,
            served_model_names=model.served_names,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=model.eos_ids,
            bos_token_id=model.bos_id,
            page_size=model.page_size,
            dtype=model.dtype,
            numerics_id=model.numerics_id,
            weight_version=model.weight_version,
            default_sampling=wire.to_sampling(model.default_sampling),
            max_request_tokens=model.max_request_tokens,
            executor=model.executor,
            output_promise=model.output_promise,
            role=model.role,
            tasks=model.tasks,
            embedding_size=model.embedding_size,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Options, counters and cache statistics."""
        await self._known(request, context)
        stats = self.loop.stats()
        return pb.GetServerInfoResponse(
            version=__version__,
            engine_id=self.engine_id,
            uptime_s=time.monotonic() - self._started,
            options_json=self._options,
            cache=wire.to_cache_stats(stats),
            load=self._load(stats),
            steps=stats.steps,
            scheduler_ms_per_step=stats.scheduler_ms_per_step,
            components=self._components,
            speculative=pb.SpeculativeStats(
                steps=stats.draft_steps, drafted_tokens=stats.drafted_tokens, accepted_tokens=stats.accepted_tokens
            ),
            handover=handover.to_stats(self.loop.handovers),
        )

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> None:
        """The manifest, then tokenizer.json in pieces."""
        await self._known(request, context)
        await _pump(self._tokenizer(), context)

    async def _tokenizer(self) -> AsyncGenerator[pb.GetTokenizerResponse]:
        yield pb.GetTokenizerResponse(manifest=self._manifest)
        content = self._model.tokenizer_json
        for begin in range(0, len(content), MAX_CHUNK - 64):
            yield pb.GetTokenizerResponse(tokenizer_json=content[begin : begin + MAX_CHUNK - 64])

    @functools.cached_property
    def _manifest(self) -> pb.TokenizerManifest:
        model = self._model
        return pb.TokenizerManifest(
            tokenizer_json_bytes=len(model.tokenizer_json),
            tokenizer_json_sha256=hashlib.sha256(model.tokenizer_json).digest(),
            chat_template=model.chat_template,
            eos_token_ids=model.eos_ids,
            bos_token=model.bos_token,
            eos_token=model.eos_token,
            pad_token=model.pad_token,
            add_special_tokens=model.add_special_tokens,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """A cheap load report."""
        await self._known(request, context)
        return self._load(self.loop.stats())

    async def SubscribeKvEvents(self, request: pb.SubscribeKvEventsRequest, context: Context) -> None:
        """Snapshot, then batches; see events.subscribe."""
        await self._known(request, context)
        await _pump(events.subscribe(self.loop, self._model.page_size, request.include_token_ids), context)

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        """Drop every cached page that no request holds."""
        await self._known(request, context)
        flushed = await asyncio.to_thread(self.loop.flush)  # waits for the end of a step
        stats = self.loop.stats()
        return pb.FlushCacheResponse(flushed_pages=flushed, held_pages=stats.pages_protected + stats.pages_private)

    async def GetCacheTree(self, request: pb.GetCacheTreeRequest, context: Context) -> pb.GetCacheTreeResponse:
        """A piece of the radix tree; ids of tokens only if asked for."""
        return await self._answered(request, context, tree.piece(self.loop, request))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Logprobs of several continuations of one prefix."""
        return await self._answered(request, context, scoring.score(self, request, context.peer()))

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Refused: a model that generates has no vectors to give."""
        name = self._model.served_names[0]
        await refuse(
            context, wire.to_error(Unimplemented(f"model {name!r} generates and does not embed", field="model"))
        )

    async def PullKv(self, request_iterator: AsyncIterator[pb.PullKvRequest], context: Context) -> None:
        """The pages of a prompt that is computed here, for the worker that decodes it."""
        await _pump(handover.serve(self.loop, self.engine_id, request_iterator), context)

    def _load(self, stats: LoopStats) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(
            running=stats.running,
            waiting=stats.waiting,
            waiting_uncached_tokens=stats.waiting_uncached_tokens,
            pages_used=stats.pages_protected + stats.pages_private,
            pages_total=stats.pages_total,
            queue_age_ms=stats.queue_age_ms,
            step_age_ms=stats.step_age_ms,
            adapters_version=0 if self._adapters is None else self._adapters.version,
        )

    async def _answered(self, request: Any, context: Context, answer: Coroutine[Any, Any, T]) -> T:
        """The answer, or the refusal of the request."""
        try:
            refuse_unknown(request)
        except EngineError as error:
            answer.close()
            await refuse(context, wire.to_error(error))
        try:
            return await answer
        except attach.RequestFailed as failure:
            await refuse(context, failure.error)
        except EngineError as error:
            await refuse(context, wire.to_error(error))

    async def _known(self, request: Any, context: Context) -> None:
        try:
            refuse_unknown(request)
        except EngineError as error:
            await refuse(context, wire.to_error(error))


async def _pump(messages: AsyncGenerator[Any], context: Context) -> None:
    """Write every message. However it ends, the generator is closed before this returns."""
    try:
        async with contextlib.aclosing(messages):
            async for message in messages:
                await context.write(message)
    except attach.RequestFailed as failure:
        await refuse(context, failure.error)
    except EngineError as error:
        await refuse(context, wire.to_error(error))
    except Exception:
        if not context.cancelled() and not context.done():
            raise
        logger.debug("the peer %s left while a message was written", context.peer())


async def refuse(context: Context, error: pb.Error) -> NoReturn:
    """End the call with the status of the error's code and the error itself in the trailing metadata."""
    status = STATUSES.get(error.code, grpc.StatusCode.INTERNAL)
    await context.abort(status, error.message, ((ERROR_KEY, error.SerializeToString()),))
    raise AssertionError("abort raises")
