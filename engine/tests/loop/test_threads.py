"""The loop on its own thread: submitting, aborting, draining, events. Waits on conditions, never on time."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
from branchline.engine.cache.feed import EventBatch
from branchline.engine.types import Delta, FinishReason
from harness import EOS, Engine
from tiny import expected

PATIENCE_S = 60.0


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


class Watched(Engine):
    """An engine whose sink can be waited on."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.news = threading.Condition()

    def take(self, step: int, deltas: list[Delta]) -> None:
        """Collect and wake."""
        with self.news:
            super().take(step, deltas)
            self.news.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds after some delta."""
        with self.news:
            assert self.news.wait_for(condition, timeout=PATIENCE_S)

    def ended(self, name: str) -> bool:
        """Whether sequence 0 of the request has its finish."""
        answer = self.answers.get((name, 0))
        return answer is not None and answer.finish is not None


def test_requests_from_many_threads_are_all_answered_rightly() -> None:
    engine = Watched(pages=200, max_running_requests=16)
    engine.loop.start()

    def client(number: int) -> None:
        for turn in range(5):
            name = f"{number}-{turn}"
            engine.submit(name, ids(12, number), max_tokens=8, ignore_eos=True)
            engine.wait(lambda name=name: engine.ended(name))  # type: ignore[misc]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    engine.loop.audit()
    engine.loop.close()
    for number in range(8):
        for turn in range(5):
            assert engine.answers[f"{number}-{turn}", 0].token_ids == expected(ids(12, number), 8)
    assert sum(engine.counters().values()) == 200


def test_an_idle_loop_takes_no_steps() -> None:
    engine = Watched()
    engine.loop.start()
    engine.submit("a", ids(5), max_tokens=3, ignore_eos=True)
    engine.wait(lambda: engine.ended("a"))
    engine.loop.audit()
    steps = engine.loop.stats().steps
    engine.loop.audit()
    assert engine.loop.stats().steps <= steps + 1
    assert engine.executor.steps == 3
    engine.loop.close()


def test_an_abort_from_another_thread_ends_a_long_request() -> None:
    engine = Watched(pages=2000, context_length=8000)
    engine.loop.start()
    engine.submit("long", ids(5), max_tokens=7000, ignore_eos=True)
    engine.wait(lambda: ("long", 0) in engine.answers)
    assert engine.loop.abort("long") == 1
    engine.wait(lambda: engine.ended("long"))
    finish = engine.answers["long", 0].finish
    assert finish is not None and finish.reason is FinishReason.ABORT and finish.completion_tokens < 7000
    engine.loop.close()


def test_close_drains_what_runs() -> None:
    engine = Watched()
    engine.loop.start()
    engine.submit("a", ids(5), max_tokens=40, ignore_eos=True)
    engine.loop.close(drain_s=PATIENCE_S)
    assert engine.answers["a", 0].token_ids == expected(ids(5), 40)


def test_close_aborts_what_does_not_end_in_time() -> None:
    engine = Watched(pages=2000, context_length=8000)
    engine.loop.start()
    engine.submit("a", ids(5), max_tokens=7900, ignore_eos=True)
    engine.wait(lambda: ("a", 0) in engine.answers)
    engine.loop.close(drain_s=0.0)
    finish = engine.answers["a", 0].finish
    assert finish is not None and finish.reason is FinishReason.ABORT
    assert engine.counters()["protected"] == engine.counters()["private"] == 0


def test_abort_all_and_abort_of_a_sink_count_what_was_alive() -> None:
    engine = Engine()
    other: list[Delta] = []
    for number in range(3):
        engine.submit(f"r{number}", ids(5, number), max_tokens=50)
    from branchline.engine.types import Request, SamplingParams

    def sink(step: int, deltas: list[Delta]) -> None:
        other.extend(deltas)

    engine.loop.submit(Request("other", (1, 2), SamplingParams(max_tokens=50)), sink)
    engine.step()
    assert engine.loop.abort_sink(sink) == 1
    assert engine.loop.abort_sink(sink) == 0, "already being aborted"
    assert engine.loop.abort_all() == 3
    engine.finish()
    assert other[-1].finish is not None and other[-1].finish.message == "its stream ended"
    assert engine.loop.abort_all() == 0


def resident(batches: list[EventBatch]) -> set[int]:
    """What a follower of the batches believes to be cached; checks the numbering on the way."""
    known: set[int] = set()
    for number, batch in enumerate(batches):
        assert batch.sequence == number and batch.epoch == batches[0].epoch
        for event in batch.events:
            if event[0] == "stored":
                assert not known & set(event[2]), "stored twice"
                known |= set(event[2])
            elif event[0] == "removed":
                assert set(event[1]) <= known, "removed what was not there"
                known -= set(event[1])
            else:
                known.clear()
    return known


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_whenever_one_subscribes_events_lead_to_the_resident_blocks(backend: str) -> None:
    engine = Engine(pages=40, backend=backend, max_running_requests=4)
    followers: list[list[EventBatch]] = []
    generator = random.Random(5)
    for number in range(40):
        engine.submit(f"r{number}", ids(generator.randrange(1, 40), generator.randrange(9)), max_tokens=5)
        if number % 7 == 0:
            followers.append([])
            engine.loop.subscribe_events(followers[-1].append)
        engine.step(generator.randrange(4))
        if number == 25:
            engine.loop.flush()
    engine.finish()
    assert engine.loop.stats().evicted_pages > 0
    truth = {hash_ for event in engine.cache.snapshot() for hash_ in event[2]}
    assert truth
    for follower in followers:
        assert resident(follower) == truth
    assert len({follower[0].epoch for follower in followers}) == len(followers)


def test_a_subscription_opens_with_a_snapshot_and_ends_when_told() -> None:
    engine = Engine()
    engine.run("a", ids(20), max_tokens=1)
    batches: list[EventBatch] = []
    unsubscribe = engine.loop.subscribe_events(batches.append)
    assert [(batch.snapshot, batch.last, batch.epoch) for batch in batches] == [(True, True, 5)]
    engine.run("b", ids(20, 1), max_tokens=1)
    assert len(batches) > 1 and not batches[-1].snapshot
    count = len(batches)
    unsubscribe()
    engine.run("c", ids(20, 2), max_tokens=1)
    assert len(batches) == count


def test_a_subscriber_that_raises_is_dropped_and_the_others_go_on() -> None:
    engine = Engine()
    good: list[EventBatch] = []
    calls: list[int] = []

    def bad(batch: EventBatch) -> None:
        calls.append(batch.sequence)
        if not batch.snapshot:
            raise BrokenPipeError

    engine.loop.subscribe_events(bad)
    engine.loop.subscribe_events(good.append)
    for number in range(3):
        engine.run(f"r{number}", ids(20, number), max_tokens=1)
    assert calls == [0, 1]
    assert resident(good) == {hash_ for event in engine.cache.snapshot() for hash_ in event[2]}


def test_the_stats_balance_and_tell_waiting_from_running() -> None:
    engine = Engine(max_running_requests=2)
    for number in range(5):
        engine.submit(f"r{number}", ids(10, number), max_tokens=9, ignore_eos=True)
    arrived = engine.loop.stats()
    assert (arrived.running, arrived.waiting, arrived.waiting_uncached_tokens) == (0, 5, 50)
    engine.clock.now += 1.0
    engine.step()
    engine.clock.now += 2.0
    stats = engine.loop.stats()
    assert (stats.running, stats.waiting, stats.waiting_uncached_tokens) == (2, 3, 30)
    assert stats.step_age_ms == 2000.0
    assert stats.pages_free + stats.pages_evictable + stats.pages_protected + stats.pages_private == stats.pages_total
    engine.finish()
    stats = engine.loop.stats()
    assert (stats.running, stats.waiting, stats.step_age_ms, stats.queue_age_ms) == (0, 0, 0.0, 0.0)
    assert stats.scheduler_ms_per_step > 0


def test_answers_are_counted_before_they_are_sent() -> None:
    """Whoever asks for statistics or cache events because an answer came finds that answer in them."""

    class Asking(Watched):
        seen: list[tuple[int, int, int]]

        def take(self, step: int, deltas: list[Delta]) -> None:
            if any(delta.finish is not None for delta in deltas):
                stats = self.loop.stats()
                self.seen.append((stats.running, stats.prompt_tokens, stats.pages_evictable))
            super().take(step, deltas)

    engine = Asking(pages=50)
    engine.seen = []
    engine.run("a", ids(12), max_tokens=3, ignore_eos=True)
    engine.run("b", ids(12, 1), max_tokens=3, ignore_eos=True)
    assert [(running, prompt) for running, prompt, _ in engine.seen] == [(0, 12), (0, 24)]
    assert 0 < engine.seen[0][2] < engine.seen[1][2]


def test_whoever_asks_for_something_is_answered_whatever_fails_before(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Watched()
    faults: list[str] = []

    def broken(now: float) -> None:
        faults.append("expire")
        raise OSError("it broke")

    def raising() -> None:
        faults.append("posted")
        raise OSError("it broke")

    engine.loop._thread = threading.Thread(target=engine.loop._main, daemon=True)  # started when the inbox is full
    engine.submit("a", ids(5), max_tokens=3)
    engine.loop.post(raising)
    monkeypatch.setattr(engine.loop._leases, "expire", broken)
    flushed: list[int] = []
    caller = threading.Thread(target=lambda: flushed.append(engine.loop.flush()), daemon=True)
    caller.start()
    while len(engine.loop._inbox.calls) < 2:
        caller.join(0.001)
    engine.loop._thread.start()
    caller.join(PATIENCE_S)
    assert flushed == [0] and {"expire", "posted"} <= set(faults)
    engine.wait(lambda: "a" in engine.errors)
    monkeypatch.undo()
    engine.submit("b", ids(5), max_tokens=3, ignore_eos=True)
    engine.wait(lambda: engine.ended("b"))
    engine.loop.close()
