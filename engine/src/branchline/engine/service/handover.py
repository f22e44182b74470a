"""Hand-overs on the wire: serves PullKv to other workers, and pulls from them.

Only carries: which pages may be read, and where they land, is decided on the loop's thread by what is posted there.
Event loop only, but for what says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from branchline import _native
from branchline.engine.errors import EngineError, InvalidArgument, Unavailable
from branchline.engine.handover import Handovers, KvTransferBackend, PullAsk, Receiver, TransferFailed
from branchline.engine.handover.base import FIELD, Pages
from branchline.engine.loop import EngineLoop
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.generated import engine_pb2_grpc
from branchline.engine.service.limits import MAX_CHUNK, MAX_MESSAGE
from branchline.engine.service.validate import refuse_unknown

logger = logging.getLogger(__name__)

PIECE = MAX_CHUNK  # bytes of payload a message
CHANNELS = 64  # connections to other workers that are kept


class _Outgoing:
    """Sender of one pull: from the loop's thread to the stream's writer."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[pb.PullKvResponse | EngineError] = asyncio.Queue()

    def accepted(self, backend: str, address: str) -> None:
        """See Sender."""
        self._put(pb.PullKvResponse(accepted=pb.PullAccepted(backend=backend, address=address)))

    def pages(self, pages: Pages) -> None:
        """See Sender."""
        payload = memoryview(pages.payload)
        for at in range(0, max(len(payload), 1), PIECE):
            piece = pb.KvPages(
                first_page=pages.first,
                count=pages.count,
                payload=bytes(payload[at : at + PIECE]),
                checksum=pages.checksum,
                more=at + PIECE < len(payload),
            )
            self._put(pb.PullKvResponse(pages=piece))

    def ended(self, pages: int) -> None:
        """See Sender."""
        self._put(pb.PullKvResponse(end=pb.PullEnd(pages=pages)))

    def failed(self, error: EngineError) -> None:
        """See Sender."""
        self._put(error)

    def _put(self, message: pb.PullKvResponse | EngineError) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is gone, and with it the stream
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)

    async def get(self) -> pb.PullKvResponse:
        """The next message. Raises what the pull failed with."""
        message = await self._messages.get()
        if isinstance(message, EngineError):
            raise message
        return message


async def serve(
    loop: EngineLoop, engine_id: str, messages: AsyncIterator[pb.PullKvRequest]
) -> AsyncGenerator[pb.PullKvResponse]:
    """The server's side of one pull. Leaving the iterator gives the room up."""
    handovers = loop.handovers
    if handovers is None:
        raise InvalidArgument("this worker hands no pages over", field=FIELD)
    first = await anext(aiter(messages), None)
    if first is None or first.WhichOneof("message") != "open":
        raise InvalidArgument("the first message must be open", field="open")
    refuse_unknown(first)
    ask, rooms, sender = _ask(first.open), handovers.rooms, _Outgoing()
    clock = loop.clock
    loop.post(lambda: rooms.open(ask, sender, clock()))
    reader = asyncio.create_task(_acknowledge(loop, rooms.acknowledge, ask.room, sender, messages))
    try:
        while True:
            message = await sender.get()
            if message.HasField("accepted"):
                message.accepted.engine_id = engine_id
            yield message
            if message.HasField("end"):
                await reader  # what was sent is held until it is acknowledged, or the puller has closed its side
                return
    finally:
        loop.post(lambda: rooms.leave(ask.room, sender))  # first: the call may be cancelled while this waits
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _acknowledge(
    loop: EngineLoop,
    acknowledge: Callable[[int, _Outgoing, int], None],
    room: int,
    sender: _Outgoing,
    messages: AsyncIterator[pb.PullKvRequest],
) -> None:
    async for message in messages:
        if message.WhichOneof("message") == "ack":
            pages = message.ack.pages
            loop.post(lambda pages=pages: acknowledge(room, sender, pages))  # type: ignore[misc]


