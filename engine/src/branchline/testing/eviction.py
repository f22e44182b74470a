"""What every eviction policy must do: rank by use and priority, in an order."""

from __future__ import annotations

from collections.abc import Callable

from branchline.engine.cache.eviction import EvictionPolicy, table

Make = Callable[[], EvictionPolicy]


def ranks_are_in_range_and_never_fall(make: Make) -> None:
    """0 to 255, and not less for more use or a higher priority; the same when asked again."""
    first = table("this one", make())
    assert first == table("this one", make()), "the ranks differ from one call to the next"


CHECKS = (ranks_are_in_range_and_never_fall,)
