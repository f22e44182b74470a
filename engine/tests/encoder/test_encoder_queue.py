"""Requests for an encoder take turns, end once each, and cost nobody else anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest
from branchline.engine.encoder import EncoderQueue, Text, Work
from branchline.engine.encoder.queue import Array
from branchline.engine.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)

LIMIT = 60


class Gated:
    """What is done with a text here: noted, then held until let go."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def __call__(self, text: Text) -> Array:
        self.seen.append(text.ids[0])
        self.began.release()
        assert self.gate.acquire(timeout=LIMIT)
        if text.ids[0] == 666:
            raise ValueError("poison")
        return np.array([text.ids[0]], np.float32)

    def let(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()

    def work(self, name: str, *ids: int, deadline_s: float | None = None) -> Work:
        return Work(name, tuple(Text((one,)) for one in ids), self, deadline_s)


@pytest.fixture
def run() -> Gated:
    return Gated()


@pytest.fixture
def queue(run: Gated) -> Iterator[EncoderQueue]:
    made = EncoderQueue(max_queued=2)
    made.start()
    yield made
    run.let(1000)
    assert made.close(step_s=LIMIT)


def test_a_short_request_passes_a_long_one(queue: EncoderQueue, run: Gated) -> None:
    long = queue.submit(run.work("long", 1, 2, 3, 4))
    assert run.began.acquire(timeout=LIMIT)
    short = queue.submit(run.work("short", 10))
    run.let(5)
    assert [float(one[0]) for one in long.result(LIMIT)] == [1, 2, 3, 4]
    assert [float(one[0]) for one in short.result(LIMIT)] == [10]
    assert run.seen.index(10) < run.seen.index(3)


def test_a_fault_costs_its_own_request_only(queue: EncoderQueue, run: Gated) -> None:
    bad, good = queue.submit(run.work("bad", 666, 1)), queue.submit(run.work("good", 5))
    run.let(3)
    with pytest.raises(InternalError, match="ValueError"):
        bad.result(LIMIT)
    assert float(good.result(LIMIT)[0][0]) == 5
    assert 1 not in run.seen


def test_an_abort_and_a_cancelled_future_stop_before_the_next_text(queue: EncoderQueue, run: Gated) -> None:
    first, second = queue.submit(run.work("first", 1, 2)), queue.submit(run.work("second", 11, 12))
    assert run.began.acquire(timeout=LIMIT)
    assert (queue.abort("first"), queue.abort("nobody")) == (1, 0)
    second.cancel()
    last = queue.submit(run.work("last", 20))
    run.let(5)
    with pytest.raises(Cancelled):
        first.result(LIMIT)
    with pytest.raises(CancelledError):
        second.result(LIMIT)
    last.result(LIMIT)
    assert run.seen == [1, 20]


def test_a_deadline_that_passed_is_told(queue: EncoderQueue, run: Gated) -> None:
    late = queue.submit(run.work("late", 1, deadline_s=0.0))
    with pytest.raises(DeadlineExceeded):
        late.result(LIMIT)
    assert run.seen == []


def test_names_in_use_and_a_full_queue_are_refused(queue: EncoderQueue, run: Gated) -> None:
    queue.submit(run.work("running", 1))
    assert run.began.acquire(timeout=LIMIT)
    for name in ("a", "b", "c"):
        queue.submit(run.work(name, 1))
    with pytest.raises(InvalidArgument, match="'a'"):
        queue.submit(run.work("a", 1))
    with pytest.raises(ResourceExhausted) as full:
        queue.submit(run.work("d", 1))
    assert full.value.retry_after_ms
    stats = queue.stats()
    assert (stats.running + stats.waiting, stats.waiting_uncached_tokens) == (4, 4)
    assert len(queue.describe()) == 4


def test_draining_lets_live_requests_end_and_takes_no_more(queue: EncoderQueue, run: Gated) -> None:
    live = queue.submit(run.work("live", 1, 2))
    closer = threading.Thread(target=queue.close, args=(LIMIT, LIMIT))
    closer.start()
    run.let(2)
    assert len(live.result(LIMIT)) == 2
    closer.join(LIMIT)
    with pytest.raises(Unavailable):
        queue.submit(run.work("late", 1))


def test_what_drains_too_slowly_is_told(queue: EncoderQueue, run: Gated) -> None:
    held = queue.submit(run.work("held", 1))
    assert run.began.acquire(timeout=LIMIT)
    assert not queue.close(0.0, 0.0), "its text has not ended"
    with pytest.raises(Unavailable):
        held.result(LIMIT)


def test_giving_up_ends_all_and_the_queue_goes_on(queue: EncoderQueue, run: Gated) -> None:
    stuck = [queue.submit(run.work(name, 1)) for name in ("a", "b")]
    assert run.began.acquire(timeout=LIMIT)
    queue.give_up("a text has not ended")
    for one in stuck:
        with pytest.raises(InternalError, match="not ended"):
            one.result(LIMIT)
    run.let(5)
    assert float(queue.submit(run.work("next", 3)).result(LIMIT)[0][0]) == 3
    assert queue.abort_all() == 0
