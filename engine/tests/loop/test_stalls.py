"""A step that does not end: its requests are answered, nobody is let in, and the loop goes on once it ends."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from branchline.engine.errors import Unavailable
from branchline.engine.service.watchdog import Watchdog
from branchline.engine.types import Delta, FinishReason
from harness import EOS, Engine
from tiny import expected

PATIENCE_S = 60.0


def ids(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(EOS) for _ in range(length)]


class Stuck(Engine):
    """An engine whose next step waits for `go`, once `hold` was called."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.news = threading.Condition()
        self.go, self.inside = threading.Event(), threading.Event()
        self._run = self.executor.run

    def hold(self) -> None:
        """The next step does not end until `go` is set."""

        def run(batch: object) -> object:
            self.executor.run = self._run  # type: ignore[method-assign]
            self.inside.set()
            assert self.go.wait(PATIENCE_S)
            return self._run(batch)  # type: ignore[arg-type]

        self.executor.run = run  # type: ignore[method-assign,assignment]

    def take(self, step: int, deltas: list[Delta]) -> None:
        """Collect and wake."""
        with self.news:
            super().take(step, deltas)
            self.news.notify_all()

    def wait(self, name: str) -> None:
        """Until the request has ended."""
        with self.news:
            assert self.news.wait_for(lambda: self.ended(name), timeout=PATIENCE_S)

    def ended(self, name: str) -> bool:
        """Whether it has had its terminal message."""
        answer = self.answers.get((name, 0))
        return name in self.errors or (answer is not None and answer.finish is not None)


def test_requests_of_a_stuck_step_are_answered_and_the_loop_recovers() -> None:
    engine = Stuck(pages=128)
    engine.hold()
    engine.loop.start()
    engine.submit("a", ids(9, 1), max_tokens=8, ignore_eos=True)
    assert engine.inside.wait(PATIENCE_S)
    engine.submit("b", ids(9, 2), max_tokens=8, ignore_eos=True)  # arrives behind the stuck step
    assert engine.loop.give_up("a step has not ended") == 2
    assert engine.loop.give_up("a step has not ended") == 0, "each is told once"
    for name in ("a", "b"):
        assert isinstance(engine.errors[name], Unavailable) and engine.errors[name].retry_after_ms
    with pytest.raises(Unavailable, match="does not end"):
        engine.submit("c", ids(9, 3))
    engine.go.set()
    engine.loop.audit()  # waits for a turn
    engine.submit("c", ids(9, 3), max_tokens=8, ignore_eos=True)
    engine.wait("c")
    assert engine.answers["c", 0].token_ids == expected(ids(9, 3), 8)
    assert set(engine.errors) == {"a", "b"} and not {("a", 0), ("b", 0)} & set(engine.answers)
    engine.loop.audit()
    assert engine.loop.close()
    assert engine.counters()["protected"] == engine.counters()["private"] == 0


def test_closing_does_not_wait_for_a_step_that_does_not_end() -> None:
    engine = Stuck()
    engine.hold()
    engine.loop.start()
    engine.submit("a", ids(9, 1), max_tokens=8)
    assert engine.inside.wait(PATIENCE_S)
    assert engine.loop.close(drain_s=0.0, step_s=0.01) is False
    assert "shutting down" in engine.errors["a"].message
    engine.go.set()
    assert engine.loop.close() is True


def test_the_watchdog_reports_and_gives_up_once_a_stall(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Stuck(pages=128)
    engine.hold()
    engine.loop.start()
    watchdog = Watchdog(engine.loop, 5.0, str(tmp_path), faults=False)
    watchdog.start()
    engine.submit("stuck", ids(9, 1), n=2, max_tokens=8, ignore_eos=True)
    assert engine.inside.wait(PATIENCE_S)
    engine.clock.now += 60
    engine.wait("stuck")
    (report,) = watchdog.reports
    text = report.read_text()
    assert "stuck[0]: 9 tokens from 0 on" in text and "live stuck: 2 sequences" in text
    assert "engine-loop:" in text and "in run" in text, "and where its thread is"
    assert "report in" in caplog.text
    engine.go.set()
    engine.loop.audit()
    engine.submit("next", ids(9, 2), max_tokens=4, ignore_eos=True)
    engine.wait("next")
    assert engine.answers["next", 0].token_ids == expected(ids(9, 2), 4)
    assert len(watchdog.reports) == 1
    watchdog.stop()
    engine.loop.close()


def test_a_folder_that_can_not_be_written_still_gets_the_report_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Stuck()
    engine.hold()
    engine.loop.start()
    watchdog = Watchdog(engine.loop, 5.0, str(tmp_path / "absent"), faults=False)
    watchdog.start()
    engine.submit("a", ids(9, 1), max_tokens=8)
    assert engine.inside.wait(PATIENCE_S)
    engine.clock.now += 60
    engine.wait("a")
    assert "can't be written" in caplog.text and "live a: 1 sequences" in caplog.text
    engine.go.set()
    watchdog.stop()
    engine.loop.close()


def test_a_request_that_is_leaving_frees_its_place_before_the_step_ends() -> None:
    engine = Stuck(max_running_requests=1, max_queued_requests=2)
    engine.hold()
    engine.loop.start()
    engine.submit("runs", ids(5), max_tokens=4, ignore_eos=True)
    assert engine.inside.wait(PATIENCE_S)
    for name in ("sibling-1", "sibling-2"):
        engine.submit(name, ids(5, 1), max_tokens=2, ignore_eos=True)
    with pytest.raises(Exception, match="max_queued_requests is 2"):
        engine.submit("sibling-3", ids(5, 1))
    assert engine.loop.abort("sibling-1") == engine.loop.abort("sibling-2") == 1
    engine.submit("other", ids(5, 2), max_tokens=2, ignore_eos=True)
    engine.go.set()
    for name in ("runs", "sibling-1", "sibling-2", "other"):
        engine.wait(name)
    assert engine.answers["other", 0].token_ids == expected(ids(5, 2), 2)
    finish = engine.answers["sibling-1", 0].finish
    assert finish is not None and finish.reason is FinishReason.ABORT
    engine.loop.close()
    assert engine.loop._places == 0
