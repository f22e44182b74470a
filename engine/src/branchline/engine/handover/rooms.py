"""The prefill half: a room for each prompt whose pages another worker will pull.

A room locks its prompt's pages in the tree from the moment they are computed until they were pulled, the puller has
left, or its time is over; so no page is handed out while it may be read. Pages are copied out between steps, at most
a window ahead of what the puller has acknowledged. Loop's thread only; reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from branchline.engine.cache import RadixCacheBackend
from branchline.engine.errors import EngineError, InvalidArgument, NotFound, Unavailable
from branchline.engine.handover.base import FIELD, Counters, KvTransferBackend, Pages, PullAsk, Sender
from branchline.engine.types import PageExecutor

PIECE_BYTES = 1 << 20  # read at once, or one page if that is larger


@dataclass(slots=True)
class Pull:
    """Whoever empties a room."""

    ask: PullAsk
    sender: Sender
    backend: KvTransferBackend
    sent: int  # pages, skipped ones included
    held: deque[tuple[int, bytes]] = field(default_factory=deque)  # (last page + 1, payload) not acknowledged


@dataclass(slots=True)
class Room:
    """One prompt. `pages` are those of the tree that are computed so far, all under the lock of `node`."""

    number: int
    request_id: str
    namespace: bytes
    token_ids: tuple[int, ...]
    hashes: Sequence[int]
    node: int | None = None
    pages: list[int] = field(default_factory=list)
    computing: bool = True
    expires_s: float | None = None  # set while nobody pulls and nothing is computed
    pull: Pull | None = None


class RoomBook:
    """Rooms by number. Every lock that one takes is given back by `_close`, on every way out."""

    def __init__(
        self,
        cache: RadixCacheBackend,
        executor: PageExecutor,
        backends: Mapping[str, KvTransferBackend],
        counters: Counters,
        checksum: Callable[[bytes], int],
        timeout_s: float,
    ) -> None:
        self._cache = cache
        self._executor = executor
        self._backends = backends
        self._counters = counters
        self._checksum = checksum
        self._timeout_s = timeout_s
        self._rooms: dict[int, Room] = {}
        self._requests: dict[str, Room] = {}
        self._early: dict[int, tuple[PullAsk, Sender, float]] = {}  # pulls whose request has not come yet

    @property
    def next_expiry_s(self) -> float | None:
        """Nothing runs out before; None if nothing ever will."""
        times = [room.expires_s for room in self._rooms.values() if room.expires_s is not None]
        times += [until for _, _, until in self._early.values()]
        return min(times, default=None)

    def pages(self) -> set[int]:
        """Pages under the rooms' locks."""
        return {page for room in self._rooms.values() for page in room.pages}

    # ---- the request that computes --------------------------------------------------------------

    def begin(
        self, number: int, request_id: str, namespace: bytes, ids: tuple[int, ...], hashes: Sequence[int]
    ) -> None:
        """A prompt will be computed for this room. Raises InvalidArgument if the room is taken."""
        if number in self._rooms:
            raise InvalidArgument(
                f"bootstrap_room {number} is in use; give every live request its own", field=f"{FIELD}.bootstrap_room"
            )
        room = self._rooms[number] = self._requests[request_id] = Room(number, request_id, namespace, ids, hashes)
        self._counters.rooms = len(self._rooms)
        early = self._early.pop(number, None)
        if early is not None:
            self._attach(room, early[0], early[1])

    def computed(self, request_id: str, count: int) -> None:
        """The first `count` tokens of the request are computed and their whole pages in the tree."""
        room = self._requests.get(request_id)
        if room is None:
            return
        node, pages = self._cache.match(room.namespace, room.token_ids, count)
        if len(pages) <= len(room.pages):
            return
        self._cache.lock(node)
        if room.node is not None:
            self._cache.unlock(room.node)
        room.node, room.pages = node, pages
        self._pump(room)

    def ended(self, request_id: str, now: float) -> None:
        """The request has ended, well or not. Its pages wait for the puller if they are all there."""
        room = self._requests.pop(request_id, None)
        if room is None or room.number not in self._rooms:
            return
        room.computing = False
        if len(room.pages) < _wanted(len(room.token_ids), self._executor.page_size):
            self._fail(room, Unavailable("the prompt's computation has ended early; try again", field=FIELD))
        elif room.pull is None:
            room.expires_s = now + self._timeout_s

    def call_off(self, request_id: str | None) -> None:
        """Nobody will come for a request's pages; None for all. What is being pulled already goes on. Idempotent."""
        for room in list(self._rooms.values()):
            if room.pull is None and request_id in (None, room.request_id):
                self._close(room)

    # ---- the worker that pulls ------------------------------------------------------------------

    def open(self, ask: PullAsk, sender: Sender, now: float) -> None:
        """Somebody wants a room's pages; it may come before its request."""
        room = self._rooms.get(ask.room)
        if (room is not None and room.pull is not None) or ask.room in self._early:
            sender.failed(InvalidArgument(f"room {ask.room} is being pulled by another one", field=FIELD))
        elif room is None:
            self._early[ask.room] = (ask, sender, now + self._timeout_s)
        else:
            self._attach(room, ask, sender)

    def acknowledge(self, number: int, sender: Sender, pages: int) -> None:
        """So many pages from the prompt's start have come over."""
        room = self._of(number, sender)
        if room is None or room.pull is None:
            return
        pull = room.pull
        while pull.held and pull.held[0][0] <= pages:
            pull.backend.drop(pull.held.popleft()[1])
        if not pull.held and pull.sent >= pull.ask.pages:
            self._close(room)
        else:
            self._pump(room)

    def leave(self, number: int, sender: Sender) -> None:
        """The puller has gone: nobody else will come to its room. Idempotent."""
        early = self._early.get(number)
        if early is not None and early[1] is sender:
            del self._early[number]
        room = self._of(number, sender)
        if room is not None:
            self._close(room)

    # ---- time -----------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Give up what nobody came for in time."""
        for number, (_, sender, until) in list(self._early.items()):
            if until <= now:
                del self._early[number]
                sender.failed(NotFound(f"no request came for room {number} in time", field=FIELD))
        for room in list(self._rooms.values()):
            if room.expires_s is not None and room.expires_s <= now:
                self._counters.expired_rooms += 1
                self._close(room)

    def clear(self, error: EngineError) -> None:
        """Fail all rooms."""
        for room in list(self._rooms.values()):
            self._fail(room, error)
        for _, sender, _ in self._early.values():
            sender.failed(error)
        self._early.clear()

    # ---- inside ---------------------------------------------------------------------------------

    def _of(self, number: int, sender: Sender) -> Room | None:
        room = self._rooms.get(number)
        return room if room is not None and room.pull is not None and room.pull.sender is sender else None

    def _attach(self, room: Room, ask: PullAsk, sender: Sender) -> None:
        fault = self._fault(room, ask)
        name = next((name for name in ask.backends if name in self._backends), None)
        if fault or name is None:
            words = fault or f"none of the transfer backends {', '.join(ask.backends) or '(none)'} is here"
            sender.failed(InvalidArgument(words, field=FIELD))
            return
        room.expires_s = None
        room.pull = Pull(ask, sender, self._backends[name], ask.skip)
        sender.accepted(name, self._backends[name].address)
        self._pump(room)

    def _fault(self, room: Room, ask: PullAsk) -> str:
        """Why these two must not exchange pages; empty if they may."""
        own = self._executor
        if (ask.numerics_id, ask.page_size, ask.page_bytes) != (own.numerics_id, own.page_size, own.page_bytes):
            return (
                f"numerics {ask.numerics_id} with pages of {ask.page_size} tokens in {ask.page_bytes} bytes can't use "
                f"pages of numerics {own.numerics_id}, {own.page_size} tokens, {own.page_bytes} bytes: start both "
                "workers with the same model, types and page size"
            )
        if not 0 <= ask.skip <= ask.pages <= len(room.hashes):
            return f"{ask.pages} pages from {ask.skip} on are wanted and the prompt has {len(room.hashes)}"
        if ask.pages and room.hashes[ask.pages - 1] != ask.last_hash:
            return f"room {room.number} is of another prompt or namespace"
        return ""

    def _pump(self, room: Room) -> None:
        """Send what is computed and has room in the backend."""
        pull = room.pull
        if pull is None:
            return
        size = self._executor.page_bytes
        step = max(1, PIECE_BYTES // size)
        ready = min(len(room.pages), pull.ask.pages)
        while pull.sent < ready:
            count = min(step, ready - pull.sent)
            data = self._executor.read_pages(room.pages[pull.sent : pull.sent + count])
            payload = pull.backend.hold(data)
            if payload is None:  # goes on with the next acknowledgement
                return
            pull.sender.pages(Pages(pull.sent, count, payload, self._checksum(data)))
            pull.sent += count
            pull.held.append((pull.sent, payload))
            self._counters.sent_pages += count
        if pull.sent >= pull.ask.pages:
            pull.sender.ended(pull.sent)
            if not pull.held:
                self._close(room)

    def _fail(self, room: Room, error: EngineError) -> None:
        pull = room.pull
        self._close(room)
        if pull is not None:
            pull.sender.failed(error)

    def _close(self, room: Room) -> None:
        """Give back all that a room holds. Its request may go on: it computes into the cache then."""
        del self._rooms[room.number]
        self._requests.pop(room.request_id, None)
        self._counters.rooms = len(self._rooms)
        pull, room.pull = room.pull, None
        if pull is not None:
            for _, payload in pull.held:
                pull.backend.drop(payload)
        node, room.node, room.pages = room.node, None, []
        if node is not None:
            self._cache.unlock(node)


def _wanted(tokens: int, page_size: int) -> int:
    """Whole pages of a prompt that its decode half can use: the last token is computed there."""
    return (tokens - 1) // page_size
