"""Loaded LoRA adapters by name: what requests may name, how many live requests hold each, when one is freed.

An unloaded name is gone at once; its weights stay until the last request that holds them has ended. Reading files is
done by whoever calls `load`, on a thread of its own; everything else is quick and may be called on any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from branchline.engine.config import ADAPTER_NAME
from branchline.engine.errors import EngineError, InvalidArgument, LoadError, NotFound, ResourceExhausted, Unimplemented
from branchline.engine.model.adapter import Adapter, AdapterExecutor, read_adapter
from branchline.engine.model.spec import ModelSpec
from branchline.engine.service.generated import engine_pb2 as pb

FIELD = "cache_namespace.adapter"
MAX_PATH_BYTES = 4096


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One adapter that an executor has under `number`. `hold` and `let_go` count the requests that live with it."""

    name: str
    number: int
    adapter: Adapter
    free: Callable[[int], None]
    running: int = 0
    unloaded: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self) -> None:
        """See AdapterUse."""
        with self.lock:
            if self.unloaded:
                raise NotFound(f"adapter {self.name!r} was unloaded: load it again, or leave it out", field=FIELD)
            self.running += 1

    def let_go(self) -> None:
        """See AdapterUse."""
        with self.lock:
            self.running -= 1
            over = self.unloaded and self.running == 0
        if over:
            self.free(self.number)

    def unload(self) -> int:
        """No new request holds it; how many still do."""
        with self.lock:
            self.unloaded = True
            running = self.running
        if running == 0:
            self.free(self.number)
        return running


class AdapterBook:
    """The adapters of one worker. `executor` is refused by name where it runs none."""

    def __init__(self, executor: object, executor_name: str, spec: ModelSpec, *, limit: int, max_rank: int) -> None:
        self._executor = executor if isinstance(executor, AdapterExecutor) else None
        self._executor_name = executor_name
        self._spec = spec
        self._limit = limit
        self._max_rank = max_rank
        self._lock = threading.Lock()
        self._loading = threading.Lock()  # one load at a time, so that the limit holds
        self._named: dict[str, LoadedAdapter] = {}
        self._numbers: set[int] = set()  # in the executor, those that only end included
        self._last = 0
        self.version = 0

    @property
    def limit(self) -> int:
        """Most adapters that may be loaded together; 0 where none can be."""
        return 0 if self._executor is None else self._limit

    def load(self, name: str, path: str) -> LoadedAdapter:
        """Read an adapter and give it to the executor; the same one under the same name again is no error.

        Raises Unimplemented where none can run, InvalidArgument or LoadError for a bad name, file or rank,
        ResourceExhausted if there is no place.
        """
        executor = self._runs()
        if not ADAPTER_NAME.fullmatch(name):
            raise InvalidArgument(
                f"name {name!r} is no adapter's: give a letter or digit, then letters, digits, '.', '_' or '-', at "
                "most 128 in all",
                field="name",
            )
        if not 1 <= len(path.encode()) <= MAX_PATH_BYTES or "\0" in path:
            raise InvalidArgument(f"path {path[:80]!r} is none: give the adapter's folder", field="path")
        with self._loading:
            adapter = read_adapter(path, self._spec)
            if adapter.rank > self._max_rank:
                raise InvalidArgument(
                    f"adapter {path} has rank {adapter.rank} and max-adapter-rank is {self._max_rank}: raise that",
                    field="path",
                )
            known = self._named.get(name)
            if known is not None:
                if known.adapter.digest == adapter.digest:
                    return known
                raise InvalidArgument(
                    f"name {name!r} is that of another adapter, from {known.adapter.path}: unload it first, or give "
                    "another name",
                    field="name",
                )
            self._check_place()
            self._last += 1
            executor.load_adapter(self._last, adapter)
            made = LoadedAdapter(name, self._last, adapter, self._free)
            with self._lock:
                self._numbers.add(made.number)
                self._named[name] = made
                self.version += 1
            return made

    def unload(self, name: str) -> int:
        """Take a name away; how many requests still run with its adapter. Raises NotFound."""
        self._runs()
        with self._lock:
            loaded = self._named.pop(name, None)
            if loaded is None:
                raise NotFound(f"adapter {name!r} is not loaded: {self._listed()}", field="name")
            self.version += 1
        return loaded.unload()

    def find(self, name: str, digest: str | None = None) -> LoadedAdapter:
        """The adapter that a request names. Raises NotFound, or Unimplemented where none can run."""
        self._runs()
        loaded = self._named.get(name)
        if loaded is None:
            raise NotFound(f"adapter {name!r} is not loaded: {self._listed()}", field=FIELD)
        if digest is not None and digest != loaded.adapter.digest:
            raise NotFound(
                f"adapter {name!r} has digest {loaded.adapter.digest} here, and {digest!r} is asked for: it was loaded "
                "anew",
                field="cache_namespace.adapter_digest",
            )
        return loaded

    def all(self) -> list[LoadedAdapter]:
        """What requests may name, by name."""
        with self._lock:
            return [self._named[name] for name in sorted(self._named)]

    def _runs(self) -> AdapterExecutor:
        if self._executor is None:
            raise Unimplemented(
                f"the executor {self._executor_name} runs no adapters: start the worker with --executor torch",
                field=FIELD,
            )
        return self._executor

    def _check_place(self) -> None:
        with self._lock:
            loaded, ending = len(self._named), len(self._numbers) - len(self._named)
        if loaded + ending >= self._limit:
            more = f" and {ending} unloaded ones still have requests" if ending else ""
            raise ResourceExhausted(
                f"{loaded} adapters are loaded{more}, and max-adapters is {self._limit}: unload one, or raise that",
                field="name",
            )

    def _free(self, number: int) -> None:
        assert self._executor is not None, "it loaded the adapter"
        self._executor.unload_adapter(number)
        with self._lock:
            self._numbers.discard(number)

    def _listed(self) -> str:
        names = sorted(self._named)
        return f"there are {', '.join(names)}" if names else "no adapter is loaded, load it first"


def load_given(book: AdapterBook, given: Iterable[str]) -> None:
    """The adapters of the options, each NAME=PATH. Raises LoadError."""
    for one in given:
        name, _, path = one.partition("=")
        try:
            book.load(name, path)
        except EngineError as error:
            raise LoadError(f"adapter {one!r} can't be loaded: {error.message}", field="adapter") from error


async def load(book: AdapterBook, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
    """The RPC; files are read beside the event loop."""
    return pb.LoadAdapterResponse(adapter=_told(await asyncio.to_thread(book.load, request.name, request.path)))


async def unload(book: AdapterBook, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
    """The RPC."""
    return pb.UnloadAdapterResponse(running=book.unload(request.name))


async def listed(book: AdapterBook, request: pb.ListAdaptersRequest) -> pb.ListAdaptersResponse:
    """The RPC."""
    version = book.version  # first: a change meanwhile is seen once more, not missed
    return pb.ListAdaptersResponse(adapters=map(_told, book.all()), version=version, limit=book.limit)


def _told(loaded: LoadedAdapter) -> pb.Adapter:
    return pb.Adapter(
        name=loaded.name,
        path=str(loaded.adapter.path),
        digest=loaded.adapter.digest,
        rank=loaded.adapter.rank,
        running=loaded.running,
    )
