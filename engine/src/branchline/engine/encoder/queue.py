"""Requests for an encoder take turns on one thread, text by text, so that a long batch holds no short one up.

Owns the thread, the queue and its bounds. A request ends in its future: the results of all its texts, or one
EngineError. Cancelling the future stops it before its next text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from branchline.engine.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from branchline.engine.scheduler.load import LoopStats

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.float32]
Results = list[Array]


@dataclass(frozen=True, slots=True)
class Text:
    """One input as ids, and which of two texts each belongs to (empty: the first)."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """A request: its texts and what is done with each of them."""

    request_id: str
    texts: tuple[Text, ...]
    run: Callable[[Text], Array]
    deadline_s: float | None = None  # on the monotonic clock
    arrival_s: float = field(default_factory=time.monotonic)


class _Job:
    def __init__(self, work: Work) -> None:
        self.work = work
        self.results: Results = []
        self.future: Future[Results] = Future()

    def end(self, error: EngineError | None) -> None:
        """Settle the future; one that was cancelled meanwhile stays so."""
        try:
            if error is None:
                self.future.set_result(self.results)
            else:
                self.future.set_exception(error)
        except InvalidStateError:
            pass


class EncoderQueue:
    """Has the methods of the engine's loop that the service, its health and the watchdog ask for."""

    handovers = None

    def __init__(self, max_queued: int, observe: Callable[[float], None] | None = None) -> None:
        self._max_queued = max_queued
        self._observe = observe
        self._lock = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._live: dict[str, _Job] = {}
        self._began: float | None = None  # when the text at hand was begun
        self._closing = False
        self._ended = False
        self._texts = self._tokens = self._requests = 0
        self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, work: Work) -> Future[Results]:
        """Queue a request. Raises InvalidArgument, ResourceExhausted or Unavailable."""
        with self._lock:
            if self._closing:
                raise Unavailable("the worker is draining: send the request to another one", retry_after_ms=1000)
            if work.request_id in self._live:
                raise InvalidArgument(
                    f"request_id {work.request_id!r} is in use: give every live request its own", field="request_id"
                )
            waiting = sum(not job.results for job in self._jobs)
            if waiting > self._max_queued:
                raise ResourceExhausted(f"{waiting} requests wait already: try again later", retry_after_ms=1000)
            job = _Job(work)
            self._live[work.request_id] = job
            self._jobs.append(job)
            self._requests += 1
            self._lock.notify_all()
            return job.future

    def abort(self, request_id: str) -> int:
        """End a request before its next text; how many were alive: 0 or 1."""
        with self._lock:
            job = self._live.get(request_id)
        if job is None:
            return 0
        job.end(Cancelled("the request was aborted"))
        return 1

    def abort_all(self) -> int:
        """End every request; how many were alive."""
        with self._lock:
            names = list(self._live)
        return sum(self.abort(name) for name in names)

    def flush(self) -> int:
        """Nothing is cached."""
        return 0

    def give_up(self, words: str) -> None:
        """End every request with a fault of ours: called when a text does not end."""
        with self._lock:
            jobs = list(self._live.values())
        for job in jobs:
            job.end(InternalError(words))

    def describe(self) -> list[str]:
        """What is at hand, for a report on a standstill."""
        with self._lock:
            return [
                f"{name}: {len(job.results)} of {len(job.work.texts)} texts done" for name, job in self._live.items()
            ]

    def stats(self) -> LoopStats:
        """The picture that load reports, metrics and health are made from. A step is a text."""
        now = time.monotonic()
        with self._lock:
            waiting = [job for job in self._live.values() if not job.results]
            began = self._began
            return LoopStats(
                running=len(self._live) - len(waiting),
                waiting=len(waiting),
                waiting_uncached_tokens=sum(len(text.ids) for job in waiting for text in job.work.texts),
                queue_age_ms=max((now - job.work.arrival_s for job in waiting), default=0.0) * 1e3,
                step_age_ms=0.0 if began is None else (now - began) * 1e3,
                steps=self._texts,
                prompt_tokens=self._tokens,
                lookups=self._requests,
            )

    def close(self, timeout_s: float = 0.0, step_s: float = 0.0) -> bool:
        """Take no more, let what lives end within the timeout, fail the rest; whether the thread has ended."""
        with self._lock:
            self._closing = True
            self._lock.wait_for(lambda: not self._live, timeout_s)
            left = list(self._live.values())
            self._ended = True
            self._lock.notify_all()
        for job in left:
            job.end(Unavailable("the worker is shutting down: send the request to another one"))
        if self._thread.is_alive():
            self._thread.join(step_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._jobs or self._ended)
                if self._ended:
                    return
                job = self._jobs.popleft()
                self._began = time.monotonic()
            done = self._turn(job)
            with self._lock:
                self._began = None
                if not done:
                    self._jobs.append(job)
                else:
                    del self._live[job.work.request_id]
                self._lock.notify_all()

    def _turn(self, job: _Job) -> bool:
        """One text of one request; whether the request has ended."""
        work = job.work
        if job.future.done():
            return True
        if work.deadline_s is not None and time.monotonic() > work.deadline_s:
            job.end(DeadlineExceeded("the request's deadline passed before all its texts were done"))
            return True
        text = work.texts[len(job.results)]
        try:
            job.results.append(work.run(text))
        except EngineError as error:
            job.end(error)
            return True
        except Exception as error:  # costs its own request only
            logger.exception("a text of %s failed", work.request_id)
            job.end(InternalError(f"the model failed on a text: {type(error).__name__}"))
            return True
        self._texts += 1
        self._tokens += len(text.ids)
        if len(job.results) < len(work.texts):
            return False
        if self._observe is not None:
            self._observe(time.monotonic() - work.arrival_s)
        job.end(None)
        return True
