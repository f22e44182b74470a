"""The ranks that share one model: how their parts are put together.

`Alone` is the group of one. The group of several processes is `parallel.Ranks`.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Group(Protocol):
    """Collective operations of one step, queued like everything else. All ranks call them in the same order."""

    rank: int
    size: int

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts [rows, width], the same bits on each rank. May be `part` itself."""

    def join(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """All ranks' columns side by side, cut to `width`: [rows, width] from [rows, about width / size]."""


class Alone:
    """The group of one."""

    rank = 0
    size = 1

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The part."""
        return part

    def join(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """The part."""
        return part
