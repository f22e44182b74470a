"""The compiling process for real: what it makes, and that nothing gets away from it."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.grammar.base import GrammarContext
from branchline.engine.grammar.hearth import Bounds, Hearth, Report
from branchline.engine.service import assembly
from branchline.engine.types import GrammarKind
from grammars import byte_backend

PLUGIN = '''
"""A backend that does as its text says."""
import os, time
from branchline.engine.grammar.base import BaseGrammarBackend
from branchline.engine.types import GrammarKind
from branchline.registry import grammar_backends

@grammar_backends.register("wild", api_version=1)
class Wild(BaseGrammarBackend):
    name = "wild"
    kinds = frozenset({GrammarKind.REGEX})

    def compile(self, kind, text):
        if text == "spin":
            while True:
                pass
        if text == "sleep":
            time.sleep(600)
        if text == "hoard":
            held = []
            while True:
                held.append(bytearray(64 << 20))
        if text == "crash":
            os.abort()
        if text == "raise":
            raise RuntimeError("it broke")
        if text == "deep":
            def down(n):
                return down(n + 1)
            down(0)
        return text
'''


class Caller:
    """Submits and waits."""

    def __init__(self, hearth: Hearth) -> None:
        self.hearth = hearth

    def begin(self, text: str, backend: str = "wild") -> tuple[int, threading.Event, list[Report]]:
        reports: list[Report] = []
        came = threading.Event()

        def take(report: Report) -> None:
            reports.append(report)
            came.set()

        return self.hearth.submit(backend, GrammarKind.REGEX, text, take), came, reports

    def call(self, text: str, backend: str = "wild") -> Report:
        _, came, reports = self.begin(text, backend)
        assert came.wait(60), "no report"
        return reports[0]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "wild_backend.py").write_text(PLUGIN)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{folder}:{before}"
    bounds = Bounds(wall_s=5.0, memory_bytes=256 << 20, children=2)
    hearth = Hearth(byte_backend().context, ("llguidance", "wild"), bounds, ("wild_backend",))
    os.environ["PYTHONPATH"] = f"{folder}:{before}"
    hearth.start()
    yield Caller(hearth)
    hearth.close()
    os.environ["PYTHONPATH"] = before


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(one) for one in file.read().split()]


def until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it does not come to pass"
        time.sleep(0.01)


def test_a_constraint_is_compiled_to_what_the_backend_itself_makes(caller: Caller) -> None:
    report = caller.call("[ab]{2}", "llguidance")
    assert report["compiled"] == byte_backend().compile(GrammarKind.REGEX, "[ab]{2}")
    assert report["ms"] > 0


def test_a_refusal_keeps_its_words(caller: Caller) -> None:
    report = caller.call("(", "llguidance")
    assert "unclosed" in report["invalid"] or "position" in report["invalid"]
    assert caller.call("(?<=a)b", "llguidance")["keyword"] == "pattern"


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("spin", {"limit": "time"}),
        ("sleep", {"limit": "time"}),
        ("hoard", {"limit": "memory"}),
        ("crash", {"limit": "memory"}),
        ("raise", {"fault": "RuntimeError: it broke"}),
    ],
)
def test_what_goes_wrong_is_told_and_gone(caller: Caller, text: str, report: Report) -> None:
    found = caller.call(text)
    del found["job"]
    assert found == report
    assert caller.hearth.pid is not None
    until(lambda: children_of(caller.hearth.pid or 0) == [])


def test_endless_recursion_is_a_refusal(caller: Caller) -> None:
    assert caller.call("deep")["keyword"] == "depth"


def test_a_cancelled_compilation_is_killed_and_says_nothing(caller: Caller) -> None:
    number, came, _ = caller.begin("sleep")
    until(lambda: len(children_of(caller.hearth.pid or 0)) == 1)
    caller.hearth.cancel(number)
    until(lambda: children_of(caller.hearth.pid or 0) == [])
    assert not came.is_set()
    caller.hearth.cancel(number)
    assert caller.call("fine")["compiled"] == "fine"


def test_one_that_hangs_does_not_hold_up_the_next(caller: Caller) -> None:
    number, came, _ = caller.begin("sleep")
    assert caller.call("fine")["compiled"] == "fine"
    assert not came.is_set()
    caller.hearth.cancel(number)


def test_a_process_that_dies_is_replaced_and_its_jobs_are_told(caller: Caller) -> None:
    pid = caller.hearth.pid
    assert pid is not None
    _, came, reports = caller.begin("sleep")
    until(lambda: len(children_of(pid)) == 1)
    child = children_of(pid)[0]
    os.kill(pid, 9)
    assert came.wait(30)
    assert "ended" in reports[0]["fault"]
    assert caller.call("fine")["compiled"] == "fine"
    assert caller.hearth.pid not in (None, pid)
    until(lambda: not os.path.exists(f"/proc/{child}"))  # its own alarm ends the orphan


def test_a_closed_one_takes_nothing(caller: Caller) -> None:
    hearth = Hearth(byte_backend().context, ("llguidance",), Bounds())
    hearth.close()
    assert "shutting down" in Caller(hearth).call("a", "llguidance")["fault"]
    hearth.close()


def test_a_backend_that_can_not_be_built_fails_its_jobs() -> None:
    hearth = Hearth(byte_backend().context, ("no-such-backend",), Bounds())
    assert "can't start" in Caller(hearth).call("a", "no-such-backend")["fault"]
    hearth.close()


def roomy() -> GrammarContext:
    """A context whose setup no socket's buffer holds."""
    context = byte_backend().context
    return replace(context, tokenizer_json=context.tokenizer_json + b" " * (4 << 20))


def test_a_process_that_ends_before_it_has_its_setup_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    hearth = Hearth(roomy(), ("llguidance",), Bounds(wall_s=30.0))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            hearth.start()
        assert "fault" in Caller(hearth).call("[ab]{2}", "llguidance")
    assert "compiled" in Caller(hearth).call("[ab]{2}", "llguidance")
    hearth.close()


def test_a_process_that_can_not_start_ends_the_start_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    context = roomy()
    spec = SimpleNamespace(tokenizer=SimpleNamespace(json=context.tokenizer_json), eos_ids=context.eos_ids)
    for executable in ("/bin/false", "/nowhere/python"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(LoadError, match="compiles constraints can't be started"):
            assembly.build_grammars(EngineConfig(grammar_backend="llguidance"), spec, context.vocab_size, None)  # type: ignore[arg-type]


def test_large_texts_and_reports_pass_each_other_through_small_buffers(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = socket.socketpair

    def small() -> tuple[socket.socket, socket.socket]:
        ends = whole()
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return ends

    monkeypatch.setattr(socket, "socketpair", small)
    hearth = Hearth(byte_backend().context, ("wild",), Bounds(wall_s=30.0), ("wild_backend",))
    texts = [str(number) * 1_000_000 for number in range(8)]
    replies: list[Report] = []
    threads = [
        threading.Thread(target=lambda text=text: replies.append(Caller(hearth).call(text)), daemon=True)  # type: ignore[misc]
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(reply["compiled"] for reply in replies) == texts
    hearth.close()
