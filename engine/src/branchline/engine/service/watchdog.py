"""Notices a step that does not end: writes a report, answers its requests, until the loop turns again.

Owns a thread and the report's file. Judges by progress alone: the age of the last completed step while work exists.
Health follows the same figure (server.py). Must not touch the executor nor end the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Protocol

from branchline.engine.scheduler.load import LoopStats

logger = logging.getLogger(__name__)

GIL_GRACE_S = 10.0  # beyond the timeout, after which a thread that keeps all others out is shown by its stack


class Watched(Protocol):
    """What turns in steps: the loop of a model that generates, or the queue of one that embeds."""

    def stats(self) -> LoopStats: ...
    def describe(self) -> list[str]: ...
    def give_up(self, message: str, /) -> object: ...


class Watchdog:
    """Looks at the loop a few times a timeout. `reports` lists the files written so far."""

    def __init__(self, loop: Watched, timeout_s: float, folder: str = "", *, faults: bool = True) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._folder = Path(folder or tempfile.gettempdir())
        self._faults = faults
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.reports: list[Path] = []

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more. Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._faults:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        stalled = False
        while not self._stop.wait(min(self._timeout_s / 4, 1.0)):
            if self._faults:  # its own C thread tells, should none of Python's be let run
                faulthandler.dump_traceback_later(self._timeout_s + GIL_GRACE_S)
            late = self._loop.stats().step_age_ms > self._timeout_s * 1e3
            if late and not stalled:
                self._report()
            if late:  # also those accepted between the stall and its notice
                self._loop.give_up(f"a step of the worker has not ended for {self._timeout_s:g} s; try again")
            stalled = late

    def _report(self) -> None:
        lines = [f"no step has ended for {self._timeout_s:g} s", *self._loop.describe(), "", *stacks()]
        path = self._folder / f"branchline-stall-{os.getpid()}-{len(self.reports) + 1}.txt"
        try:
            path.write_text("\n".join(lines) + "\n")
        except OSError as error:
            logger.error("the report on a stalled step can't be written to %s: %s\n%s", path, error, "\n".join(lines))
            return
        self.reports.append(path)
        logger.error("no step has ended for %g s; report in %s", self._timeout_s, path)


def stacks() -> list[str]:
    """Where every thread is now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [time.strftime("threads at %Y-%m-%dT%H:%M:%S%z")]
    for ident, frame in sys._current_frames().items():
        lines.append(f"{names.get(ident, ident)}:")
        with contextlib.suppress(Exception):  # a frame may end while it is read
            lines += [line.rstrip("\n") for line in traceback.format_stack(frame)]
    return lines