def _ask(opened: pb.PullOpen) -> PullAsk:
    return PullAsk(
        opened.room,
        opened.numerics_id,
        opened.page_size,
        opened.page_bytes,
        opened.pages,
        opened.last_hash,
        opened.skip_pages,
        tuple(opened.backends),
    )


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How other workers are spoken to. Without `ca` in the clear; `cert` and `key` show who we are."""

    token: str = ""
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None


class Pulls:
    """Puller over PullKv. Made on the event loop; `pull` may be called on any thread."""

    def __init__(self, handovers: Handovers, options: PeerOptions) -> None:
        self._handovers = handovers
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._channels: dict[str, grpc.aio.Channel] = {}

    def pull(self, host: str, port: int, ask: PullAsk, receiver: Receiver) -> Callable[[], None]:
        """See Puller."""
        shown = f"[{host}]" if ":" in host else host
        running: Future[None] = asyncio.run_coroutine_threadsafe(
            self._pull(f"{shown}:{port}", ask, receiver), self._loop
        )
        return lambda: void(running.cancel())

    async def close(self) -> None:
        """Close all connections."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _pull(self, address: str, ask: PullAsk, receiver: Receiver) -> None:
        try:
            await self._receive(address, ask, receiver)
        except asyncio.CancelledError:
            raise
        except grpc.aio.AioRpcError as error:
            words = f"the prefill half did not hand its pages over: {error.code().name}: {error.details()}"
            receiver.failed(Unavailable(words, field=FIELD))
        except TransferFailed as error:
            receiver.failed(Unavailable(f"the prompt's pages did not come: {error}", field=FIELD))
        except Exception as error:
            logger.exception("a pull from %s failed", address)
            receiver.failed(Unavailable(f"the pull failed: {type(error).__name__}: {error}", field=FIELD))

    async def _receive(self, address: str, ask: PullAsk, receiver: Receiver) -> None:
        stub = engine_pb2_grpc.EngineStub(self._channel(address))  # type: ignore[no-untyped-call]
        token = self._options.token
        call = stub.PullKv(metadata=(("authorization", f"Bearer {token}"),) if token else None)
        try:
            await call.write(pb.PullKvRequest(open=_opened(ask)))
            backend: KvTransferBackend | None = None
            writing = asyncio.Lock()  # a call takes one write at a time
            source, pieces = "", bytearray()
            while (message := await call.read()) is not grpc.aio.EOF:
                match message.WhichOneof("message"):
                    case "accepted":
                        backend, source = self._chosen(message.accepted.backend), message.accepted.address
                    case "pages" if backend is not None:
                        pieces += message.pages.payload
                        if not message.pages.more:
                            payload, pieces = bytes(pieces), bytearray()
                            data = await _fetch(backend, source, payload, message.pages, ask.page_bytes)
                            done = self._acknowledger(call, writing, message.pages.first_page + message.pages.count)
                            receiver.pages(message.pages.first_page, message.pages.count, data, done)
                    case "end":
                        receiver.ended()
                        async with writing:
                            await call.done_writing()
                        return
                    case other:
                        raise TransferFailed(f"{other} came out of turn")
            raise TransferFailed("the stream ended before the pages had all come")
        finally:
            call.cancel()

    def _chosen(self, name: str) -> KvTransferBackend:
        if name not in self._handovers.backends:
            raise TransferFailed(f"the transfer backend {name!r} was not offered")
        return self._handovers.backends[name]

    def _acknowledger(self, call: Any, writing: asyncio.Lock, pages: int) -> Callable[[], None]:
        async def write() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                async with writing:
                    await call.write(pb.PullKvRequest(ack=pb.PullAck(pages=pages)))

        def done() -> None:
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(write(), self._loop)

        return done

    def _channel(self, address: str) -> grpc.aio.Channel:
        known = self._channels.pop(address, None)
        if known is None:
            known = self._connect(address)
        self._channels[address] = known  # the latest last
        if len(self._channels) > CHANNELS:
            oldest = self._channels.pop(next(iter(self._channels)))
            self._closing = asyncio.create_task(oldest.close(grace=60))
        return known

    def _connect(self, address: str) -> grpc.aio.Channel:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.enable_retries", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
        ]
        given = self._options
        if given.ca is None:
            return grpc.aio.insecure_channel(address, options)
        credentials = grpc.ssl_channel_credentials(given.ca, given.key, given.cert)
        return grpc.aio.secure_channel(address, credentials, options)


def _opened(ask: PullAsk) -> pb.PullOpen:
    return pb.PullOpen(
        room=ask.room,
        numerics_id=ask.numerics_id,
        page_size=ask.page_size,
        page_bytes=ask.page_bytes,
        pages=ask.pages,
        last_hash=ask.last_hash,
        skip_pages=ask.skip,
        backends=ask.backends,
    )


async def _fetch(backend: KvTransferBackend, source: str, payload: bytes, pages: pb.KvPages, page_bytes: int) -> bytes:
    """The pages' bytes, checked."""
    size = pages.count * page_bytes
    if backend.inline:
        data = backend.fetch(source, payload, size)
    else:
        data = await asyncio.to_thread(backend.fetch, source, payload, size)
    if len(data) != size:
        raise TransferFailed(f"{len(data)} bytes came for {pages.count} pages of {page_bytes}")
    if _native.checksum(data) != pages.checksum:
        raise TransferFailed(f"pages from {pages.first_page} on have another checksum than they were sent with")
    return data


def void(_: object) -> None:
    """Nothing, of anything."""


def to_stats(handovers: Handovers | None) -> pb.HandoverStats:
    """The counters as GetServerInfo says them."""
    if handovers is None:
        return pb.HandoverStats()
    own = handovers.counters
    return pb.HandoverStats(
        rooms=own.rooms,
        pulls=own.pulls,
        sent_pages=own.sent_pages,
        received_pages=own.received_pages,
        failed_pulls=own.failed_pulls,
        expired_rooms=own.expired_rooms,
        received_bytes=own.received_bytes,
    )
