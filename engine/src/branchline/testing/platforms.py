"""What every platform must do: name its devices without raising, and give room that shrinks as weights grow."""

from __future__ import annotations

import math
from collections.abc import Callable

from branchline.engine.platforms import Platform
from branchline.engine.service.hardware import ELEMENT_BYTES


def it_names_its_devices_and_defaults(make: Callable[[], Platform]) -> None:
    """A list of words, perhaps empty; an executor and a dtype."""
    platform = make()
    assert all(isinstance(one, str) and one for one in platform.devices())
    assert platform.executors and platform.device and isinstance(platform.rank, int)
    assert platform.dtype in ELEMENT_BYTES, f"{platform.dtype!r} is none of {', '.join(ELEMENT_BYTES)}"


def room_shrinks_with_the_weights_and_is_never_negative(make: Callable[[], Platform]) -> None:
    """Only where there is a device."""
    platform = make()
    if not platform.devices():
        return
    rooms = [platform.room(weights) for weights in (0, 1 << 30, 1 << 60)]
    assert all(math.isfinite(room) and room >= 0 for room in rooms)
    assert rooms[2] == 0.0, "there is room beside an exbibyte of weights"


CHECKS = (it_names_its_devices_and_defaults, room_shrinks_with_the_weights_and_is_never_negative)
