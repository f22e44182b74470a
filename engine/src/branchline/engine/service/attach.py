"""One Attach stream: requests in, one frame a step out. Generate is the same with a single request.

Owns handles and the stream's outbox; aborts all its requests when it ends, however it ends. Must not
interpret requests (validate) nor build messages (wire).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError, Message

from branchline.engine.errors import EngineError, InternalError, InvalidArgument, ResourceExhausted
from branchline.engine.loop import EngineLoop
from branchline.engine.service import wire
from branchline.engine.service.backlog import MAX_LAG, Backlog
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.limits import CONTRACT_REVISION, MAX_CHUNK
from branchline.engine.service.outbox import Outbox
from branchline.engine.service.validate import refuse_unknown
from branchline.engine.types import Delta, Request

logger = logging.getLogger(__name__)


class Host(Protocol):
    """What a stream needs of the service it belongs to."""

    loop: EngineLoop
    engine_id: str
    stream_buffer: int  # KiB
    streams: set[Stream]

    def validate(self, message: pb.GenerateRequest) -> Request:
        """The request, or an EngineError. Unavailable while draining."""


@dataclass(slots=True)
class _Live:
    handle: int
    remaining: int  # sequences without their finish


class Stream:
    """Requests of one peer and the frames that answer them. Event loop only, but for `take`."""

    def __init__(self, host: Host, name: str) -> None:
        self._host = host
        self._name = name
        self._live: dict[str, _Live] = {}
        self._ids: dict[int, str] = {}  # request ids by handle
        self._step = 0
        self._sink = self.take  # one object, so that the loop recognises the stream
        self.outbox: Outbox[pb.AttachResponse] = Outbox(None, self._overflow, host.stream_buffer << 10)
        self._backlog = Backlog()
        host.streams.add(self)

    def submit(self, handle: int, message: pb.GenerateRequest, *envelopes: Message) -> None:
        """Queue a request; a refusal, also for unknown fields of its envelopes, becomes its terminal delta."""
        try:
            for envelope in envelopes:
                refuse_unknown(envelope, deep=False)
            request = self._host.validate(message)
            if request.request_id in self._live:
                raise InvalidArgument(
                    f"request_id {request.request_id!r} is in use: give every live request its own", field="request_id"
                )
            self._host.loop.submit(request, self._sink)
            self._live[request.request_id] = _Live(handle, request.sampling.n)
            self._ids[handle] = request.request_id
        except Exception as error:
            self._send([pb.SequenceDelta(handle=handle, error=wire.to_error(error))])

    def cancel(self, handle: int) -> None:
        """Abort one request; its terminal delta still comes. One that has ended is no error."""
        request_id = self._ids.get(handle)
        if request_id is not None:
            self._host.loop.abort(request_id)

    def is_live(self, handle: int) -> bool:
        """Whether a request of this stream has the handle."""
        return handle in self._ids

    @property
    def is_idle(self) -> bool:
        """Whether every request has had its terminal delta."""
        return not self._live

    def take(self, step: int, deltas: list[Delta]) -> None:
        """The loop's sink: called on its thread, once a step."""
        self.outbox.post(self._deliver, step, deltas)

    def _deliver(self, step: int, deltas: list[Delta]) -> None:
        self._step = step
        made: list[pb.SequenceDelta] = []
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None:
                continue
            live.remaining -= delta.finish is not None
            if delta.error is not None or live.remaining <= 0:
                self._forget(delta.request_id, live)
            made += self._converted(delta, live.handle)
        self._send(made)

    def _forget(self, request_id: str, live: _Live) -> None:
        del self._live[request_id]
        del self._ids[live.handle]

    def _converted(self, delta: Delta, handle: int) -> list[pb.SequenceDelta]:
        try:
            return wire.to_deltas(delta, handle, self._host.engine_id)
        except Exception as error:  # a delta of ours that proto refuses costs its own request only
            self._host.loop.abort(delta.request_id)
            if delta.request_id in self._live:
                self._forget(delta.request_id, self._live[delta.request_id])
            return [pb.SequenceDelta(handle=handle, index=delta.index, error=wire.to_error(error))]

    def _send(self, deltas: list[pb.SequenceDelta]) -> None:
        """One frame, or several of about 1 MiB if the step has much to say; several steps in one if the peer lags."""
        tail = self.outbox.tail
        if tail is not None and self.outbox.pending >= MAX_LAG:
            message, size = tail
            added = sum(delta.ByteSize() + 8 for delta in deltas)
            if size + added <= MAX_CHUNK:
                self._backlog.merge(message, self._step, deltas)
                self.outbox.grow(added)
                return
        frame = pb.StepFrame(step=self._step)
        size = 0
        for delta in deltas:
            bytes_ = delta.ByteSize() if len(deltas) > 1 else 0
            if frame.deltas and size + bytes_ > MAX_CHUNK:
                self.outbox.put(pb.AttachResponse(frame=frame))
                frame, size = pb.StepFrame(step=self._step), 0
            frame.deltas.append(delta)
            size += bytes_
        if frame.deltas:
            self.outbox.put(pb.AttachResponse(frame=frame))

    def _overflow(self) -> EngineError:
        logger.warning("stream of %s does not drain: ended, %d requests aborted", self._name, len(self._live))
        self._host.loop.abort_sink(self._sink)
        # The error is sent once the peer reads again; until then the stream holds the one message being written.
        return ResourceExhausted(
            f"the peer left {self._host.stream_buffer} KiB of answers unread: its requests are aborted; attach again, "
            "or raise --stream-buffer"
        )

    def close(self) -> None:
        """Abort everything that is still alive here and write no more."""
        self.outbox.close()
        self._host.streams.discard(self)
        if self._live:
            self._host.loop.abort_sink(self._sink)


