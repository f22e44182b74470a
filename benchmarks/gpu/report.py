"""Rows of a check as they come, sections with a time of their own, and the JSON of all of it."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

TOTAL_S = 335.0  # of the six minutes; the rest is for Python to start and end
END_S = 2.0  # kept for writing the JSON


class OutOfTime(BaseException):
    """A section's time is over. No Exception: a library that catches those must not catch this."""


class Report:
    """Facts, measurements, comparisons and what is absent. Every row is printed when it is known."""

    def __init__(self, out: Path | None, *, by_cpu: bool = False) -> None:
        """`by_cpu`: seconds are of this process's work, so that a rehearsal on a busy machine is still whole."""
        self._out = out
        self._timer = signal.ITIMER_PROF if by_cpu else signal.ITIMER_REAL
        self._clock: Callable[[], float] = time.process_time if by_cpu else time.monotonic
        self._started = self._clock()
        self._section = ""
        self._ends = self._started + TOTAL_S
        self.rows: list[dict[str, Any]] = []

    @property
    def passed(self) -> bool:
        """Whether no comparison failed and no section broke."""
        return all(row.get("passed", True) for row in self.rows)

    def left_s(self) -> float:
        """Seconds that this section has."""
        return self._ends - self._clock()

    def fact(self, name: str, value: object) -> None:
        """Something about the machine."""
        self._add(name, f"{value}", value=value)

    def absent(self, name: str, why: str) -> None:
        """Something that could not be looked at, and why."""
        self._add(name, f"absent: {why}", absent=why)

    def figure(self, name: str, value: float, unit: str, **more: object) -> None:
        """A measurement; `more` stands in the JSON and, shortly, in the table."""
        told = "".join(f"  {key} {_short(one)}" for key, one in more.items())
        self._add(name, f"{_short(value)} {unit}{told}", value=value, unit=unit, **more)

    def check(self, name: str, worst: float, allowed: float, **more: object) -> None:
        """A comparison: the worst difference found and the one allowed. NaN fails."""
        passed = bool(worst <= allowed)
        told = f"{'pass' if passed else 'FAIL'}  worst {worst:.2e}, allowed {allowed:.0e}"
        self._add(name, told, worst=worst, allowed=allowed, passed=passed, **more)

    @contextmanager
    def section(self, name: str, seconds: float) -> Iterator[None]:
        """A part that ends after `seconds` or with the whole check's time. What breaks in it is a row, not the end."""
        now = self._clock()
        whole = self._started + TOTAL_S - END_S - now
        self._section, self._ends = name, now + min(seconds, whole)
        print(f"-- {name}", flush=True)
        try:
            with _alarm(self._timer, max(min(seconds, whole), 0.01)):
                yield
        except OutOfTime:
            self.absent("rest of the section", f"its {min(seconds, whole):.0f} s are over")
        except Exception as error:  # whatever breaks here must not keep the other sections from being seen
            last = traceback.extract_tb(sys.exc_info()[2])[-1]
            what = f"{type(error).__name__}: {error}"[:400]
            self._add("section", f"FAIL  {what}", passed=False, error=what, at=f"{last.filename}:{last.lineno}")
        self._add("seconds", f"{self._clock() - now:.1f} s", seconds=round(self._clock() - now, 2))
        self.write()

    def write(self) -> None:
        """The JSON, if it was asked for."""
        if self._out is not None:
            text = json.dumps({"passed": self.passed, "rows": self.rows}, indent=1, default=str)
            self._out.write_text(text + "\n")

    def _add(self, name: str, told: str, **values: object) -> None:
        self.rows.append({"section": self._section, "name": name, **values})
        print(f"{name:58} {told}", flush=True)


@contextmanager
def _alarm(timer: int, seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside once the time is over; a call into a library ends first."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    number = signal.SIGALRM if timer == signal.ITIMER_REAL else signal.SIGPROF
    before = signal.signal(number, ring)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
