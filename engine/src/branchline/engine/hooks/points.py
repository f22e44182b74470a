"""The points where hooks may stand: a table, each with its version, its arguments and what a failing hook ends.

Owns what plugin authors rely on. Hooks stand at these and nowhere else; the code around a point may change freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Mode(StrEnum):
    """How a hook stands to its point."""

    BEFORE = "before"  # hook(*given), its result is ignored
    AFTER = "after"  # hook(result, *given), its result is ignored
    AROUND = "around"  # hook(proceed, *given) -> result; it calls proceed(*given) or does not
    REPLACE = "replace"  # hook(*given) -> result, in the place of the engine's own


class Fault(StrEnum):
    """What a hook's exception ends."""

    START = "start"  # the worker does not start
    REQUEST = "request"  # the request, or of a step those requests whose row fails alone, too
    NOTHING = "nothing"  # it is logged


@dataclass(frozen=True, slots=True)
class Point:
    """One hook point. `given` are the positional arguments, `result` says what comes back."""

    name: str
    version: int
    given: tuple[str, ...]
    result: str
    fault: Fault
    doc: str
    modes: tuple[Mode, ...] = tuple(Mode)

    def arguments(self, mode: Mode) -> tuple[str, ...]:
        """What a hook of this mode is called with."""
        first = {Mode.AFTER: ("result",), Mode.AROUND: ("proceed",)}.get(mode, ())
        return (*first, *self.given)


_NOT_REPLACED = (Mode.BEFORE, Mode.AFTER, Mode.AROUND)
POINTS = {
    point.name: point
    for point in (
        Point(
            "engine.start", 1, ("config",), "service.assembly.Engine", Fault.START,
            "options are decided and nothing is loaded; afterwards all is built and nothing serves yet", _NOT_REPLACED,
        ),
        Point(
            "weights.loaded", 1, ("model",), "model.source.LoadedModel", Fault.START,
            "the checkpoint is checked and its tensors can be read, before an executor is built from them",
        ),
        Point(
            "request.admission", 1, ("request",), "types.Request with the same request_id", Fault.REQUEST,
            "a request has come and is in no queue; an EngineError refuses it with its own status; on any thread",
        ),
        Point(
            "scheduler.step", 1, ("step",), "the executor's logits", Fault.REQUEST,
            "the scheduler has chosen a step (scheduler.batch.Step) that the executor is to run; on the loop's thread",
        ),
        Point(
            "sampling", 1, ("logits", "step"), "list[types.RowResult], one a plan of the step", Fault.REQUEST,
            "the step's logits are there; on the loop's thread",
        ),
        Point(
            "request.end", 1, ("request", "delta"), "types.Delta that ends the same sequence", Fault.REQUEST,
            "a sequence ends (delta.finish) or its request fails (delta.error), not told yet; on the loop's thread",
        ),
        Point(
            "engine.stop", 1, ("engine",), "nothing", Fault.NOTHING,
            "no request is taken any more; the loop and the models are about to be closed", _NOT_REPLACED,
        ),
    )
}  # fmt: skip
"""Every hook point by name."""


class Hook(Protocol):
    """What the class or factory of a hook makes, without arguments, once an engine.

    It is called as its `mode` says. `point_version` is the version of the point that it is written for.
    """

    api_version: int
    point: str
    point_version: int
    mode: str
    priority: int  # higher runs first and stands further out; equal ones in the order of their registration
