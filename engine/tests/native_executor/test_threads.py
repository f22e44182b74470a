"""Kernel threads: as many as asked for, asleep when nothing runs, gone after close."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from .driver import Line, batch_of, build, tiny_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def states() -> list[str]:
    """State letters of this process's kernel threads; R is running, S asleep."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if name.startswith("branchline-"):
            found.append(rest.split()[0])
    return found


def wait_for(wanted: list[str]) -> None:
    """Until the threads are in these states; fails after 5 seconds."""
    deadline = time.monotonic() + 5
    while states() != wanted and time.monotonic() < deadline:
        time.sleep(0.001)
    assert states() == wanted


def test_threads_sleep_between_steps_and_end_with_the_executor() -> None:
    before = states()
    executor = build(tiny_model("Q8_0"), threads=4)
    line = Line(list(range(40)))
    for _ in range(5):
        executor.run(batch_of(16, [(line, list(range(50)))]))
    wait_for(["S"] * (len(before) + 3))
    executor.close()
    wait_for(before)


def test_one_thread_starts_none() -> None:
    before = len(states())
    executor = build(tiny_model("Q8_0"), threads=1)
    assert len(states()) == before
    executor.close()
