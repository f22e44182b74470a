"""What every hook must do: fit a point that exists, in its version, with the arguments of its mode."""

from __future__ import annotations

from collections.abc import Callable

from branchline.engine.hooks import Hook, faults


def it_fits_its_point(make: Callable[[], Hook]) -> None:
    """Named, of the point's version, in a mode that it takes, callable with its arguments; and made anew each time."""
    hook = make()
    assert not faults(hook), "; ".join(faults(hook))
    assert make() is not hook, "two engines in one process would share it"


CHECKS = (it_fits_its_point,)