async def attach(host: Host, messages: AsyncIterator[pb.AttachRequest], peer: str) -> AsyncGenerator[pb.AttachResponse]:
    """Frames until the peer closes its side, fails or goes. Raises the EngineError that ends the stream."""
    stream = Stream(host, peer)
    reader = asyncio.create_task(_read(host, stream, messages), name=f"attach reader of {peer}")
    try:
        while (message := await stream.outbox.get()) is not None:
            yield message
    finally:
        stream.close()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _read(host: Host, stream: Stream, messages: AsyncIterator[pb.AttachRequest]) -> None:
    greeted = False
    try:
        async for message in messages:
            greeted = _handle(host, stream, message, greeted)
        stream.outbox.close()
    except EngineError as error:
        stream.outbox.fail(error)
    except asyncio.CancelledError:
        raise
    except DecodeError as error:
        stream.outbox.fail(InvalidArgument(f"the stream holds bytes that are no AttachRequest: {error}"))
    except Exception as error:
        logger.exception("attach reader failed")
        stream.outbox.fail(InternalError(f"the stream's reader failed with {type(error).__name__}"))


def _handle(host: Host, stream: Stream, message: pb.AttachRequest, greeted: bool) -> bool:
    """Serve one message; whether the peer has greeted. Raises what must end the stream."""
    kind = message.WhichOneof("message")
    if kind != "submit":
        refuse_unknown(message)
    match kind:
        case "hello" if not greeted:
            welcome = pb.Welcome(engine_id=host.engine_id, contract_revision=CONTRACT_REVISION)
            stream.outbox.put(pb.AttachResponse(welcome=welcome))
        case "submit" if greeted:
            handle = message.submit.handle
            if stream.is_live(handle):
                raise InvalidArgument(f"handle {handle} is in use on this stream: never reuse one", field="handle")
            stream.submit(handle, message.submit.request, message, message.submit)
        case "cancel" if greeted:
            stream.cancel(message.cancel.handle)
        case "hello":
            raise InvalidArgument("hello came twice: greet once, as the stream's first message", field="hello")
        case None:
            raise InvalidArgument("the message is empty: set hello, submit or cancel", field="message")
        case _:
            raise InvalidArgument(f"{kind} came before hello: greet first", field=kind)
    return True


async def generate(host: Host, message: pb.GenerateRequest, peer: str) -> AsyncGenerator[pb.GenerateResponse]:
    """One request's deltas. Raises its error instead of sending it; leaving the iterator aborts the request."""
    stream = Stream(host, peer)
    try:
        stream.submit(0, message)
        while (answer := await stream.outbox.get()) is not None:
            for delta in answer.frame.deltas:
                if delta.HasField("error"):
                    raise RequestFailed(delta.error)
            yield pb.GenerateResponse(deltas=answer.frame.deltas)
            if stream.is_idle and not stream.outbox.pending:
                return
    finally:
        stream.close()


class RequestFailed(Exception):
    """The terminal error of a Generate request, as the contract's message."""

    def __init__(self, error: pb.Error) -> None:
        super().__init__(error.message)
        self.error = error
